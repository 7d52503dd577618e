"""What the engine is asked to do, and how a request ends. Plain values; the running state is the scheduler's."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from stillroom.core.ids import RequestId
from stillroom.core.prompt import SegmentedPrompt
from stillroom.errors import UsageError


class FinishReason(StrEnum):
    STOP = "stop"
    """The model ended its answer."""
    LENGTH = "length"
    """`max_tokens` was reached."""
    ABORTED = "aborted"
    """Cancelled, by the user or because the engine stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are picked.

    Raises:
        UsageError: a value is out of range.
    """

    max_tokens: int = 256
    """Most tokens to generate; at least 1."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus: sample from the fewest tokens whose probabilities reach this sum; in (0, 1]."""
    seed: int = 0
    """Non-negative. The n-th token's random number is a function of (seed, n) alone."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens={self.max_tokens}; it must be at least 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature}; it must be 0 (greedy) or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p={self.top_p}; it must be in (0, 1]")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed={self.seed}; it must be in [0, 2**63)")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be continued."""

    request_id: RequestId
    prompt: SegmentedPrompt
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    """Generation ends after one of these; it is not part of the answer."""


def uniform_at(seed: int, index: int) -> float:
    """The random number in [0, 1) of the `index`-th token of a request with this seed.

    Counter-based (Philox), so it has no state to lose when a request is preempted, moved or batched differently.
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())
