"""A request past its deadline ends at the next step, waiting or running, and does not restart."""

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.core.clock import VirtualClock
from stillroom.core.request import FinishReason
from stillroom.engine.audit import Audit
from stillroom.engine.deadlines import Deadlines
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent
from stillroom.engine.reuse_level import ReuseLevel
from stillroom.errors import DeadlineExceededError, RequestTimeoutError
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from tests.engine.modelled import NUM_BLOCKS, ask, modelled_engine
from tests.examples import most_examples


def run(engine: Engine) -> list[TokenEvent]:
    """Run until no request is left; returns all events."""
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    assert engine.scheduler.kv.pool.num_free == NUM_BLOCKS
    return events


def ends(events: list[TokenEvent]) -> dict[str, tuple[float, type[Exception] | None]]:
    """Return when each request ended, and why."""
    return {one.request_id: (one.at, type(one.error) if one.error else None) for one in events if one.finish_reason}


def test_deadline_ends_a_running_request_after_its_tokens_so_far() -> None:
    engine = modelled_engine(timeout=1.5)
    engine.submit(ask("late", deadline=1.5))
    events = run(engine)
    assert [(one.at, one.finish_reason) for one in events] == [(1, None), (2, None), (2, FinishReason.ABORTED)]
    assert isinstance(events[-1].error, DeadlineExceededError) and "deadline_seconds" in str(events[-1].error)


def test_deadline_ends_a_waiting_request_and_no_other() -> None:
    engine = modelled_engine(slots=1)
    engine.submit(ask("runs", max_tokens=5))
    engine.submit(ask("late", deadline=2.0))
    engine.submit(ask("in time", max_tokens=2, deadline=7.0))
    assert ends(run(engine)) == {"late": (2, DeadlineExceededError), "runs": (5, None), "in time": (7, None)}


@pytest.mark.parametrize("deadline", [0.0, 3.0])
def test_samples_of_a_prompt_have_one_deadline(deadline: float) -> None:
    engine = modelled_engine()
    engine.submit(*(ask(name, deadline=deadline) for name in "abc"))
    assert ends(run(engine)) == dict.fromkeys("abc", (deadline, DeadlineExceededError))


def test_a_restart_does_not_move_the_deadline() -> None:
    engine = modelled_engine(timeout=2.0)
    engine.submit(ask("late", deadline=3.0))
    engine.submit(ask("slow"))
    events = run(engine)
    assert ends(events) == {"slow": (4, RequestTimeoutError), "late": (3, DeadlineExceededError)}


def test_request_that_ended_in_time_does_not_expire() -> None:
    engine = modelled_engine(timeout=3.0)
    engine.submit(ask("a", max_tokens=1, deadline=2.0))
    engine.submit(ask("b", deadline=2.0))
    engine.step()
    engine.cancel(ask("b").request_id)
    engine.submit(ask("a", max_tokens=2, deadline=50.0))
    assert ends(run(engine)) == {"a": (3, None)}


def test_request_that_ended_in_a_failed_step_does_not_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails on its second request has ended the first one without returning its event."""
    level = ReuseLevel(AnywhereOptions(0.15, "question"), lambda _: None, 1.0)
    audit = Audit(level, share=1.0, randomness=random.Random(0))
    engine = modelled_engine(timeout=5.0)
    engine.auditing.audit = audit
    engine.submit(ask("ends", max_tokens=1))
    engine.submit(ask("fails"))
    update = engine.scheduler.update

    def failing(*arguments: Any) -> None:
        update(*arguments)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "update", failing)
        with pytest.raises(MemoryError):
            engine.step()
    assert [engine.cancel(ask(name).request_id) is None for name in ("ends", "fails")] == [True, False]
    assert not audit._open
    engine.submit(ask("innocent", max_tokens=5))
    assert ends(run(engine)) == {"innocent": (6, None)}


@settings(max_examples=most_examples(100))
@given(st.integers(0, 10_000), st.sampled_from([0.0, 4.0]))
def test_expired_requests_agree_with_a_scan_of_all_requests(seed: int, timeout: float) -> None:
    draw, clock, deadlines = random.Random(seed), VirtualClock(), Deadlines(timeout)
    limits: dict[str, tuple[float, float, bool]] = {}  # own deadline, limit of this start, whether it has restarted
    for number in range(40):
        one = ask(f"r{number}", deadline=draw.choice((None, clock.now + draw.randint(0, 9))))
        deadlines.begin(one, clock.now)
        own = math.inf if one.deadline is None else one.deadline
        limits[one.request_id] = (own, clock.now + (timeout or math.inf), False)
        if draw.random() < 0.2:
            ended = draw.choice(sorted(limits))
            deadlines.end(ask(ended).request_id)
            del limits[ended]
        clock.advance(draw.randint(0, 2))
        expected: dict[str, type[Exception] | None] = {}
        for name, (own, end, is_second) in list(limits.items()):
            if own <= clock.now or (end <= clock.now and is_second):
                expected[name] = DeadlineExceededError if own <= clock.now else RequestTimeoutError
                del limits[name]
            elif end <= clock.now:
                expected[name] = None
                limits[name] = (own, clock.now + timeout, True)
        expired = deadlines.pop_expired(clock.now)
        assert {name: None if error is None else type(error) for name, error in expired} == expected
        assert deadlines.next_at == min((min(own, end) for own, end, _ in limits.values()), default=math.inf)
