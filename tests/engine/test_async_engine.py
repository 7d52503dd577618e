"""The engine's thread: every request gets exactly one last event."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stillroom.core.batch import Batch, StepResult
from stillroom.core.clock import SystemClock
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, Request
from stillroom.engine import async_engine, recovery
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.backlog import Backlog
from stillroom.engine.events import TokenEvent
from stillroom.errors import (
    DeadlineExceededError,
    DeviceLostError,
    EngineClosedError,
    EngineError,
    PromptTooLongError,
    QueueFullError,
)
from stillroom.runner.torch_runner import Runner
from tests.engine.harness import Run, engine_on, request
from tests.engine.modelled import ask, modelled_engine
from tests.fakes import random_checkpoint
from tests.server.fakes import until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    random_checkpoint(path, "Llama", num_hidden_layers=1)
    return path


def read_all(events: "queue.SimpleQueue[TokenEvent]") -> list[TokenEvent]:
    read = [events.get(timeout=30)]
    while read[-1].finish_reason is None:
        read.append(events.get(timeout=30))
    return read


def test_many_submitters_get_their_own_tokens(folder: Path) -> None:
    expected = Run(engine_on(folder))
    requests = [request(f"r{i}", [[3 + i, 5, 7]], max_tokens=12) for i in range(12)]
    expected.submit(*requests)
    expected.finish()
    with AsyncEngine(engine_on(folder)) as engine:
        queues: list[queue.SimpleQueue[TokenEvent]] = [queue.SimpleQueue() for _ in requests]
        for one, events in zip(requests, queues, strict=True):
            engine.submit(one, events.put)
        for one, events in zip(requests, queues, strict=True):
            tokens = [event.token_id for event in read_all(events)]
            assert tokens == expected.tokens[one.request_id]
        assert engine.num_free_blocks == engine.num_blocks
        assert (engine.num_waiting, engine.num_running) == (0, 0)


def test_cancel_ends_a_request_and_frees_its_blocks(folder: Path) -> None:
    inner = engine_on(folder)
    runner = inner.runner = HaltingRunner(inner.runner)
    with AsyncEngine(inner) as engine:
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        engine.submit(request("long", [[3, 4]], max_tokens=400), events.put)
        runner.may_go_on.release()
        events.get(timeout=30)
        engine.cancel(RequestId("long"))
        runner.may_go_on.release()
        assert read_all(events)[-1].finish_reason is FinishReason.ABORTED
        assert engine.num_free_blocks == engine.num_blocks
        engine.cancel(RequestId("long"))


def test_close_aborts_running_requests_and_refuses_new_ones(folder: Path) -> None:
    inner = engine_on(folder)
    runner = inner.runner = HaltingRunner(inner.runner)
    engine = AsyncEngine(inner)
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    engine.submit(request("long", [[3, 4]], max_tokens=400), events.put)
    runner.may_go_on.release()
    events.get(timeout=30)
    engine.run(lambda _: until(lambda: not engine._commands.empty()))  # the next event is the last
    runner.may_go_on.release()
    engine.close()
    engine.close()
    last = read_all(events)[-1]
    assert last.finish_reason is FinishReason.ABORTED and isinstance(last.error, EngineClosedError)
    assert engine.num_free_blocks == engine.num_blocks
    with pytest.raises(EngineClosedError):
        engine.submit(request("late", [[3]]), events.put)


class FailingRunner:
    """A runner that cannot run one request."""

    def __init__(self, runner: Runner, name: str, error: BaseException) -> None:
        self._runner, self._name, self._error = runner, name, error

    def execute(self, batch: Batch) -> StepResult:
        if any(entry.request_id == self._name for entry in batch.sequences):
            raise self._error
        return self._runner.execute(batch)

    def recover(self) -> None:
        self._runner.recover()


class RustPanic(BaseException):
    """The class of exception that a panic in a Rust library raises."""


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), RustPanic("index out of bounds")])
def test_request_that_cannot_run_ends_and_the_engine_continues(folder: Path, error: BaseException) -> None:
    inner = engine_on(folder)
    inner.runner = FailingRunner(inner.runner, "unlucky", error)
    with AsyncEngine(inner) as engine:
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        engine.submit(request("unlucky", [[3, 4]]), events.put)
        last = read_all(events)[-1]
        assert isinstance(last.error, EngineError) and str(error) in str(last.error)
        engine.submit(request("lucky", [[3, 4]], max_tokens=5), events.put)
        assert read_all(events)[-1].finish_reason is FinishReason.LENGTH
        assert engine.num_free_blocks == engine.num_blocks and engine.num_failed_steps == 1


def is_accepted(engine: AsyncEngine, one: Request, listener: Callable[[TokenEvent], None]) -> bool:
    """Submit a request; returns whether the queue accepted it."""
    try:
        engine.submit(one, listener)
    except QueueFullError:
        return False
    return True


def test_request_that_cannot_be_started_ends_and_the_engine_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = modelled_engine()
    start = inner.submit

    def broken(request: Request, *samples: Request) -> None:
        start(request, *samples)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(inner, "submit", broken)
    with AsyncEngine(inner, max_waiting=1) as engine:
        first: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        second: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        engine.submit(ask("unlucky"), first.put, (ask("sample"), second.put))
        for events in (first, second):
            (last,) = read_all(events)
            assert isinstance(last.error, EngineError) and "can't start new thread" in str(last.error)
        monkeypatch.setattr(inner, "submit", start)
        assert (engine.num_waiting, engine.num_running) == (0, 0)
        until(lambda: is_accepted(engine, ask("lucky", max_tokens=5), first.put))
        assert read_all(first)[-1].finish_reason is FinishReason.LENGTH


def test_failed_command_affects_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = modelled_engine()

    def broken(*_: object) -> None:
        raise MemoryError

    with AsyncEngine(inner) as engine:
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        engine.run(broken)
        with monkeypatch.context() as patch:
            patch.setattr(inner, "cancel", broken)
            both_came = threading.Event()
            engine.run(lambda _: both_came.wait(30))
            engine.submit(ask("bad", max_tokens=190), events.put)
            engine.cancel(RequestId("bad"))
            both_came.set()
            assert read_all(events)[-1].finish_reason is FinishReason.ABORTED
            engine.submit(ask("good", max_tokens=5), events.put)
            assert [event.request_id for event in read_all(events)] == ["good"] * 5, (
                "though the other request continues"
            )


@pytest.mark.parametrize("error", [MemoryError(), RustPanic()])
def test_every_request_gets_a_last_event_when_the_engine_fails(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    inner = modelled_engine(slots=1)
    runner = inner.runner = HaltingRunner(inner.runner)

    def broken(*_: object) -> None:
        raise error

    events = {name: queue.SimpleQueue[TokenEvent]() for name in ("runs", "queued")}
    engine = AsyncEngine(inner)
    engine.submit(ask("runs"), events["runs"].put)
    assert runner.is_waiting.acquire(timeout=30)
    was_alive = engine.is_alive
    engine.submit(ask("queued"), events["queued"].put)  # a command that has not run yet
    for name in ("abandon_audit", "cancel"):
        monkeypatch.setattr(inner, name, broken)
    monkeypatch.setattr(inner.scheduler, "update", broken)
    runner.may_go_on.release()
    for waiting in events.values():
        assert "engine has failed" in str(read_all(waiting)[-1].error)
    with pytest.raises(EngineClosedError):
        engine.submit(ask("late"), events["runs"].put)
    assert (was_alive, engine.is_alive, engine.has_failed) == (True, False, True)
    engine.close()


@pytest.mark.parametrize("is_sound", [True, False])
def test_engine_continues_after_a_failed_decision_only_if_its_blocks_are_accounted_for(
    monkeypatch: pytest.MonkeyPatch, is_sound: bool
) -> None:
    inner = modelled_engine()
    schedule = inner.scheduler.schedule

    def broken(now: float) -> Batch | None:
        monkeypatch.setattr(inner.scheduler, "schedule", schedule)
        schedule(now)
        if not is_sound:
            inner.scheduler.kv.pool.try_allocate(1)
        raise RuntimeError("undecided")

    monkeypatch.setattr(inner.scheduler, "schedule", broken)
    with AsyncEngine(inner) as engine:
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        engine.submit(ask("one"), events.put)
        assert "undecided" in str(read_all(events)[-1].error)
        until(lambda: is_sound or engine.has_failed)
        if is_sound:
            engine.submit(ask("two", max_tokens=5), events.put)
            assert read_all(events)[-1].finish_reason is FinishReason.LENGTH
            assert engine.is_alive and engine.num_failed_steps == 1
        else:
            with pytest.raises(EngineClosedError):
                engine.submit(ask("two"), events.put)


class DisconnectedRunner:
    """A runner whose device is lost until `is_connected` is set."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.is_connected = threading.Event()

    def execute(self, batch: Batch) -> StepResult:
        self._check()
        return self._runner.execute(batch)

    def recover(self) -> None:
        self._check()
        self._runner.recover()

    def _check(self) -> None:
        if not self.is_connected.is_set():
            raise RuntimeError("CUDA error: no CUDA-capable device is detected")


def test_idle_engine_retries_its_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = modelled_engine()
    inner.clock = SystemClock()
    monkeypatch.setattr(recovery, "LONGEST_PAUSE", 0.005)
    inner._recovery = recovery.Recovery(lambda: inner.runner.recover(), inner.clock)
    monkeypatch.setattr(inner._recovery, "_pause", 0.005)
    inner.runner = runner = DisconnectedRunner(inner.runner)
    with AsyncEngine(inner) as engine:
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        engine.submit(ask("one"), events.put)
        assert isinstance(read_all(events)[-1].error, DeviceLostError)
        with pytest.raises(DeviceLostError):
            engine.submit(ask("two"), events.put)
        assert engine.is_alive and engine.device_problem is not None and engine.num_device_losses == 1
        runner.is_connected.set()
        until(lambda: engine.device_problem is None)
        engine.submit(ask("three", max_tokens=5), events.put)
        assert read_all(events)[-1].finish_reason is FinishReason.LENGTH


def test_broken_listener_affects_only_its_own_request(folder: Path) -> None:
    def broken(event: TokenEvent) -> None:
        raise ValueError("closed")

    with AsyncEngine(engine_on(folder)) as engine:
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        engine.submit(request("bad", [[3, 4]], max_tokens=400), broken)
        engine.submit(request("good", [[3, 4]], max_tokens=50), events.put)
        assert len([event for event in read_all(events) if event.token_id is not None]) == 50


def test_impossible_request_is_refused_at_submit(folder: Path) -> None:
    with AsyncEngine(engine_on(folder)) as engine, pytest.raises(PromptTooLongError):
        engine.submit(request("huge", [[3] * 600]), lambda event: None)


class HaltingRunner:
    """A runner whose steps wait for permission, and that signals when one waits."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.is_waiting, self.may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def execute(self, batch: Batch) -> StepResult:
        self.is_waiting.release()
        assert self.may_go_on.acquire(timeout=30)
        return self._runner.execute(batch)

    def recover(self) -> None:
        self._runner.recover()


def test_queue_limit_holds_for_concurrent_submits() -> None:
    inner = modelled_engine(slots=1)
    runner = inner.runner = HaltingRunner(inner.runner)
    done: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    refused: queue.SimpleQueue[QueueFullError] = queue.SimpleQueue()
    with AsyncEngine(inner, max_waiting=5) as engine:
        engine.submit(ask("runs", max_tokens=1), done.put)
        assert runner.is_waiting.acquire(timeout=30)

        def submit(number: int) -> None:
            try:
                engine.submit(ask(f"r{number}", max_tokens=1), done.put)
            except QueueFullError as error:
                refused.put(error)

        # The engine's thread is in a step, so none of these commands has run yet.
        threads = [threading.Thread(target=submit, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert refused.qsize() == 15 and engine.num_waiting == 0
        assert "runtime.max_waiting" in str(refused.get())

        runner.may_go_on.release()
        assert runner.is_waiting.acquire(timeout=30)
        assert engine.num_waiting == 4, "one request runs now"
        submit(20)
        submit(21)
        assert refused.qsize() == 15, "the queue had space for one"
        runner.may_go_on.release(10)
        assert len([done.get(timeout=30) for _ in range(7)]) == 7
        assert done.empty()


def test_refusal_estimates_the_wait_from_the_rate_of_ended_requests() -> None:
    backlog = Backlog(max_waiting=2)
    backlog.begin(100.0)

    def told(now: float) -> float:
        with pytest.raises(QueueFullError) as refused:
            backlog.accept("", 2, lambda: ["", ""], now)
        return refused.value.retry_after_seconds

    assert told(100.2) == 1.0
    assert told(107.0) == 7.0, "no request has ended in this time"
    for at in (104.0, 106.0, 110.0):
        backlog.end(at)
    assert told(112.0) == 4.0
    for at in range(111, 400):
        backlog.end(at / 10)
    assert told(40.0) == 1.0
    backlog.begin(1000.0)
    assert told(1003.0) == 3.0, "idle time does not count"


def test_full_queue_accepts_a_tenant_below_its_share() -> None:
    backlog, waiting = Backlog(max_waiting=6), ["anna"] * 5

    def is_let_in(tenant: str) -> bool:
        try:
            backlog.accept(tenant, len(waiting), lambda: waiting, 0.0)
        except QueueFullError:
            return False
        return True

    assert [is_let_in("anna") for _ in range(2)] == [True, False]
    assert [is_let_in("ben") for _ in range(4)] == [True, True, True, False], "half of six"
    assert is_let_in("carla") and not is_let_in("anna")
    for tenant in ("anna", "ben", "ben", "ben", "carla"):
        backlog.enter_scheduler(tenant)
    waiting.clear()
    assert is_let_in("anna")


def test_zero_queue_limit_accepts_all_requests() -> None:
    backlog = Backlog(max_waiting=0)
    for _ in range(10_000):
        backlog.accept("", 5_000, lambda: pytest.fail("waiting requests are counted without a limit"), 0.0)


def test_idle_engine_waits_for_the_batch_delay_and_no_longer() -> None:
    inner = modelled_engine(batch_delay=0.01)
    inner.clock = SystemClock()
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    with AsyncEngine(inner) as engine:
        started = inner.clock.monotonic()
        engine.submit(ask("alone", max_tokens=1), events.put)
        assert read_all(events)[-1].finish_reason is FinishReason.LENGTH
        assert inner.clock.monotonic() - started >= 0.01


def test_deadline_ends_a_request_during_the_batch_delay() -> None:
    inner = modelled_engine(batch_delay=1000.0)
    inner.clock = SystemClock()
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    with AsyncEngine(inner) as engine:
        engine.submit(ask("late", deadline=inner.clock.monotonic() + 0.05), events.put)
        assert isinstance(read_all(events)[-1].error, DeadlineExceededError)


def test_full_step_ends_the_batch_delay() -> None:
    inner = modelled_engine(batch_delay=1000.0)
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    with AsyncEngine(inner) as engine:

        def submit(one: Request) -> None:
            engine.submit(one, events.put)
            until(lambda: inner.scheduler.delayed_until is not None)

        submit(ask("a", num_tokens=8, max_tokens=1))
        engine.submit(ask("b", num_tokens=8, max_tokens=1), events.put)
        assert {events.get(timeout=30).request_id for _ in "ab"} == {"a", "b"}
        submit(ask("left", max_tokens=1))
        engine.cancel(RequestId("left"))
        assert read_all(events)[-1].finish_reason is FinishReason.ABORTED
        engine.submit(ask("late", deadline=inner.clock.monotonic()), events.put)
        assert isinstance(read_all(events)[-1].error, DeadlineExceededError)


def test_before_step_runs_in_the_engine_thread_between_steps_and_while_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "_IDLE_SECONDS", 0.001)
    inner = modelled_engine()
    threads: set[str] = set()
    calls: list[int] = []

    def before_step() -> None:
        threads.add(threading.current_thread().name)
        calls.append(inner.scheduler.num_running)
        raise RuntimeError("the engine goes on")

    with AsyncEngine(inner, before_step=before_step) as engine:
        until(lambda: len(calls) > 3)
        idle = len(calls)
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        engine.submit(ask("r", max_tokens=5), events.put)
        assert len([event for event in read_all(events) if event.token_id is not None]) == 5
        assert calls[idle:].count(1) >= 4, "the request runs, from its second step on"
    assert threads == {"stillroom-engine"}
