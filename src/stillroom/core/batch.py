"""What scheduler and runner exchange: the scheduler decides a `Batch`, the runner answers with a `StepResult`.

Arrays are views of the scheduler's state, valid until the step's result is handed back.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stillroom.core.ids import RequestId


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to pick the next token of one sequence."""

    temperature: float
    """0 is greedy; the other fields are then unused."""
    top_p: float
    uniform: float
    """The step's random number, in [0, 1)."""


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The part of one sequence that runs in this step: its tokens [first_position, first_position + n)."""

    request_id: RequestId
    token_ids: NDArray[np.int64]
    """Shape [n]: the tokens to compute."""
    first_position: int
    slots: NDArray[np.int64]
    """Shape [first_position + n]: the slot of every token attended to, in order of position. The last n are written."""
    sample: SampleSpec | None
    """None for a piece of a prompt that is not its last: nothing is sampled."""

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step."""

    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(sequence.num_scheduled_tokens for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled token of every sequence of the batch that asked for one."""

    token_ids: Mapping[RequestId, int]
