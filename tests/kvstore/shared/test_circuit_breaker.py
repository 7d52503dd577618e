"""The circuit breaker and the meter of the shared tier, on a clock of the test."""

import pytest

from stillroom.core.kv import Link
from stillroom.kvstore.shared.circuit_breaker import LONGEST_PAUSE, MAX_FAILURES, CircuitBreaker
from stillroom.kvstore.shared.link_meter import LinkMeter
from tests.fakes import ManualClock


def state(breaker: CircuitBreaker) -> tuple[bool, bool]:
    """Whether it is closed, and may be probed."""
    return breaker.is_closed, breaker.may_probe


def closed(clock: ManualClock) -> CircuitBreaker:
    breaker = CircuitBreaker(clock.monotonic)
    assert state(breaker) == (False, True), "nothing is known before the first probe"
    breaker.close()
    return breaker


def test_failures_in_a_row_open_it_and_a_probe_closes_it() -> None:
    clock = ManualClock()
    breaker = closed(clock)
    for _ in range(MAX_FAILURES - 1):
        breaker.fail()
    breaker.succeed()
    for _ in range(MAX_FAILURES - 1):
        breaker.fail()
    assert state(breaker) == (True, False)
    breaker.fail()
    assert state(breaker) == (False, False) and breaker.num_opened == 1
    breaker.succeed()
    assert state(breaker) == (False, False), "a reply that was under way proves nothing"
    clock.advance(1.0)
    assert state(breaker) == (False, True)
    breaker.close()
    assert state(breaker) == (True, False)


def test_pauses_grow_with_failed_probes_up_to_a_limit() -> None:
    clock = ManualClock()
    breaker = closed(clock)
    for _ in range(MAX_FAILURES):
        breaker.fail()
    pauses = []
    for _ in range(7):
        pause = 0.0
        while not breaker.may_probe:
            clock.advance(0.5)
            pause += 0.5
        pauses.append(pause)
        breaker.fail()
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE, LONGEST_PAUSE] and breaker.num_opened == 1


def link_of(meter: LinkMeter) -> Link | None:
    return meter.link


def test_meter_follows_the_measured_times() -> None:
    meter = LinkMeter()
    meter.observe(2**20, 1.0)
    assert link_of(meter) is None
    meter.start(0.001, 2**20, 0.101)
    found = link_of(meter)
    assert found is not None and found.seconds(2**20) == pytest.approx(0.101)
    slow = Link(0.01, 2**20)
    for _ in range(60):
        meter.observe(0, slow.latency_seconds)
        meter.observe(2**20, slow.seconds(2**20))
    found = link_of(meter)
    assert found is not None and found.seconds(2**22) == pytest.approx(slow.seconds(2**22), rel=0.01)
