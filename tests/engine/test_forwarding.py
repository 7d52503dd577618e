"""However often streams break, each sample gets its tokens once, in order, and one last event."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.cluster.wire import Failure, FirstToken, WireEvent, WireSample
from stillroom.core.batch import TokenLogprobs
from stillroom.core.ids import RequestId
from stillroom.core.kv import Tier
from stillroom.core.prompt import SegmentKind
from stillroom.core.request import FinishReason, LookupCounts, SampleRequest, SamplingParams
from stillroom.core.reuse import PromptReuse, Reason, SegmentReuse
from stillroom.engine.events import Route, TokenEvent
from stillroom.engine.forwarding import Forwarding
from stillroom.errors import (
    DeadlineExceededError,
    DeviceLostError,
    EngineUnavailableError,
    NonFiniteError,
    WireError,
)
from tests.examples import most_examples

ROUTE = Route("engine-1", 0.5, 10)


def sample(name: str, max_tokens: int = 100, deadline: float | None = None) -> SampleRequest:
    return SampleRequest(
        request_id=RequestId(name), sampling=SamplingParams(max_tokens=max_tokens), deadline=deadline, priority=3
    )


def reuse(reason: Reason = Reason.NEVER_SEEN) -> PromptReuse:
    source = Tier.DEVICE if reason is Reason.ANYWHERE else None
    return PromptReuse((SegmentReuse(SegmentKind.CHUNK, None, 10, source, reason),), 0.0, 0.0)


def first(reason: Reason = Reason.NEVER_SEEN) -> FirstToken:
    return FirstToken(0.25, 0.5, 2.0, reuse(reason))


class Engine:
    """Generates the tokens of scripts, and ends each with `stop`."""

    def __init__(self, scripts: Sequence[Sequence[int]], names: Sequence[RequestId]) -> None:
        self._scripts = dict(zip(names, scripts, strict=True))

    def lines(self, asked: Sequence[WireSample], draw: st.DataObject) -> Iterator[tuple[WireEvent, ...]]:
        """Yield what is left of the samples, in lines of random lengths."""
        sent = {index: len(one.generated) for index, one in enumerate(asked)}
        for one in asked:
            assert list(one.generated) == list(self._scripts[one.request_id])[: len(one.generated)]
        while sent:
            line = []
            for index in draw.draw(st.lists(st.sampled_from(sorted(sent)), unique=True, min_size=1)):
                script = self._scripts[asked[index].request_id]
                until = min(len(script), sent[index] + draw.draw(st.integers(0, 3)))
                tokens = tuple(script[sent[index] : until])
                is_end = until == len(script) and draw.draw(st.booleans())
                sent[index] = until
                line.append(WireEvent(sample=index, tokens=tokens, end=FinishReason.STOP if is_end else None))
                if is_end:
                    del sent[index]
            yield tuple(line)


SCRIPTS = st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=4)


@given(SCRIPTS, st.integers(0, 3), st.data())
@settings(max_examples=most_examples(100), deadline=None)
def test_every_sample_gets_its_tokens_once_and_one_last_event(
    scripts: list[list[int]], max_migrations: int, draw: st.DataObject
) -> None:
    samples = [sample(f"r{number}") for number in range(len(scripts))]
    names = [one.request_id for one in samples]
    engine, forwarding = Engine(scripts, names), Forwarding(samples, max_migrations)
    got: dict[RequestId, list[TokenEvent]] = defaultdict(list)
    cancelled: set[RequestId] = set()
    failure: Exception | None = None
    num_breaks = 0

    def deliver(events: Sequence[TokenEvent]) -> None:
        for event in events:
            got[event.request_id].append(event)

    while not forwarding.is_ended and failure is None:
        asked = forwarding.begin(ROUTE, 0.0)
        assert {one.request_id for one in asked} == {one.request_id for one in samples if not ended(got, one)}
        for line in engine.lines(asked, draw):
            if draw.draw(st.integers(0, 5)) == 0:
                break
            if draw.draw(st.integers(0, 9)) == 0:
                name = draw.draw(st.sampled_from(names))
                told = forwarding.cancel(name, 0.0)
                cancelled |= {event.request_id for event in told}
                deliver(told)
            deliver(list(forwarding.take(line, 0.0)))
            assert forwarding.moves_because is None
        if not forwarding.is_ended:
            num_breaks += 1
            failure = forwarding.break_off(OSError("the engine is gone"))
    deliver(forwarding.end(0.0, failure))

    assert (failure is None) == (num_breaks <= max_migrations)
    for name, script in zip(names, scripts, strict=True):
        tokens = [event.token_id for event in got[name] if event.token_id is not None]
        assert tokens == script[: len(tokens)], "a token came twice, or out of order"
        assert [event.finish_reason is not None for event in got[name]] == [False] * (len(got[name]) - 1) + [True]
        last = got[name][-1]
        if last.finish_reason is FinishReason.STOP:
            assert tokens == script and last.error is None
        else:
            assert last.finish_reason is FinishReason.ABORTED
            assert (last.error is None) == (name in cancelled)
    assert forwarding.is_ended and not forwarding.end(0.0)


def ended(got: dict[RequestId, list[TokenEvent]], one: SampleRequest) -> bool:
    events = got[one.request_id]
    return bool(events) and events[-1].finish_reason is not None


def take(forwarding: Forwarding, *events: WireEvent, at: float = 10.0) -> list[TokenEvent]:
    return list(forwarding.take(events, at))


def test_reports_are_those_of_the_first_token_and_sums_over_engines() -> None:
    forwarding = Forwarding([sample("a")], 3)
    forwarding.begin(ROUTE, 0.0)
    one, two = take(forwarding, WireEvent(sample=0, tokens=(5, 6), first=first(), lookup=LookupCounts(4, 1)), at=12.0)
    assert one.reuse == reuse() and one.admission is not None and two.reuse is None
    assert (one.admission.admitted_at, one.admission.began_at) == (10.25, 10.5)
    assert two.lookup == LookupCounts(4, 1) and one.route == ROUTE
    assert forwarding.break_off(OSError()) is None
    (asked,) = forwarding.begin(Route("engine-2", None, 0), 0.0)
    assert asked.generated == (5, 6) and asked.priority == 3
    three, last = take(
        forwarding,
        WireEvent(sample=0, tokens=(7,), first=first(), lookup=LookupCounts(2, 2)),
        WireEvent(sample=0, end=FinishReason.LENGTH),
    )
    assert three.reuse is None and three.admission is None, "the answer had its first token before"
    assert three.lookup == LookupCounts(6, 3)
    assert last.route == Route("engine-2", None, 0, num_migrations=1, is_resumed=True)
    assert last.token_id is None and last.finish_reason is FinishReason.LENGTH


def test_log_probabilities_stay_with_their_tokens() -> None:
    forwarding = Forwarding([sample("a")], 0)
    forwarding.begin(ROUTE, 0.0)
    scores = (TokenLogprobs(-0.5, ()), TokenLogprobs(-1.5, ((3, -0.25),)))
    events = take(forwarding, WireEvent(sample=0, tokens=(1, 2), logprobs=scores, end=FinishReason.STOP))
    assert [(one.token_id, one.logprobs) for one in events] == [(1, scores[0]), (2, scores[1])]
    assert [one.finish_reason for one in events] == [None, FinishReason.STOP]


def test_report_of_an_answer_without_tokens_comes_with_its_end() -> None:
    forwarding = Forwarding([sample("a")], 0)
    forwarding.begin(ROUTE, 0.0)
    (only,) = take(forwarding, WireEvent(sample=0, first=first(), end=FinishReason.STOP))
    assert only.reuse == reuse() and only.finish_reason is FinishReason.STOP and forwarding.is_ended


def test_seconds_left_shrink_with_every_engine() -> None:
    forwarding = Forwarding([sample("a", deadline=20.0), sample("b")], 3)
    assert [one.seconds_left for one in forwarding.begin(ROUTE, 15.0)] == [5.0, None]
    assert [one.seconds_left for one in forwarding.begin(ROUTE, 21.0)] == [0.0, None]


def test_answer_from_placed_kv_is_resumed_without_it() -> None:
    forwarding = Forwarding([sample("a")], 3)
    forwarding.begin(ROUTE, 0.0)
    take(forwarding, WireEvent(sample=0, tokens=(1,), first=first()))
    assert not forwarding.has_placed
    forwarding.begin(ROUTE, 0.0)
    take(forwarding, WireEvent(sample=0, tokens=(1,), first=first(Reason.ANYWHERE)))
    assert forwarding.has_placed


@pytest.mark.parametrize("kind", ["closed", "device_lost"])
def test_sample_moves_if_its_engine_stops_or_loses_its_device(kind: str) -> None:
    forwarding = Forwarding([sample("a"), sample("b")], 1)
    forwarding.begin(ROUTE, 0.0)
    events = take(
        forwarding,
        WireEvent(sample=1, tokens=(4,), end=FinishReason.ABORTED, failure=Failure(kind, "it is over")),
        WireEvent(sample=0, tokens=(8,), end=FinishReason.STOP),
    )
    assert [(one.token_id, one.finish_reason) for one in events] == [(4, None)], "the rest of the line is not read"
    why = forwarding.moves_because
    assert why is not None and str(why) == "it is over" and not forwarding.is_ended
    assert forwarding.break_off(why) is None
    assert [one.generated for one in forwarding.begin(ROUTE, 0.0)] == [(), (4,)]
    take(forwarding, WireEvent(sample=0, end=FinishReason.ABORTED))
    assert isinstance(forwarding.moves_because, EngineUnavailableError), "no reason was given"


@pytest.mark.parametrize(("kind", "error"), [("non_finite", NonFiniteError), ("deadline", DeadlineExceededError)])
def test_failure_that_follows_the_request_ends_its_sample_only(kind: str, error: type[Exception]) -> None:
    forwarding = Forwarding([sample("a"), sample("b")], 3)
    forwarding.begin(ROUTE, 0.0)
    token, last = take(
        forwarding, WireEvent(sample=0, tokens=(1,), end=FinishReason.ABORTED, failure=Failure(kind, "no"))
    )
    assert token.token_id == 1 and token.finish_reason is None
    assert isinstance(last.error, error) and last.finish_reason is FinishReason.ABORTED
    assert not forwarding.is_ended and forwarding.moves_because is None
    (left,) = forwarding.begin(ROUTE, 0.0)
    assert left.request_id == "b"


def test_last_failure_is_told_after_too_many_engines() -> None:
    forwarding = Forwarding([sample("a")], 0)
    forwarding.begin(ROUTE, 0.0)
    lost = DeviceLostError("the device is lost")
    assert forwarding.break_off(lost) is lost, "no other engine was tried"
    forwarding = Forwarding([sample("a")], 1)
    assert forwarding.break_off(lost) is None
    error = forwarding.break_off(lost)
    assert isinstance(error, EngineUnavailableError) and "2 engines in turn" in str(error)
    assert "the device is lost" in str(error)


@pytest.mark.parametrize(
    "event",
    [
        WireEvent(sample=2, tokens=(1,)),
        WireEvent(sample=0, tokens=(1,)),
        WireEvent(sample=0, end=FinishReason.STOP),
        WireEvent(sample=1, tokens=(1, 2, 3)),
    ],
)
def test_events_that_no_one_asked_for_are_refused(event: WireEvent) -> None:
    forwarding = Forwarding([sample("a"), sample("b", max_tokens=3)], 3)
    forwarding.begin(ROUTE, 0.0)
    take(
        forwarding,
        WireEvent(sample=0, tokens=(1,), end=FinishReason.STOP),
        WireEvent(sample=1, tokens=(7,)),
    )
    got: list[TokenEvent] = []
    with pytest.raises(WireError, match="the engine sent"):
        for one in forwarding.take((WireEvent(sample=1, tokens=(8,)), event), 0.0):
            got.append(one)
    assert [one.token_id for one in got] == [8]
    assert forwarding.begin(ROUTE, 0.0)[0].generated == (7, 8), "what was passed on counts"


def test_cancelled_sample_ignores_what_its_engine_still_sends() -> None:
    forwarding = Forwarding([sample("a"), sample("b")], 3)
    forwarding.begin(ROUTE, 0.0)
    (last,) = forwarding.cancel(RequestId("a"), 1.0)
    assert last.finish_reason is FinishReason.ABORTED and last.error is None
    assert not forwarding.cancel(RequestId("a"), 1.0)
    assert not take(forwarding, WireEvent(sample=0, tokens=(1,), end=FinishReason.STOP))
    assert [one.request_id for one in forwarding.begin(ROUTE, 0.0)] == ["b"]
