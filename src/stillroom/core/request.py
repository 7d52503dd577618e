"""Requests to the engine and their sampling parameters. Plain values; the scheduler holds the running state."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stillroom.core.arguments import integer, number
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.prompt import SegmentedPrompt
from stillroom.errors import UsageError

MaySee = Callable[[Collection[ChunkId]], bool]
"""Whether a request's filter allows all of these chunks."""

_INFINITY = float("inf")

LEAST_TEMPERATURE = 1e-5
"""Below it sampling is greedy, as in vLLM: float32 cannot hold the quotients."""
MAX_LOGPROBS = 20
"""Most alternatives reported for a token; OpenAI's limit."""

_INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class FinishReason(StrEnum):
    STOP = "stop"
    """The model ended its answer."""
    LENGTH = "length"
    """`max_tokens` was reached."""
    ABORTED = "aborted"
    """Cancelled by the client, or the engine stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of tokens. Applied in this order: `logit_bias`, penalties, `min_tokens`, temperature, `top_k`, `top_p`,
    `min_p`. Numbers of numpy are converted to Python's.

    Raises:
        UsageError: a value is of the wrong type or out of range.
    """

    max_tokens: int = 256
    """Most tokens to generate; at least 1."""
    min_tokens: int = 0
    """Stop tokens are forbidden before this many tokens."""
    temperature: float = 0.0
    """Greedy below `LEAST_TEMPERATURE`."""
    top_k: int = 0
    """Sample from this many of the most likely tokens; 0 is all."""
    top_p: float = 1.0
    """Nucleus: sample from the fewest tokens whose probabilities reach this sum; in (0, 1]."""
    min_p: float = 0.0
    """Sample from tokens at least this likely relative to the most likely one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """The logit of every token of the prompt or the answer is divided by it if positive, else multiplied (CTRL, Keskar
    et al. 2019); above 0, 1 changes nothing."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token of the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token as often as the answer has it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    logprobs: int | None = None
    """Report the log probabilities of each token and of this many most likely ones; None: report none."""
    seed: int = 0
    """Non-negative. The n-th token's random number is a function of (seed, n) alone."""

    def __post_init__(self) -> None:
        self._convert_numbers()
        for name, is_valid, rule in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"in [0, max_tokens={self.max_tokens}]"),
            ("temperature", 0.0 <= self.temperature < _INFINITY, "0 (greedy) or a positive number"),
            ("top_k", self.top_k >= 0, "0 (all) or a positive number"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < _INFINITY, "a positive number"),
            ("presence_penalty", abs(self.presence_penalty) < _INFINITY, "a finite number"),
            ("frequency_penalty", abs(self.frequency_penalty) < _INFINITY, "a finite number"),
            ("logit_bias", all(abs(bias) < _INFINITY for bias in self.logit_bias.values()), "finite numbers"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
            ("seed", 0 <= self.seed < 2**63, "in [0, 2**63)"),
        ):
            if not is_valid:
                raise UsageError(f"{name}={getattr(self, name)}; it must be {rule}")

    def _convert_numbers(self) -> None:
        for name in _INTEGERS:
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        for name in _NUMBERS:
            object.__setattr__(self, name, number(name, getattr(self, name)))
        if self.logprobs is not None:
            object.__setattr__(self, "logprobs", integer("logprobs", self.logprobs))
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias={self.logit_bias!r}; it must map tokens to numbers")
        biases = {
            integer("a token of logit_bias", one): number("logit_bias", bias) for one, bias in self.logit_bias.items()
        }
        object.__setattr__(self, "logit_bias", biases)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE


class TokenConstraint(Protocol):
    """The tokens that may come next in one sequence."""

    def copy(self) -> "TokenConstraint":
        """Return an independent constraint in the same state."""
        ...

    def allowed(self) -> NDArray[np.int32]:
        """Return one bit per token of the vocabulary, lowest bit first; at least one is set."""
        ...

    def allows(self, token_id: int) -> bool:
        """Whether this token may come next; appends nothing."""
        ...

    def advance(self, token_id: int) -> None:
        """Append a token. Precondition: it is allowed."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow; the sequence ends."""
        ...

    @property
    def error(self) -> str | None:
        """Why the constraint failed; the sequence ends without an answer. None while it works."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One continuation that a caller wants of a prompt."""

    request_id: RequestId
    sampling: SamplingParams
    priority: int = 0
    """Among waiting requests of a tenant, the lowest number is admitted first. Ignored by an OpenAI server."""
    deadline: float | None = None
    """When the answer must be complete, in seconds on the engine's monotonic clock; None: no deadline."""
    may_see: MaySee | None = None
    """KV that has seen a chunk outside this prompt which this does not allow is not used. None allows every chunk of
    the tenant. The engine's thread calls it. Ignored by an OpenAI server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(SampleRequest):
    """A `SampleRequest` with its prompt, as the engine of this process takes it."""

    prompt: SegmentedPrompt
    stop_token_ids: frozenset[int] = frozenset()
    """Generation ends at one of these; it is not part of the answer."""
    cache_salt: str = ""
    """KV is shared among requests of the same salt only: one salt per tenant."""
    may_place: bool = True
    """Whether KV of other contexts may be used, if `reuse.mode` allows it."""
    generated: tuple[int, ...] = ()
    """Tokens of the answer that another engine has generated; the answer goes on behind them. They count as generated
    for everything: `max_tokens`, penalties, the seed, the constraint. Fewer than `max_tokens`, without a stop token,
    and allowed by the constraint, which they do not complete. Such a request has no further samples, and no KV of other
    contexts is used for it."""
    before: Mapping[ChunkId, tuple[ChunkId, ...]] = field(default_factory=dict)
    """The chunks before each chunk of the prompt in its document, as far as known: their KV may have been seen by its
    prepared copy."""
    prepares: frozenset[ChunkId] = frozenset()
    """Not empty: the prompt is a part of a document, computed to keep the KV of these of its chunks for later prompts:
    in the document's context with `reuse.mode = "prepared"`, else as the beginning of prompts. Nothing of it counts as
    use."""
    most_exact: int | None = None
    """Most pieces at the beginning of the prompt whose kept exact KV may be used; None: all. Limited in audits, which
    ask what an earlier admission would have placed."""
    is_background: bool = False
    """Runs while the engine is idle, and makes way for questions: its steps are short. Nothing that it computes is
    kept, so that it changes no later answer."""
    constraint: TokenConstraint | None = None
    """State at the beginning of an answer; sequences advance copies of it."""


@dataclass(frozen=True, slots=True)
class Admission:
    """First admission of a request, in seconds on the engine's monotonic clock. A later preemption does not change
    it."""

    admitted_at: float
    """End of waiting; loading of its KV starts."""
    began_at: float
    """Start of computing. The time before includes loads of other requests that were admitted in the same step."""


@dataclass(frozen=True, slots=True)
class LookupCounts:
    """Tokens of an answer that prompt lookup proposed (docs/runtime.md)."""

    num_proposed: int = 0
    """Tokens that were computed before they were sampled."""
    num_accepted: int = 0
    """Those that sampling picked too; each saved a step."""


def seed_of_sample(seed: int, index: int) -> int:
    """Return the seed of the `index`-th sample of a request: `seed` for the first, else derived from both."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0] >> 1)


def uniform_at(seed: int, index: int) -> float:
    """Return the random number in [0, 1) of the `index`-th token of a request with this seed.

    Counter-based (Philox): stateless, so preemption and batching do not change it.
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())
