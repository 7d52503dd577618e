"""Tests a front's beliefs: its own log between reports, and what a report replaces."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.cluster.engine_belief import EngineBelief
from stillroom.cluster.front_beliefs import EngineReport, FrontBeliefs
from stillroom.cluster.prediction import EngineCosts
from stillroom.cluster.routed_request import RoutedPiece, RoutedRequest
from stillroom.cluster.routers import CostRouter
from stillroom.core.kv import Tier
from stillroom.kvcache.tree.cost_model import linear_profile


def request(number: int, *contents: bytes) -> RoutedRequest:
    return RoutedRequest(number, tuple(RoutedPiece(b"key " + content, content, 10) for content in contents), 5)


def report(at: float, changes: dict[bytes, Tier | None], queue: float = 0.0, outstanding: int = 0) -> EngineReport:
    return EngineReport(at_seconds=at, changes=changes, queue_seconds=queue, num_outstanding=outstanding)


def front() -> FrontBeliefs:
    beliefs = FrontBeliefs()
    beliefs.add_engine("a", 0.0)
    return beliefs


def only(beliefs: FrontBeliefs, now: float) -> EngineBelief:
    (found,) = beliefs.at(now)
    return found


def test_own_requests_lengthen_the_queue_and_promise_their_kv() -> None:
    beliefs = front()
    beliefs.on_sent("a", request(0, b"x"), 2.0, now=1.0)
    beliefs.on_sent("a", request(1, b"y"), 3.0, now=1.5)
    found = only(beliefs, 2.0)

    assert found.queue_seconds == 4.0
    assert found.num_outstanding == 2
    assert dict(found.held) == dict.fromkeys((b"x", b"key x", b"y", b"key y"), Tier.DEVICE)


def test_where_only_prepared_kv_is_placed_a_request_promises_prefixes_only() -> None:
    beliefs = FrontBeliefs(places_computed=False)
    beliefs.add_engine("a", 0.0)
    beliefs.on_sent("a", request(0, b"x"), 2.0, now=1.0)
    beliefs.on_report("a", report(1.5, {b"y": Tier.HOST}))

    assert dict(only(beliefs, 2.0).held) == {b"key x": Tier.DEVICE, b"y": Tier.HOST}


def test_promised_kv_counts_until_a_report_after_the_first_token() -> None:
    beliefs = front()
    beliefs.on_sent("a", request(0, b"x"), 2.0, now=1.0)
    beliefs.on_report("a", report(1.5, {b"x": None}))
    assert b"x" in only(beliefs, 1.6).held
    beliefs.on_first_token("a", 0, now=3.0)
    beliefs.on_end("a", 0, now=3.5)
    beliefs.on_report("a", report(2.9, {}))
    assert b"x" in only(beliefs, 3.6).held, "the report was made before the first token"
    beliefs.on_report("a", report(4.0, {b"x": Tier.HOST}))

    assert dict(only(beliefs, 4.0).held) == {b"x": Tier.HOST}, "the report has no key x: it was not kept"


def test_report_replaces_the_queue_except_for_requests_sent_after_it() -> None:
    beliefs = front()
    beliefs.on_sent("a", request(0, b"x"), 2.0, now=1.0)
    beliefs.on_sent("a", request(1, b"x"), 3.0, now=2.0)
    beliefs.on_report("a", report(1.5, {}, queue=7.0, outstanding=4))
    found = only(beliefs, 2.5)

    assert found.queue_seconds == 1.5 + 7.0 + 3.0 - 2.5
    assert found.num_outstanding == 2 + 3, "three of the four are of other fronts"
    assert found.age_seconds == 1.0


def test_idle_engine_has_no_queue_although_its_work_was_overestimated() -> None:
    beliefs = front()
    beliefs.on_sent("a", request(0, b"x"), 9.0, now=1.0)
    beliefs.on_first_token("a", 0, now=2.0)
    beliefs.on_end("a", 0, now=2.0)

    assert only(beliefs, 2.0).queue_seconds == 0.0


@settings(max_examples=40)
@given(gaps=st.lists(st.integers(0, 24), min_size=1, max_size=12), work=st.data())
def test_with_exact_predictions_the_queue_is_that_of_the_predictions(gaps: list[int], work: st.DataObject) -> None:
    """One prompt after the other, each for exactly the predicted time, in eighths of a second."""
    beliefs, now, until = front(), 0.0, 0.0
    begins: list[tuple[float, int]] = []
    for number, gap in enumerate(gaps):
        now += gap / 8
        while begins and begins[0][0] <= now:
            first_token_at, computed = begins.pop(0)
            beliefs.on_first_token("a", computed, first_token_at)
        found = only(beliefs, now)
        assert (found.queue_seconds, found.num_outstanding) == (max(0.0, until - now), number)
        seconds = work.draw(st.integers(1, 16)) / 8
        until = max(now, until) + seconds
        beliefs.on_sent("a", request(number, b"%d" % number), seconds, now)
        begins.append((until, number))


def test_request_counts_until_its_first_token_however_late() -> None:
    beliefs = front()
    beliefs.on_sent("a", request(0, b"x"), 2.0, now=1.0)
    beliefs.on_sent("a", request(1, b"y"), 3.0, now=1.0)

    assert only(beliefs, 100.0).queue_seconds == 5.0
    beliefs.on_report("a", report(100.0, {}, queue=0.5, outstanding=2))
    assert only(beliefs, 101.0).queue_seconds == 5.0
    beliefs.on_end("a", 0, now=101.0)
    assert only(beliefs, 101.0).queue_seconds == 3.0, "the first one was cancelled"


def test_work_counts_as_much_longer_as_first_tokens_took_and_that_is_forgotten() -> None:
    beliefs = front()
    for number in range(40):
        beliefs.on_sent("a", request(number, b"x"), 2.0, now=10.0 * number)
        beliefs.on_first_token("a", number, now=10.0 * number + 8.0)
        beliefs.on_end("a", number, now=10.0 * number + 8.0)
        if not number:
            beliefs.on_sent("a", request(99, b"x"), 2.0, now=8.0)
            assert only(beliefs, 8.0).queue_seconds == 2.0 * 1.75, "a quarter of the way from 1 to 4 times"
            beliefs.on_end("a", 99, now=8.0)
    beliefs.on_sent("a", request(40, b"x"), 2.0, now=400.0)

    assert 1.75 * 2.0 < only(beliefs, 400.0).queue_seconds < 4.0 * 2.0
    beliefs.on_end("a", 40, now=400.0)
    beliefs.on_sent("a", request(41, b"x"), 2.0, now=9000.0)
    assert only(beliefs, 9000.0).queue_seconds == pytest.approx(2.0)


def test_engine_that_is_faster_than_predicted_counts_as_predicted() -> None:
    beliefs = front()
    beliefs.on_sent("a", request(0, b"x"), 2.0, now=0.0)
    beliefs.on_first_token("a", 0, now=0.5)
    beliefs.on_sent("a", request(1, b"y"), 2.0, now=8.0)

    assert only(beliefs, 8.0).queue_seconds == 2.0


@settings(max_examples=15)
@given(
    num_engines=st.integers(2, 5),
    num_requests=st.integers(1, 24),
    gap_seconds=st.sampled_from([0.0, 5.0]),
    seed=st.integers(0, 99),
)
def test_requests_without_a_first_token_are_shared_by_equal_engines(
    num_engines: int, num_requests: int, gap_seconds: float, seed: int
) -> None:
    """Their first tokens are later than predicted: 0.25 s each."""
    costs = EngineCosts(profile=linear_profile(0.1, 0.01, 0.0, {}), bytes_per_token=1)
    beliefs, router = FrontBeliefs(), CostRouter(costs, load_factor=float("inf"))
    for number in range(num_engines):
        beliefs.add_engine(f"{number}", 0.0)
    for number in range(num_requests):
        now = number * gap_seconds
        engines = [replace(one, age_seconds=0.0) for one in beliefs.at(now)]
        chosen = router.choose(request(number, b"%d %d" % (seed, number)), engines)
        beliefs.on_sent(chosen.engine_id, request(number, b"%d %d" % (seed, number)), 0.25, now)
    counts = [one.num_outstanding for one in beliefs.at(0.0)]

    assert max(counts) - min(counts) <= 1


def test_lost_engine_returns_its_requests_and_ignores_late_messages() -> None:
    beliefs = front()
    for number in range(3):
        beliefs.on_sent("a", request(number, b"x"), 1.0, now=0.0)
    beliefs.on_first_token("a", 1, now=1.0)
    beliefs.on_end("a", 1, now=1.0)

    assert beliefs.lose_engine("a") == [0, 2]
    beliefs.on_first_token("a", 0, now=2.0)
    beliefs.on_end("a", 0, now=2.0)
    beliefs.on_report("a", report(2.0, {b"x": Tier.DEVICE}))
    assert beliefs.at(2.0) == []
    beliefs.add_engine("a", 3.0)
    assert dict(only(beliefs, 3.0).held) == {}
