"""The engine's thread: every request gets exactly one last event, whatever happens."""

import queue
from pathlib import Path

import pytest

from stillroom.core.batch import Batch, StepResult
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent
from stillroom.errors import EngineClosedError, EngineError, PromptTooLongError
from tests.engine.harness import Run, engine_on, request
from tests.fakes import random_checkpoint


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
    with AsyncEngine(engine_on(folder)) as engine:
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        engine.submit(request("long", [[3, 4]], max_tokens=400), events.put)
        events.get(timeout=30)
        engine.cancel(RequestId("long"))
        assert read_all(events)[-1].finish_reason is FinishReason.ABORTED
        assert engine.num_free_blocks == engine.num_blocks
        engine.cancel(RequestId("long"))


def test_close_aborts_what_runs_and_refuses_what_comes(folder: Path) -> None:
    engine = AsyncEngine(engine_on(folder))
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    engine.submit(request("long", [[3, 4]], max_tokens=400), events.put)
    events.get(timeout=30)
    engine.close()
    engine.close()
    last = read_all(events)[-1]
    assert last.finish_reason is FinishReason.ABORTED and isinstance(last.error, EngineClosedError)
    assert engine.num_free_blocks == engine.num_blocks
    with pytest.raises(EngineClosedError):
        engine.submit(request("late", [[3]]), events.put)


def test_a_failing_step_aborts_its_requests_and_the_engine_goes_on(folder: Path) -> None:
    inner = engine_on(folder)
    real = inner.runner

    class FailsOnce:
        failed = False

        def execute(self, batch: Batch) -> StepResult:
            if not self.failed:
                self.failed = True
                raise RuntimeError("out of memory")
            return real.execute(batch)

        def recover(self) -> None:
            real.recover()

    with AsyncEngine(Engine(inner.scheduler, FailsOnce(), inner.clock)) as engine:
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        engine.submit(request("unlucky", [[3, 4]]), events.put)
        last = read_all(events)[-1]
        assert isinstance(last.error, EngineError) and "out of memory" in str(last.error)
        engine.submit(request("lucky", [[3, 4]], max_tokens=5), events.put)
        assert read_all(events)[-1].finish_reason is FinishReason.LENGTH
        assert engine.num_free_blocks == engine.num_blocks


def test_a_broken_listener_costs_only_its_own_request(folder: Path) -> None:
    def broken(event: TokenEvent) -> None:
        raise ValueError("closed")

    with AsyncEngine(engine_on(folder)) as engine:
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        engine.submit(request("bad", [[3, 4]], max_tokens=400), broken)
        engine.submit(request("good", [[3, 4]], max_tokens=50), events.put)
        assert len([event for event in read_all(events) if event.token_id is not None]) == 50


def test_an_impossible_request_is_refused_at_once(folder: Path) -> None:
    with AsyncEngine(engine_on(folder)) as engine, pytest.raises(PromptTooLongError):
        engine.submit(request("huge", [[3] * 600]), lambda event: None)
