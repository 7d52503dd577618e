"""Values exchanged by scheduler and runner: a `Batch` to compute and its `StepResult`.

Arrays are views of the scheduler's state, valid until the step's result is returned.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
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
    """Random number of the step, in [0, 1); unused by greedy sampling."""
    token_ids: NDArray[np.int64]
    """Shape [n]: all tokens so far."""
    num_prompt_tokens: int
    """Tokens of the prompt; the others are the answer."""
    forbidden: frozenset[int] = frozenset()
    """Tokens that must not be picked in this step."""
    constraint: TokenConstraint | None = None
    """Called once for the allowed tokens, after the step's arithmetic has been started."""


DEVIATION_LAYERS = 2
"""Layers of a deviation pass; it reports on the last of them."""


@dataclass(frozen=True, slots=True)
class MassRequest:
    """Asks for the attention mass of some tokens of a sequence."""

    groups: NDArray[np.int64]
    """Shape [k]: the chunk of the prompt that each slot of the context belongs to, in order from 0, or -1."""
    num_groups: int
    """Chunks of the whole prompt."""
    rows: NDArray[np.int64]
    """Indexes of the scheduled tokens, ascending; at least one."""


@dataclass(frozen=True, slots=True)
class AttentionMasses:
    """Attention mass; means over heads and layers."""

    paid: NDArray[np.float32]
    """[rows, num_groups]: attention of each token to each chunk, without the token itself."""
    own: NDArray[np.float32]
    """[rows]: attention of each token to itself."""
    received: NDArray[np.float32]
    """[k]: attention that each slot of the context receives from all these tokens."""


class ScheduledSequence(NamedTuple):
    """The part of one sequence that runs in this step: tokens [first_position, first_position + n), or those at
    `positions` if chunks are selectively recomputed."""

    request_id: RequestId
    token_ids: NDArray[np.int64]
    """Shape [n]: the tokens to compute."""
    first_position: int
    slots: NDArray[np.int64]
    """Shape [first_position + n]: the slot of every token attended to, in order of position. The last n are written."""
    samples: tuple[SampleSpec, ...]
    """Samples from the logits of the last token; empty for every piece of a prompt but the last. With proposed tokens:
    one from the token before them, and one from each of them."""
    positions: NDArray[np.int64] | None = None
    """Shape [n], ascending: positions of the tokens, if there are gaps between them; the last one is the last slot's.
    Each token attends to the context up to itself and is written to its own slot."""
    is_query_pass: bool = False
    """Query pass: measures what the tokens attend to; keeps and samples nothing. The context omits tokens without KV,
    so `positions` does not index its slots: the tokens' slots are the last n."""
    is_deviation_pass: bool = False
    """Deviation pass: runs the first layers only and measures the distance of the tokens' kept values from those
    computed now (CacheBlend); samples nothing."""
    mass_request: MassRequest | None = None
    num_proposed: int = 0
    """Prompt lookup: the last `num_proposed` tokens are proposed, to be kept as far as sampling picks the same ones.
    The sequence decodes: one token is before them."""

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def proposed(self) -> NDArray[np.int64]:
        """Shape [num_proposed]."""
        return self.token_ids[self.num_scheduled_tokens - self.num_proposed :]

    @property
    def without_proposed(self) -> "ScheduledSequence":
        """The same entry without proposed tokens."""
        if not self.num_proposed:
            return self
        slots = self.slots[: len(self.slots) - self.num_proposed]
        return self._replace(token_ids=self.token_ids[:1], slots=slots, samples=self.samples[:1], num_proposed=0)

    @property
    def all_positions(self) -> NDArray[np.int64]:
        """Positions of the scheduled tokens: [n]."""
        if self.positions is not None:
            return self.positions
        return np.arange(self.first_position, self.first_position + self.num_scheduled_tokens)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one KV block to another."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class Batch:
    """A step to compute."""

    sequences: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    """Done before computing. No source is the target of an earlier copy."""
    should_stop: Callable[[], bool] | None = None
    """Asked before each layer; if it returns True, the step ends with a StepStopped, and can run again."""


class StepStopped(Exception):
    """A step ended before its last layer, because other work came (`Batch.should_stop`)."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position of an answer, before penalties, temperature and truncation."""

    logprob: float
    """Of the sampled token."""
    top: tuple[tuple[int, float], ...]
    """Token and log probability of the most likely tokens, most likely first; `SamplingParams.logprobs` of them."""


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None
    """For requests with `SamplingParams.logprobs`."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step, by request."""

    token_ids: Mapping[RequestId, int]
    """Sampled tokens."""
    logprobs: Mapping[RequestId, TokenLogprobs] = field(default_factory=dict)
    """For requests with `SamplingParams.logprobs`."""
    attention: Mapping[RequestId, NDArray[np.float32]] = field(default_factory=dict)
    """Of query passes, shape [layers, 2, k]: share of attention that each slot of the context receives from the last
    token, and in the mean from the last few; means over heads."""
    deviations: Mapping[RequestId, NDArray[np.float32]] = field(default_factory=dict)
    """Of deviation passes, shape [n]: squared distance of each token's kept and new values; undefined, possibly NaN,
    for a token without kept KV."""
    masses: Mapping[RequestId, AttentionMasses] = field(default_factory=dict)
    """For sequences with a `Weighing`."""
    following: Mapping[RequestId, tuple[SampledToken, ...]] = field(default_factory=dict)
    """For entries with proposed tokens: the token sampled after each of them, up to the first whose logits hold NaN or
    an infinity. Those after a rejected token are meaningless."""
    non_finite: frozenset[RequestId] = frozenset()
    """Requests whose logits or attention hold NaN or an infinity; their other results are meaningless."""

    @classmethod
    def of_samples(
        cls, specs: Sequence[SampleSpec], picked: Sequence[SampledToken], broken: Collection[int] = ()
    ) -> "StepResult":
        """Return the result of a step with these samples; further samples of a request follow its proposed tokens.

        Args:
            broken: indexes of samples whose logits hold NaN or an infinity.
        """
        first: dict[RequestId, SampledToken] = {}
        following: dict[RequestId, tuple[SampledToken, ...]] = {}
        ended: set[RequestId] = set()
        for index, (spec, token) in enumerate(zip(specs, picked, strict=True)):
            name = spec.request_id
            if index in broken:
                ended.add(name)
            if name not in first:
                first[name] = token
            elif name not in ended:
                following[name] = (*following.get(name, ()), token)
        broken_first = (specs[index].request_id for index in broken if first[specs[index].request_id] is picked[index])
        return cls(
            {name: token.token_id for name, token in first.items()},
            {name: token.logprobs for name, token in first.items() if token.logprobs is not None},
            following=following,
            non_finite=frozenset(broken_first),
        )
