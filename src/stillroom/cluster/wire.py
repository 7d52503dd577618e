"""Messages between fronts and engines: requests for answers and their events; `wire_state` has the others.

HTTP/1.1 with JSON; docs/wire.md is the reference. Decided here, where the design left it open:

- **Versions.** Every message is strict: unknown fields, wrong types and numbers that are not finite raise WireError.
  Any change of a message raises `WIRE_VERSION`; a front uses engines of its own version only.
- **Chunk ids** are 16 hexadecimal digits (`format_chunk_id`): JavaScript and others round 63-bit numbers.
- **Samples** of a request without generated tokens share one prefill and fork. Each sample with generated tokens is a
  sequence of its own, so their numbers of tokens may differ; they share the prompt's KV through the tree.
- **`generated`** may have `max_tokens` tokens, or complete the grammar: then the engine sends the end alone. A front
  whose engine died between the last token and the end needs no rule of its own.
- **Times** of a first token are seconds since the engine received the request, so that no clocks are compared.
- **`tenant`** null is the default tenant, whose salt is "". For other tenants the engine opens the tenant's knowledge
  base and compares the salt with its own; an unequal one is refused with 409 (`salt_of` holds the identity of the
  knowledge base, so the front and the engine see different ones). The default knowledge base is compared by
  `EngineInfo.knowledge_base`.
- **Errors** of a sample have a `kind` of `Failure`; `Failure.may_move` says whether another engine may continue.
- **Log probabilities** of minus infinity are null.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stillroom.cluster.wire_reading import (
    Fields,
    chunk_id,
    count,
    flag,
    integer,
    items,
    long_text,
    number,
    one_of,
    row,
    seconds,
    shown,
    text,
    tokens,
)
from stillroom.cluster.wire_reuse import read_reuse, reuse_to_json
from stillroom.cluster.wire_sampling import read_sampling, sampling_to_json
from stillroom.core.batch import TokenLogprobs
from stillroom.core.ids import RequestId, format_chunk_id
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Admission, FinishReason, LookupCounts, SamplingParams
from stillroom.core.reuse import PromptReuse
from stillroom.errors import (
    DeadlineExceededError,
    DeviceLostError,
    EngineClosedError,
    EngineError,
    NonFiniteError,
    PromptTooLongError,
    RequestTimeoutError,
    UsageError,
    WireError,
)

WIRE_VERSION = 2
PREFIX = "/engine/v1"
"""Of the engine's paths: `info`, `answers`, `state`, `drain`."""
MEDIA_TYPE = "application/x-ndjson"
"""Of the reply to a request for answers: one list of events a line. An empty line says that the engine is alive."""
MAX_BODY_BYTES = 32 * 2**20
"""Longest request. A million tokens of seven digits are 8 MiB."""
HEARTBEAT_SECONDS = 5.0
"""Longest silence of a stream of events."""
MAX_SAMPLES = 1024

_MINUS_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSample:
    """One continuation of the prompt."""

    request_id: RequestId
    """The front's; for the engine's log."""
    sampling: SamplingParams
    priority: int = 0
    seconds_left: float | None = None
    """Until the deadline, when sent; None: no deadline."""
    generated: tuple[int, ...] = ()
    """Tokens of the answer that the front has already; the engine continues behind them and does not send them."""

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"id": self.request_id, "sampling": sampling_to_json(self.sampling)}
        if self.priority:
            found["priority"] = self.priority
        if self.seconds_left is not None:
            found["seconds_left"] = max(0.0, self.seconds_left)
        if self.generated:
            found["generated"] = list(self.generated)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """The body of `POST answers`: a prompt and how it is continued."""

    segments: tuple[Segment, ...]
    samples: tuple[WireSample, ...]
    tenant: str | None = None
    """None: the default tenant."""
    salt: str = ""
    """Of the tenant's KV, as the front made it (`salt_of`)."""
    grammar: str | None = None
    """llguidance's grammar of the answers (`JsonConstraint.grammar`)."""
    only_own_chunks: bool = False
    """Use only KV that has seen no chunk outside this prompt: the request has a filter, which is not sent."""
    may_place: bool = True
    """Whether KV of other contexts may be used, if the engine's settings allow it."""

    @property
    def prompt(self) -> SegmentedPrompt:
        return SegmentedPrompt(self.segments)

    def to_json(self) -> dict[str, Any]:
        return {
            "wire": WIRE_VERSION,
            "tenant": self.tenant,
            "salt": self.salt,
            "segments": [
                [one.kind.value, None if one.chunk_id is None else format_chunk_id(one.chunk_id), list(one.token_ids)]
                for one in self.segments
            ],
            "grammar": self.grammar,
            "samples": [sample.to_json() for sample in self.samples],
            "only_own_chunks": self.only_own_chunks,
            "may_place": self.may_place,
        }

    @classmethod
    def from_json(cls, value: Any) -> "AnswerRequest":
        """Read a request. Raises WireError."""
        found = Fields(value, "the request")
        check_version(found)
        request = cls(
            tenant=found.read_or("tenant", text, None),
            salt=found.read_or("salt", text, ""),
            segments=found.read("segments", items(_read_segment, least=1)),
            grammar=found.read_or("grammar", long_text, None),
            samples=found.read("samples", items(_read_sample, least=1, most=MAX_SAMPLES)),
            only_own_chunks=found.read_or("only_own_chunks", flag, False),
            may_place=found.read_or("may_place", flag, True),
        )
        found.close()
        if len({sample.request_id for sample in request.samples}) < len(request.samples):
            raise WireError("the request's samples have equal ids")
        return request

    def check_tokens(self, vocab_size: int) -> None:
        """Raises WireError: a token is not one of a model with this vocabulary."""
        named: Iterable[tuple[str, Sequence[int]]] = (
            *((f"segments[{index}]", one.token_ids) for index, one in enumerate(self.segments)),
            *((f"samples[{index}].generated", one.generated) for index, one in enumerate(self.samples)),
            *(
                (f"samples[{index}].sampling.logit_bias", tuple(one.sampling.logit_bias))
                for index, one in enumerate(self.samples)
            ),
        )
        for where, token_ids in named:
            if (last := max(token_ids, default=0)) >= vocab_size:
                raise WireError(
                    f"the request's {where} names token {last}; the model has tokens 0 to {vocab_size - 1}, so the "
                    "front's tokenizer is not that of this engine's model"
                )


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Sent with the first token that an engine computes of a sample. Seconds since it received the request."""

    admitted: float
    """When waiting ended."""
    began: float
    """When computing began."""
    computed: float
    """When the token was there."""
    reuse: PromptReuse | None = None

    def admission(self, at: float) -> Admission:
        """Return the admission on a front's clock.

        Args:
            at: when the front got the token.
        """
        return Admission(at - (self.computed - self.admitted), at - (self.computed - self.began))


_KINDS: Mapping[str, type[Exception]] = {
    "prompt_too_long": PromptTooLongError,
    "usage": UsageError,
    "closed": EngineClosedError,
    "device_lost": DeviceLostError,
    "non_finite": NonFiniteError,
    "deadline": DeadlineExceededError,
    "timeout": RequestTimeoutError,
    "engine": EngineError,
}
"""By kind; a subclass comes before its base class."""
_MOVABLE = frozenset({"closed", "device_lost"})


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an engine ended a sample without an answer."""

    kind: str
    """One of `_KINDS`."""
    message: str

    @property
    def may_move(self) -> bool:
        """Whether another engine may continue the sample: this one stops, or lost its device."""
        return self.kind in _MOVABLE

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Describe an error. The message of an unexpected one stays in the engine's log."""
        for kind, known in _KINDS.items():
            if isinstance(error, known):
                return cls(kind, str(error))
        return cls("engine", "generation failed; the engine's log has the details")

    def exception(self) -> Exception:
        """Return the exception that the engine of one process would have raised."""
        return NonFiniteError() if self.kind == "non_finite" else _KINDS[self.kind](self.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireEvent:
    """New tokens of a sample, its end, or both."""

    sample: int
    """Index in the request's samples."""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the tokens, each, if the request wants them."""
    first: FirstToken | None = None
    """With the first token; if the answer has none, with its end. Absent where nothing was computed."""
    lookup: LookupCounts | None = None
    """Prompt lookup of the sample so far, on this engine."""
    end: FinishReason | None = None
    """Set on the last event of the sample."""
    failure: Failure | None = None
    """With the end `aborted`."""

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"s": self.sample}
        if self.tokens:
            found["t"] = list(self.tokens)
        if self.logprobs:
            found["lp"] = [_logprobs_to_json(one) for one in self.logprobs]
        if self.first is not None:
            found["first"] = {
                "admitted": self.first.admitted,
                "began": self.first.began,
                "computed": self.first.computed,
                "reuse": None if self.first.reuse is None else reuse_to_json(self.first.reuse),
            }
        if self.lookup is not None:
            found["lookup"] = [self.lookup.num_proposed, self.lookup.num_accepted]
        if self.end is not None:
            found["end"] = self.end.value
        if self.failure is not None:
            found["error"] = {"kind": self.failure.kind, "message": self.failure.message}
        return found


def events_to_json(events: Iterable[WireEvent]) -> list[dict[str, Any]]:
    """Return a line of the reply."""
    return [event.to_json() for event in events]


def events_from_json(value: Any) -> tuple[WireEvent, ...]:
    """Read a line of the reply. Raises WireError."""
    return items(_read_event)(value, "the events")


def check_version(found: Fields) -> None:
    """Raises WireError: the message is of another version."""
    version = found.read("wire", count)
    if version != WIRE_VERSION:
        raise WireError(
            f"the other side speaks version {version} of the engine's protocol, and this side version {WIRE_VERSION}; "
            "run the same version of Stillroom on both"
        )


def _read_segment(value: Any, where: str) -> Segment:
    kind, chunk, token_ids = row(value, where, 3)
    found = tokens(token_ids, f"{where}[2]")
    if not found:
        raise WireError(f"{where}[2] is empty; leave the segment out")
    chunk = None if chunk is None else chunk_id(chunk, f"{where}[1]")
    return Segment(one_of(SegmentKind)(kind, f"{where}[0]"), found, chunk)


def _read_sample(value: Any, where: str) -> WireSample:
    found = Fields(value, where)
    sample = WireSample(
        request_id=RequestId(found.read("id", text)),
        sampling=found.read("sampling", read_sampling),
        priority=found.read_or("priority", integer, 0),
        seconds_left=found.read_or("seconds_left", seconds, None),
        generated=found.read_or("generated", tokens, ()),
    )
    found.close()
    if len(sample.generated) > sample.sampling.max_tokens:
        raise WireError(f"{where} has {len(sample.generated)} tokens; max_tokens is {sample.sampling.max_tokens}")
    return sample


def _read_event(value: Any, where: str) -> WireEvent:
    found = Fields(value, where)
    event = WireEvent(
        sample=found.read("s", count),
        tokens=found.read_or("t", tokens, ()),
        logprobs=found.read_or("lp", items(_read_logprobs), ()),
        first=found.read_or("first", _read_first, None),
        lookup=found.read_or("lookup", _read_lookup, None),
        end=found.read_or("end", one_of(FinishReason), None),
        failure=found.read_or("error", _read_failure, None),
    )
    found.close()
    if event.logprobs and len(event.logprobs) != len(event.tokens):
        raise WireError(f"{where} has {len(event.logprobs)} log probabilities of {len(event.tokens)} tokens")
    if event.failure is not None and event.end is not FinishReason.ABORTED:
        raise WireError(f"{where} has an error and is not the end of its sample")
    return event


def _read_first(value: Any, where: str) -> FirstToken:
    found = Fields(value, where)
    first = FirstToken(
        admitted=found.read("admitted", seconds),
        began=found.read("began", seconds),
        computed=found.read("computed", seconds),
        reuse=found.read_or("reuse", read_reuse, None),
    )
    found.close()
    return first


def _read_lookup(value: Any, where: str) -> LookupCounts:
    proposed, accepted = row(value, where, 2)
    return LookupCounts(count(proposed, where), count(accepted, where))


def _read_failure(value: Any, where: str) -> Failure:
    found = Fields(value, where)
    failure = Failure(found.read("kind", text), found.read("message", long_text))
    found.close()
    if failure.kind not in _KINDS:
        raise WireError(f"{where}.kind is {shown(failure.kind)}, which is unknown")
    return failure


def _logprobs_to_json(one: TokenLogprobs) -> list[Any]:
    return [_finite(one.logprob), [[token_id, _finite(logprob)] for token_id, logprob in one.top]]


def _read_logprobs(value: Any, where: str) -> TokenLogprobs:
    logprob, top = row(value, where, 2)
    return TokenLogprobs(_logprob(logprob, where), items(_read_top)(top, f"{where}[1]"))


def _read_top(value: Any, where: str) -> tuple[int, float]:
    token_id, logprob = row(value, where, 2)
    return tokens([token_id], where)[0], _logprob(logprob, where)


def _finite(logprob: float) -> float | None:
    return None if logprob == _MINUS_INFINITY else float(logprob)


def _logprob(value: Any, where: str) -> float:
    return _MINUS_INFINITY if value is None else number(value, where)
