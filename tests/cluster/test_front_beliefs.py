"""Tests a front's beliefs: its own log between reports, and what a report replaces."""

from stillroom.cluster.engine_belief import EngineBelief
from stillroom.cluster.front_beliefs import EngineReport, FrontBeliefs
from stillroom.cluster.routed_request import RoutedPiece, RoutedRequest
from stillroom.core.kv import Tier


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
