"""One request of a front on its way over engines: what callers got, and what an engine must continue.

Pure: no network and no clock. Each sample gets exactly one last event. Tokens are passed on once and in order: after a
broken stream the next engine continues behind the tokens that were passed on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from stillroom.cluster.wire import FirstToken, WireEvent, WireSample
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, LookupCounts, SampleRequest
from stillroom.engine.events import Route, TokenEvent
from stillroom.errors import EngineUnavailableError, WireError


@dataclass(slots=True)
class _Sample:
    request: SampleRequest
    generated: list[int] = field(default_factory=list)
    """Tokens that were passed on."""
    lookup: LookupCounts = LookupCounts()
    """Prompt lookup on all engines."""
    lookup_before: LookupCounts = LookupCounts()
    """Prompt lookup on the engines before this one."""
    is_ended: bool = False
    is_cancelled: bool = False
    """Ended by the caller: its engine may still send events."""


class Forwarding:
    """The samples of one request."""

    def __init__(self, samples: Sequence[SampleRequest], max_migrations: int) -> None:
        """
        Args:
            max_migrations: most engines that may take the request and not complete it, besides the first.
        """
        self._samples = {one.request_id: _Sample(one) for one in samples}
        self._max_migrations = max_migrations
        self._num_broken = 0
        self._sent: list[_Sample] = []
        self._route: Route | None = None
        self.has_placed = False
        """Whether an engine used KV of other contexts. Another engine would place other KV, so it must compute all."""
        self.moves_because: Exception | None = None
        """Set by `take`: why the engine of this stream cannot complete it, and another one may."""

    @property
    def is_ended(self) -> bool:
        """Whether every sample got its last event."""
        return all(one.is_ended for one in self._samples.values())

    @property
    def has_begun(self) -> bool:
        """Whether a token was passed on."""
        return any(one.generated for one in self._samples.values())

    def begin(self, route: Route, now: float) -> tuple[WireSample, ...]:
        """Begin a stream from an engine; returns what it must continue.

        Args:
            route: without migrations, which are counted here.
            now: on the clock of the deadlines.
        """
        self._sent = [one for one in self._samples.values() if not one.is_ended]
        self._route = replace(route, num_migrations=self._num_broken, is_resumed=self.has_begun)
        self.moves_because = None
        for one in self._sent:
            one.lookup_before = one.lookup
        return tuple(_wire_sample(one, now) for one in self._sent)

    def take(self, events: Sequence[WireEvent], at: float) -> Iterator[TokenEvent]:
        """Yield what callers get of a line of the stream; what was yielded counts as passed on. If `moves_because` is
        set afterwards, the stream must be closed and broken off.

        Args:
            at: time of the events.

        Raises:
            WireError: the engine sent what it was not asked for.
        """
        for event in events:
            yield from self._take(event, at)

    def break_off(self, error: Exception) -> Exception | None:
        """Note that the stream ended before its samples did; returns the error that ends the request, None if another
        engine may continue it."""
        self._num_broken += 1
        if self._num_broken <= self._max_migrations:
            return None
        if self._num_broken == 1:
            return error
        return EngineUnavailableError(
            f"{self._num_broken} engines in turn did not complete the answer (engine.max_migrations = "
            f"{self._max_migrations}); the last one: {error}"
        )

    def end(self, at: float, error: Exception | None = None) -> list[TokenEvent]:
        """Return the last events, `aborted`, of the samples that have none.

        Args:
            error: None if the caller cancelled them.
        """
        return [self._aborted(one, at, error) for one in self._samples.values() if not one.is_ended]

    def cancel(self, request_id: RequestId, at: float) -> list[TokenEvent]:
        """Return the last event of a sample; empty if it has ended."""
        one = self._samples[request_id]
        if one.is_ended:
            return []
        one.is_cancelled = True
        return [self._aborted(one, at, None)]

    def _take(self, event: WireEvent, at: float) -> Iterator[TokenEvent]:
        if event.sample >= len(self._sent):
            raise WireError(f"the engine sent events of sample {event.sample}; it was sent {len(self._sent)} samples")
        sample = self._sent[event.sample]
        if sample.is_cancelled or self.moves_because is not None:
            return
        num_tokens = len(sample.generated) + len(event.tokens)
        if sample.is_ended or num_tokens > sample.request.sampling.max_tokens:
            raise WireError(f"the engine sent tokens of sample {event.sample} behind its end")
        first = self._first(sample, event)
        if event.lookup is not None:
            sample.lookup = _sum(sample.lookup_before, event.lookup)
        yield from self._tokens(sample, event, first, at)
        if event.end is None or (event.tokens and event.end is not FinishReason.ABORTED):
            return
        if event.end is FinishReason.ABORTED and (event.failure is None or event.failure.may_move):
            self.moves_because = (
                EngineUnavailableError("the engine ended the answer and did not say why")
                if event.failure is None
                else event.failure.exception()
            )
            return
        error = None if event.failure is None else event.failure.exception()
        yield self._event(sample, None, at, first=first, end=event.end, error=error)

    def _tokens(self, sample: _Sample, event: WireEvent, first: FirstToken | None, at: float) -> Iterator[TokenEvent]:
        last = len(event.tokens) - 1
        for index, token_id in enumerate(event.tokens):
            sample.generated.append(token_id)
            end = event.end if index == last and event.end is not FinishReason.ABORTED else None
            found = self._event(sample, token_id, at, first=first if index == 0 else None, end=end)
            yield found._replace(logprobs=event.logprobs[index]) if event.logprobs else found

    def _first(self, sample: _Sample, event: WireEvent) -> FirstToken | None:
        """Return the report of the answer's first token; None for those of engines that continue the answer."""
        if event.first is None:
            return None
        if event.first.reuse is not None and event.first.reuse.has_placed:
            self.has_placed = True
        return None if sample.generated else event.first

    def _event(
        self,
        sample: _Sample,
        token_id: int | None,
        at: float,
        *,
        first: FirstToken | None = None,
        end: FinishReason | None = None,
        error: Exception | None = None,
    ) -> TokenEvent:
        sample.is_ended = end is not None
        return TokenEvent(
            sample.request.request_id,
            token_id,
            end,
            at,
            error,
            reuse=None if first is None else first.reuse,
            admission=None if first is None else first.admission(at),
            lookup=sample.lookup if sample.lookup.num_proposed else None,
            route=self._route,
        )

    def _aborted(self, sample: _Sample, at: float, error: Exception | None) -> TokenEvent:
        return self._event(sample, None, at, end=FinishReason.ABORTED, error=error)


def _wire_sample(sample: _Sample, now: float) -> WireSample:
    request = sample.request
    return WireSample(
        request_id=request.request_id,
        sampling=request.sampling,
        priority=request.priority,
        seconds_left=None if request.deadline is None else max(0.0, request.deadline - now),
        generated=tuple(sample.generated),
    )


def _sum(one: LookupCounts, other: LookupCounts) -> LookupCounts:
    return LookupCounts(one.num_proposed + other.num_proposed, one.num_accepted + other.num_accepted)
