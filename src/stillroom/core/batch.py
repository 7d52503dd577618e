"""What scheduler and runner exchange: the scheduler decides a `Batch`, the runner answers with a `StepResult`.

Arrays are views of the scheduler's state, valid until the step's result is handed back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stillroom.core.ids import BlockId, RequestId
from stillroom.core.request import SamplingParams, TokenConstraint


class SampleSpec(NamedTuple):
    """How to pick the next token of one request."""

    request_id: RequestId
    params: SamplingParams
    uniform: float
    """The step's random number, in [0, 1); unused where sampling is greedy."""
    token_ids: NDArray[np.int64]
    """Shape [n]: all tokens so far."""
    num_prompt_tokens: int
    """How many of them are the prompt; the others are the answer."""
    forbidden: frozenset[int] = frozenset()
    """Tokens that must not be picked in this step."""
    constraint: TokenConstraint | None = None
    """Asked once for the tokens that may be picked, after the step's arithmetic has been started."""


DEVIATION_LAYERS = 2
"""Layers that a probe runs; it reports on the last of them."""


@dataclass(frozen=True, slots=True)
class MassRequest:
    """A wish to know where the attention of some tokens of a sequence falls."""

    groups: NDArray[np.int64]
    """Shape [k]: the chunk of the prompt that each slot of the context belongs to, in order from 0, or -1."""
    num_groups: int
    """Chunks of the whole prompt."""
    rows: NDArray[np.int64]
    """Which of the scheduled tokens, ascending; at least one."""


@dataclass(frozen=True, slots=True)
class AttentionMasses:
    """Where it falls; means over heads and layers."""

    paid: NDArray[np.float32]
    """[rows, num_groups] what each token pays to each chunk, itself left out."""
    own: NDArray[np.float32]
    """[rows] what each pays to itself."""
    received: NDArray[np.float32]
    """[k] what each slot of the context receives from all of them."""


class ScheduledSequence(NamedTuple):
    """The part of one sequence that runs in this step: its tokens [first_position, first_position + n), or those at
    `positions`, where chunks are repaired."""

    request_id: RequestId
    token_ids: NDArray[np.int64]
    """Shape [n]: the tokens to compute."""
    first_position: int
    slots: NDArray[np.int64]
    """Shape [first_position + n]: the slot of every token attended to, in order of position. The last n are written."""
    samples: tuple[SampleSpec, ...]
    """What is picked from the logits of the last token. Nothing for a piece of a prompt that is not its last."""
    positions: NDArray[np.int64] | None = None
    """Shape [n], ascending, the last one that of the last slot: where the tokens stand, if there are gaps between them.
    Each sees the context up to itself and is written to its own slot there."""
    is_query_pass: bool = False
    """Nothing is kept or sampled: it is asked what the tokens, which stand behind the whole context, attend to. The
    context leaves out what has no KV yet, so `positions` says nothing of its slots: the tokens' are the last n."""
    is_deviation_pass: bool = False
    """Nothing is sampled, and only the first layers run: it is asked how far the values that the tokens have already
    are from those computed now (CacheBlend)."""
    mass_request: MassRequest | None = None

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def all_positions(self) -> NDArray[np.int64]:
        """Shape [n]: where the scheduled tokens stand, with gaps or without."""
        if self.positions is not None:
            return self.positions
        return np.arange(self.first_position, self.first_position + self.num_scheduled_tokens)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The content of one KV block, to be written to another."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class Batch:
    """One step."""

    sequences: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    """Carried out before anything is computed. No source is the target of an earlier one."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one place of an answer, of the model itself: before penalties, temperature and cuts."""

    logprob: float
    """Of the token that was picked."""
    top: tuple[tuple[int, float], ...]
    """Token and log probability of the most likely ones, most likely first; as many as asked for."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled token of every request of the batch that asked for one."""

    token_ids: Mapping[RequestId, int]
    logprobs: Mapping[RequestId, TokenLogprobs] = field(default_factory=dict)
    """For the requests that want them."""
    attention: Mapping[RequestId, NDArray[np.float32]] = field(default_factory=dict)
    """Of looks, shape [layers, 2, k]: the share of attention that each slot of the context got from the last token, and
    from the last few in the mean; means over heads."""
    deviations: Mapping[RequestId, NDArray[np.float32]] = field(default_factory=dict)
    """Of probes, shape [n]: squared distance of each token's values, before and now; anything, NaN too, for a token
    that had no KV before."""
    masses: Mapping[RequestId, AttentionMasses] = field(default_factory=dict)
    """Where it was asked for."""
    non_finite: frozenset[RequestId] = frozenset()
    """Requests whose logits or attention hold NaN or an infinity. What is said of them elsewhere here means
    nothing."""
