"""The running state of one request. Only the scheduler changes it.

Positions: [0, num_computed) have their KV in slots; [num_computed, num_tokens) are known tokens that must still run. A
sequence decodes when exactly one token is left to run and that token was sampled; otherwise it prefills. During
selective recompute only the positions `to_compute` run, and num_computed stays until all of them have run.
"""

from bisect import bisect_right
from collections.abc import Sequence as Positions
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from stillroom.core.ids import RequestId
from stillroom.core.request import Admission, Request
from stillroom.errors import UsageError
from stillroom.kvcache.blocks.block_table import BlockTable
from stillroom.kvcache.lease import Lease
from stillroom.scheduler.prompt_lookup import SequenceLookup


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again without blocks; its generated tokens run once more as prompt."""
    FINISHED = "finished"


class Sequence:
    """A request in progress: its tokens so far, and where their KV is."""

    __slots__ = (
        "_token_ids",
        "admitted_at",
        "arrival",
        "arrived_at",
        "began_at",
        "constraint",
        "cuts",
        "followers",
        "lease",
        "lookup",
        "num_computed",
        "num_prompt_tokens",
        "num_tokens",
        "request",
        "status",
        "to_compute",
    )

    def __init__(
        self, request: Request, lease: Lease, arrival: int, arrived_at: float = 0.0, cuts: Positions[int] = ()
    ) -> None:
        self.request = request
        self.arrival = arrival
        """Number of the request in order of arrival."""
        self.arrived_at = arrived_at
        """In seconds."""
        self.admitted_at: float | None = None
        """Time of the first admission."""
        self.began_at: float | None = None
        """Time when its first step began."""
        self.cuts = cuts
        """Positions at which its prefill is cut, ascending: no step computes tokens of both sides."""
        self.lease = lease
        self.status = Status.WAITING
        self.num_prompt_tokens = request.prompt.num_tokens
        self.num_tokens = self.num_prompt_tokens + len(request.generated)
        self.num_computed = 0
        self.to_compute: NDArray[np.int64] | None = None
        """Positions that selective recompute still has to run, ascending; None without one and before its query
        pass."""
        self.constraint = None if request.constraint is None else request.constraint.copy()
        self.lookup = SequenceLookup()
        self.followers: list[Sequence] = []
        """Other samples of this prompt; they fork from this sequence when its prompt has run."""
        self._token_ids: NDArray[np.int64] = np.empty(
            self.num_prompt_tokens + request.sampling.max_tokens, dtype=np.int64
        )
        self._token_ids[: self.num_prompt_tokens] = request.prompt.array
        self._token_ids[self.num_prompt_tokens : self.num_tokens] = request.generated
        if self.constraint is not None:
            for token_id in request.generated:
                self.constraint.advance(token_id)

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def table(self) -> BlockTable:
        return self.lease.table

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_new(self) -> int:
        """Generated tokens, without those that the request began with."""
        return self.num_generated - len(self.request.generated)

    @property
    def num_to_compute(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_tokens - self.num_computed == 1 and self.num_tokens > self.num_prompt_tokens

    @property
    def is_complete(self) -> bool:
        """Whether the request's constraint allows no further token."""
        return self.constraint is not None and self.constraint.is_complete

    @property
    def error(self) -> UsageError | None:
        """Why the constraint cannot be followed any longer; None if it can."""
        text = None if self.constraint is None else self.constraint.error
        return None if text is None else UsageError(f"the JSON schema is too complex for this answer: {text}")

    @property
    def admission(self) -> Admission | None:
        """Times of admission and of the first step; None before the first step."""
        if self.admitted_at is None or self.began_at is None:
            return None
        return Admission(self.admitted_at, self.began_at)

    @property
    def segment_lengths(self) -> list[int]:
        """Lengths of the prompt's segments; what was generated continues the last one."""
        lengths = list(self.request.prompt.lengths)
        lengths[-1] += self.num_generated
        return lengths

    def next_cut(self, start: int) -> int:
        """Return the first cut after this position; `num_tokens` if there is none."""
        index = bisect_right(self.cuts, start)
        return self.cuts[index] if index < len(self.cuts) else self.num_tokens

    def tokens(self, start: int, end: int) -> NDArray[np.int64]:
        """Shape [end - start]: a view of the tokens at these positions."""
        return self._token_ids[start:end]

    def tokens_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Shape [n]: the tokens at these positions."""
        return self._token_ids[positions]

    def append(self, token_id: int) -> None:
        """Append a sampled token and advance the constraint."""
        self._token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.constraint is not None:
            self.constraint.advance(token_id)
