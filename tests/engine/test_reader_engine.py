"""The reader's thread: batches, turns, exactly one last event, deadlines, a bounded queue and its end."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.clock import SystemClock
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId, RequestId
from stillroom.core.request import FinishReason, SampleRequest, SamplingParams
from stillroom.engine.events import TokenEvent
from stillroom.engine.reader_engine import ReaderAnswer, ReaderEngine, ReaderPrompt
from stillroom.errors import DeadlineExceededError, EngineClosedError, EngineError, QueueFullError
from tests.fakes import ManualClock
from tests.server.fakes import until

CHUNK = Chunk(ChunkId(1), DocumentId("a.md"), 0, "Lima lies in Peru.")


def prompt(question: str, num_chunks: int = 1) -> ReaderPrompt:
    return ReaderPrompt(question, (CHUNK,) * num_chunks)


def sample(name: str, **settings: Any) -> SampleRequest:
    max_tokens = settings.pop("max_tokens", 256)
    return SampleRequest(request_id=RequestId(name), sampling=SamplingParams(max_tokens=max_tokens), **settings)


class Reading:
    """Answers with the question; waits for `gate`, and records what it read together."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.batches: list[list[str]] = []

    def __call__(self, prompts: Sequence[ReaderPrompt]) -> list[ReaderAnswer]:
        self.batches.append([one.question for one in prompts])
        assert self.gate.wait(20)
        if any("fail" in one.question for one in prompts):
            raise ValueError("this question cannot be read")
        return [ReaderAnswer(one.question, (0, 1), 0.5) for one in prompts]


class Log:
    """Events by request."""

    def __init__(self) -> None:
        self.events: dict[str, list[TokenEvent]] = {}

    def listener(self, name: str) -> Callable[[TokenEvent], None]:
        events = self.events.setdefault(name, [])
        return events.append

    def last(self, name: str) -> TokenEvent:
        """Wait for the last event, and return it."""
        until(lambda: any(event.finish_reason for event in self.events[name]))
        assert sum(event.finish_reason is not None for event in self.events[name]) == 1
        return self.events[name][-1]

    def text(self, name: str) -> str:
        self.last(name)
        return "".join(event.text for event in self.events[name])


@pytest.fixture
def reading() -> Reading:
    return Reading()


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def engine(reading: Reading) -> Iterator[ReaderEngine]:
    with ReaderEngine(reading, SystemClock(), max_waiting=4, batch_size=4) as running:
        yield running
        reading.gate.set()


def ask(
    engine: ReaderEngine, log: Log, name: str, tenant: str = "", *, chunks: int = 1, text: str = "", **settings: Any
) -> None:
    engine.submit(prompt(text or name, chunks), [sample(name, **settings)], [log.listener(name)], tenant)


def begin_reading(engine: ReaderEngine, log: Log, reading: Reading) -> None:
    """Let the thread read `first`, so that what follows waits."""
    ask(engine, log, "first")
    until(lambda: len(reading.batches) == 1)


def test_an_answer_comes_in_words_and_the_last_one_ends_it(engine: ReaderEngine, reading: Reading, log: Log) -> None:
    reading.gate.set()
    ask(engine, log, "a", text="Three words\nhere.")
    assert log.text("a") == "Three words\nhere."
    events = log.events["a"]
    assert [event.text for event in events] == ["Three ", "words\n", "here."]
    assert [event.finish_reason for event in events] == [None, None, FinishReason.STOP]
    assert events[0].admission is not None and events[1].admission is None
    assert all((event.highlight, event.confidence) == ((0, 1), 0.5) for event in events)


def test_max_tokens_counts_words(engine: ReaderEngine, reading: Reading, log: Log) -> None:
    reading.gate.set()
    ask(engine, log, "cut", text="one two three", max_tokens=2)
    ask(engine, log, "whole", text="one two", max_tokens=2)
    assert (log.text("cut"), log.last("cut").finish_reason) == ("one two ", FinishReason.LENGTH)
    assert (log.text("whole"), log.last("whole").finish_reason) == ("one two", FinishReason.STOP)


def test_questions_that_wait_are_read_together_up_to_the_batch_size(
    engine: ReaderEngine, reading: Reading, log: Log
) -> None:
    begin_reading(engine, log, reading)
    for name, chunks in (("a", 2), ("b", 2), ("c", 1), ("d", 9)):
        ask(engine, log, name, chunks=chunks)
    reading.gate.set()
    assert [log.text(name) for name in "abcd"] == ["a", "b", "c", "d"]
    assert reading.batches == [["first"], ["a", "b"], ["c"], ["d"]]


def test_all_samples_of_a_question_have_the_answer_of_one_reading(
    engine: ReaderEngine, reading: Reading, log: Log
) -> None:
    reading.gate.set()
    names = ["a", "a-1", "a-2"]
    engine.submit(prompt("same"), [sample(name) for name in names], [log.listener(name) for name in names])
    assert [log.text(name) for name in names] == ["same"] * 3
    assert reading.batches == [["same"]]


def test_tenants_take_turns_and_priority_counts_within_a_tenant(
    engine: ReaderEngine, reading: Reading, log: Log
) -> None:
    begin_reading(engine, log, reading)
    for name, tenant, priority in (("a1", "a", 0), ("a2", "a", -1), ("b1", "b", 5), ("a3", "a", 0)):
        ask(engine, log, name, tenant, chunks=4, priority=priority)
    reading.gate.set()
    log.last("a3")
    assert reading.batches[1:] == [["a2"], ["b1"], ["a1"], ["a3"]]


def test_a_full_queue_refuses_but_takes_a_tenant_below_its_share(
    engine: ReaderEngine, reading: Reading, log: Log
) -> None:
    begin_reading(engine, log, reading)
    for name in "abcd":
        ask(engine, log, name, "busy")
    with pytest.raises(QueueFullError, match="4 requests wait") as raised:
        ask(engine, log, "e", "busy")
    assert raised.value.retry_after_seconds >= 1
    ask(engine, log, "f", "quiet")
    assert (engine.num_waiting, engine.num_running) == (5, 1)
    engine.cancel(RequestId("d"))
    reading.gate.set()
    assert log.last("d").finish_reason is FinishReason.ABORTED
    assert log.text("f") == "f"
    assert all(log.text(name) == name for name in "abc")
    until(lambda: engine.num_waiting == engine.num_running == 0)


def test_a_cancelled_question_is_not_read(engine: ReaderEngine, reading: Reading, log: Log) -> None:
    begin_reading(engine, log, reading)
    ask(engine, log, "a")
    engine.submit(prompt("b"), [sample("b"), sample("b-1")], [log.listener("b"), log.listener("b-1")])
    for name in ("a", "b-1", "unknown"):
        engine.cancel(RequestId(name))
    reading.gate.set()
    assert log.last("a").finish_reason is FinishReason.ABORTED and log.last("a").error is None
    assert log.last("b-1").finish_reason is FinishReason.ABORTED
    assert log.text("b") == "b"
    assert reading.batches == [["first"], ["b"]]


def test_a_question_that_is_cancelled_while_it_is_read_has_no_answer(
    engine: ReaderEngine, reading: Reading, log: Log
) -> None:
    begin_reading(engine, log, reading)
    engine.cancel(RequestId("first"))
    reading.gate.set()
    assert log.last("first").finish_reason is FinishReason.ABORTED
    assert len(log.events["first"]) == 1


def test_a_question_that_fails_alone_ends_alone(engine: ReaderEngine, reading: Reading, log: Log) -> None:
    begin_reading(engine, log, reading)
    for name in ("a", "fail", "b"):
        ask(engine, log, name)
    reading.gate.set()
    assert isinstance(log.last("fail").error, EngineError)
    assert [log.text("a"), log.text("b")] == ["a", "b"]
    ask(engine, log, "after")
    assert log.text("after") == "after"


def test_a_listener_that_fails_stops_no_other(engine: ReaderEngine, reading: Reading, log: Log) -> None:
    def broken(event: TokenEvent) -> None:
        raise RuntimeError("the event loop is closed")

    reading.gate.set()
    engine.submit(prompt("a b c"), [sample("broken")], [broken])
    ask(engine, log, "a")
    assert log.text("a") == "a"
    until(lambda: engine.num_running == 0)


def test_a_deadline_ends_a_question_that_waits_and_one_that_is_read(reading: Reading, log: Log) -> None:
    clock = ManualClock()
    with ReaderEngine(reading, clock) as engine:
        ask(engine, log, "first", deadline=clock.monotonic() + 1)
        until(lambda: len(reading.batches) == 1)
        ask(engine, log, "late", deadline=clock.monotonic() + 1)
        ask(engine, log, "patient", deadline=clock.monotonic() + 100)
        clock.advance(2)
        reading.gate.set()
        assert isinstance(log.last("first").error, DeadlineExceededError)
        assert isinstance(log.last("late").error, DeadlineExceededError)
        assert log.text("patient") == "patient"
    assert reading.batches == [["first"], ["patient"]]


def test_a_deadline_wakes_the_idle_thread(reading: Reading, log: Log) -> None:
    """A question whose deadline has passed on arrival is not read."""
    clock = SystemClock()
    with ReaderEngine(reading, clock) as engine:
        ask(engine, log, "late", deadline=clock.monotonic() - 1)
        assert isinstance(log.last("late").error, DeadlineExceededError)
    assert reading.batches == []


def test_closing_ends_every_question_and_refuses_later_ones(reading: Reading, log: Log) -> None:
    engine = ReaderEngine(reading, SystemClock())
    begin_reading(engine, log, reading)
    ask(engine, log, "waits")
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(lambda: not engine.is_alive)
    with pytest.raises(EngineClosedError):
        ask(engine, log, "later")
    reading.gate.set()
    closing.join()
    assert all(isinstance(log.last(name).error, EngineClosedError) for name in ("first", "waits"))
    engine.close()


def test_a_thread_that_fails_gives_every_question_a_last_event(log: Log) -> None:
    opened = threading.Event()

    def prepare() -> None:
        assert opened.wait(20)
        raise MemoryError("no memory")

    engine = ReaderEngine(Reading(), SystemClock(), prepare=prepare)
    ask(engine, log, "a")
    opened.set()
    assert isinstance(log.last("a").error, EngineError)
    until(lambda: not engine.is_alive)
    with pytest.raises(EngineClosedError):
        ask(engine, log, "b")


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.integers(-1, 1), st.booleans(), st.integers(1, 3)),
        max_size=12,
    )
)
def test_every_request_has_one_last_event_whatever_the_load(
    requests: list[tuple[str, int, int, bool, int]],
) -> None:
    reading, log = Reading(), Log()
    with ReaderEngine(reading, SystemClock(), batch_size=8) as engine:
        for number, (tenant, chunks, priority, is_cancelled, num_samples) in enumerate(requests):
            names = [f"{number}-{index}" for index in range(num_samples)]
            samples = [sample(name, priority=priority) for name in names]
            engine.submit(prompt(str(number), chunks), samples, [log.listener(name) for name in names], tenant)
            if is_cancelled:
                engine.cancel(RequestId(names[0]))
        reading.gate.set()
        for name in log.events:
            if log.last(name).finish_reason is not FinishReason.ABORTED:
                assert log.text(name) == name.partition("-")[0]
        assert engine.num_waiting == engine.num_running == 0
