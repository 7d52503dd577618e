"""A front's engine with scripted engines: broken streams, refusals, silence, cancellation, deadlines."""

import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from stillroom.cluster.directory import EngineDirectory
from stillroom.cluster.front_engines import engine_name
from stillroom.cluster.wire import Failure, FirstToken, WireEvent
from stillroom.config.engine_address import parse_engine_addresses
from stillroom.core.clock import SystemClock
from stillroom.core.ids import RequestId
from stillroom.core.kv import Tier
from stillroom.core.prompt import SegmentKind
from stillroom.core.request import FinishReason, SampleRequest, SamplingParams
from stillroom.core.reuse import PromptReuse, Reason, SegmentReuse
from stillroom.engine import cluster_client, cluster_engine
from stillroom.engine.cluster_client import ClusterClient
from stillroom.engine.cluster_engine import ClusterEngine, Patience
from stillroom.engine.events import TokenEvent
from stillroom.errors import (
    DeadlineExceededError,
    EngineClosedError,
    EngineRefusedError,
    EngineUnavailableError,
    PromptTooLongError,
    QueueFullError,
    UsageError,
)
from tests.cluster.test_front_engines import EXPECTED, INFO, prompt
from tests.engine.scripted import reply
from tests.engine.wire_server import STREAM, Answer, Script, WireEngine, line, refusal, wire_engines
from tests.server.fakes import until

SECRET = "the-secret"
WHOLE = (
    STREAM
    + line(WireEvent(sample=0, tokens=(3,)))
    + b"\n"
    + line(WireEvent(sample=0, tokens=(4, 5), end=FinishReason.STOP))
)
CUT = STREAM + line(WireEvent(sample=0, tokens=(3,))) + line(WireEvent(sample=0, tokens=(4,)))[:-3]
"""One whole line, and one that was cut."""
REST = STREAM + line(WireEvent(sample=0, tokens=(4, 5), end=FinishReason.STOP))


@dataclass
class ClusterFixture:
    """A front's engine, scripted engines, and what they were asked."""

    engine: ClusterEngine
    engines: list[WireEngine]
    script: Script
    received: "list[queue.SimpleQueue[TokenEvent]]" = field(default_factory=list)

    def submit(self, *names: str, deadline_s: float | None = None) -> "list[queue.SimpleQueue[TokenEvent]]":
        deadline = None if deadline_s is None else SystemClock().monotonic() + deadline_s
        samples = [
            SampleRequest(request_id=RequestId(name), sampling=SamplingParams(max_tokens=9), deadline=deadline)
            for name in names
        ]
        received: list[queue.SimpleQueue[TokenEvent]] = [queue.SimpleQueue() for _ in names]
        self.engine.submit(prompt(), samples, [one.put for one in received], tenant="anna", salt="s", grammar="g")
        return received

    def ask(self) -> list[TokenEvent]:
        (received,) = self.submit("r")
        return read(received)

    def failure(self) -> Exception:
        *_, last = self.ask()
        assert last.finish_reason is FinishReason.ABORTED and last.error is not None
        assert "127.0.0.1" not in str(last.error) and SECRET not in str(last.error)
        return last.error


def read(events: "queue.SimpleQueue[TokenEvent]") -> list[TokenEvent]:
    """Return all events up to the last."""
    found = [events.get(timeout=20)]
    while found[-1].finish_reason is None:
        found.append(events.get(timeout=20))
    return found


def tokens(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


@contextmanager
def talking(
    *answers: Answer, number: int = 2, silence_s: float = 20.0, max_migrations: int = 3
) -> Iterator[ClusterFixture]:
    with (
        wire_engines(answers, INFO, number) as (engines, script),
        front([one.url for one in engines], silence_s, Patience(max_migrations, 20.0)) as engine,
    ):
        engine.wait_until_ready()
        until(lambda: all(engine.alive.get(one.url) for one in engines))
        yield ClusterFixture(engine, engines, script)


def until_set(is_over: threading.Event) -> Answer:
    """Begin a stream, and send nothing until the event."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(STREAM)
        is_over.wait(20)

    return answer


def front(urls: list[str], silence_s: float, patience: Patience) -> ClusterEngine:
    client = ClusterClient(SECRET, connect_timeout_s=5.0, silence_s=silence_s)
    directory = EngineDirectory(parse_engine_addresses("engine.urls", ",".join(urls)))
    return ClusterEngine(client, directory, EXPECTED, patience, SystemClock())


def test_answer_of_one_stream() -> None:
    with talking(WHOLE) as fixture:
        events = fixture.ask()
        (asked,) = fixture.script.asked
        (chosen,) = [one for one in fixture.engines if one.url == fixture.script.by[0]]
        assert not fixture.engine.num_unbegun
    assert tokens(events) == [3, 4, 5] and events[-1].finish_reason is FinishReason.STOP
    assert events[0].route is not None and events[0].route.engine == engine_name(chosen.url)
    assert asked.prompt == prompt() and (asked.tenant, asked.salt, asked.grammar) == ("anna", "s", "g")
    assert asked.may_place and not asked.only_own_chunks
    assert set(chosen.secrets) == {f"Bearer {SECRET}"}


def test_front_counts_what_its_engine_had_kept_of_a_prompt() -> None:
    kept = PromptReuse((SegmentReuse(SegmentKind.SYSTEM, None, 7, Tier.HOST, Reason.HIT),), 0.0, 0.0)
    first = FirstToken(0.0, 0.0, 0.1, kept)
    answer = (
        STREAM + line(WireEvent(sample=0, tokens=(3,), first=first)) + line(WireEvent(sample=0, end=FinishReason.STOP))
    )
    with talking(answer, number=1) as fixture:
        fixture.ask()
        (counts,) = fixture.engine.counts.values()
        assert list(fixture.engine.states) == [fixture.engines[0].url]
    assert (counts.num_prompt_tokens, counts.num_reused_tokens, counts.num_runs) == (7, 7, 1)


@pytest.mark.parametrize(
    "broken",
    [
        CUT,
        STREAM + line(WireEvent(sample=0, tokens=(3,))),
        STREAM + line(WireEvent(sample=0, tokens=(3,))) + b"[{\n",
        STREAM + line(WireEvent(sample=0, tokens=(3,)), WireEvent(sample=7)),
        STREAM
        + line(WireEvent(sample=0, tokens=(3,), end=FinishReason.ABORTED, failure=Failure("device_lost", "it burns"))),
    ],
    ids=["cut", "closed", "garbled", "wrong", "device lost"],
)
def test_broken_stream_goes_on_at_the_other_engine(broken: bytes) -> None:
    with talking(broken, REST) as fixture:
        events = fixture.ask()
        assert tokens(events) == [3, 4, 5] and events[-1].finish_reason is FinishReason.STOP
        first, second = fixture.script.asked
        assert (first.samples[0].generated, second.samples[0].generated) == ((), (3,))
        assert len(set(fixture.script.by)) == 2
        assert fixture.engine.num_moved == 1
        assert fixture.engine.counts[fixture.script.by[0]].num_broken == 1
    assert events[-1].route is not None
    assert (events[-1].route.num_migrations, events[-1].route.is_resumed) == (1, True)


def test_silent_stream_is_broken_and_empty_lines_are_no_silence() -> None:
    is_over = threading.Event()

    def stay_silent(connection: socket.socket) -> None:
        connection.sendall(STREAM + line(WireEvent(sample=0, tokens=(3,))))
        is_over.wait(20)

    def speak_slowly(connection: socket.socket) -> None:
        connection.sendall(STREAM)
        for _ in range(5):
            threading.Event().wait(0.15)
            connection.sendall(b"\n")
        connection.sendall(line(WireEvent(sample=0, tokens=(4, 5), end=FinishReason.STOP)))

    with talking(stay_silent, speak_slowly, silence_s=0.5) as fixture:
        assert tokens(fixture.ask()) == [3, 4, 5]
        is_over.set()


def test_too_many_broken_streams_are_an_error() -> None:
    with talking(CUT, STREAM, STREAM, number=3, max_migrations=2) as fixture:
        error = fixture.failure()
    assert isinstance(error, EngineUnavailableError) and "3 engines in turn" in str(error)


def test_full_engines_are_tried_in_turn_and_their_error_is_told() -> None:
    full = refusal(429, "1024 requests wait already", "queue_full", "retry-after: 7\r\n")
    with talking(full, WHOLE) as fixture:
        assert tokens(fixture.ask()) == [3, 4, 5]
        assert fixture.engine.num_moved == 0
    with talking(full, full) as fixture:
        error = fixture.failure()
        assert len(set(fixture.script.by)) == 2
    assert isinstance(error, QueueFullError) and error.retry_after_seconds == 7.0
    assert "1024 requests wait" in str(error)


def test_answer_that_has_begun_waits_for_full_engines() -> None:
    with talking(CUT, refusal(429), REST) as fixture:
        assert tokens(fixture.ask()) == [3, 4, 5]
        assert fixture.script.asked[-1].samples[0].generated == (3,)


def test_engine_that_shuts_down_or_cannot_be_reached_is_passed_over() -> None:
    with talking(refusal(503, "closing", "shutting_down"), WHOLE) as fixture:
        assert tokens(fixture.ask()) == [3, 4, 5]
    with talking(WHOLE) as fixture:
        fixture.engines[0].close()
        fixture.engines[0].close = lambda: None  # type: ignore[method-assign]
        assert tokens(fixture.ask()) == [3, 4, 5]
        assert fixture.script.by == [fixture.engines[1].url]


def test_request_waits_for_an_engine_and_gives_up() -> None:
    with talking(WHOLE, number=1) as fixture:
        (engine,) = fixture.engines
        busy = replace(engine.state, is_draining=True)
        free, engine.state = engine.state, busy
        until(lambda: fixture.engine.problem is not None)
        (received,) = fixture.submit("waits")
        engine.state = free
        assert tokens(read(received)) == [3, 4, 5]
    with talking(refusal(503, "no room", "shutting_down"), number=1) as fixture:
        fixture.engine._patience = Patience(3, 0.05)
        error = fixture.failure()
    assert isinstance(error, EngineClosedError) and str(error) == "no room"


def test_request_waits_for_engines_that_are_starting_longer_than_for_others() -> None:
    with talking(WHOLE, number=1) as fixture:
        (engine,) = fixture.engines
        front_engine = fixture.engine
        free, engine.state = engine.state, replace(engine.state, is_draining=True)
        until(lambda: front_engine.problem is not None)
        front_engine._patience = Patience(3, 0.01)
        asked = threading.Event()

        def num_starting() -> int:
            asked.set()
            return 2

        front_engine.num_starting = num_starting
        (received,) = fixture.submit("waits")
        assert asked.wait(20)
        assert front_engine.problem == "no engine takes requests now; 2 are starting"
        engine.state = free
        assert tokens(read(received)) == [3, 4, 5]


def test_request_that_waited_too_long_for_starting_engines_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_engine, "MAX_START_SECONDS", 0.02)
    with talking(number=1) as fixture:
        fixture.engines[0].state = replace(fixture.engines[0].state, is_draining=True)
        until(lambda: fixture.engine.problem is not None)
        fixture.engine._patience = Patience(3, 0.01)
        fixture.engine.num_starting = lambda: 2
        error = fixture.failure()
    assert isinstance(error, EngineUnavailableError)
    assert "engine.wait_s is 0.01 s" in str(error) and "2 engines of this server are starting" in str(error)


@pytest.mark.parametrize(
    ("answer", "error", "told"),
    [
        (refusal(400, "too long by 3", "context_length_exceeded"), PromptTooLongError, "too long by 3"),
        (refusal(400, "n=9 is too many", "invalid_value"), UsageError, "n=9"),
        (refusal(413, "big", "too_large"), PromptTooLongError, "big"),
        (refusal(409, "another salt", "salt"), EngineRefusedError, "another salt"),
        (refusal(401, "who?"), EngineRefusedError, "STILLROOM_CLUSTER__SECRET"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi", EngineRefusedError, "no engine"),
    ],
)
def test_refusals_of_the_request_are_told(answer: bytes, error: type[Exception], told: str) -> None:
    with talking(answer) as fixture:
        failure = fixture.failure()
        assert len(fixture.script.asked) == 1, "another engine would refuse it too"
    assert type(failure) is error and told in str(failure)


def test_cancelling_closes_the_stream() -> None:
    is_closed = threading.Event()

    def until_closed(connection: socket.socket) -> None:
        connection.sendall(STREAM + line(WireEvent(sample=0, tokens=(3,)), WireEvent(sample=1, tokens=(6,))))
        assert connection.recv(1) == b""
        is_closed.set()

    with talking(until_closed) as fixture:
        one, two = fixture.submit("one", "two")
        assert one.get(timeout=20).token_id == 3
        fixture.engine.cancel(RequestId("one"))
        last = one.get(timeout=20)
        assert last.finish_reason is FinishReason.ABORTED and last.error is None
        assert not is_closed.is_set(), "the other sample goes on"
        fixture.engine.cancel(RequestId("two"))
        assert [event.token_id for event in read(two)] == [6, None]
        assert is_closed.wait(20)
        fixture.engine.cancel(RequestId("two"))
        assert one.empty() and two.empty()


def test_broken_listener_cancels_its_sample() -> None:
    is_closed = threading.Event()

    def until_closed(connection: socket.socket) -> None:
        connection.sendall(STREAM + line(WireEvent(sample=0, tokens=(3,))) + line(WireEvent(sample=0, tokens=(4,))))
        assert connection.recv(1) == b""
        is_closed.set()

    calls = []

    def fail(event: TokenEvent) -> None:
        calls.append(event)
        raise RuntimeError("the event loop is closed")

    with talking(until_closed) as fixture:
        sample = SampleRequest(request_id=RequestId("r"), sampling=SamplingParams(max_tokens=9))
        fixture.engine.submit(prompt(), [sample], [fail])
        assert is_closed.wait(20)
    assert [event.token_id for event in calls] == [3]


def test_deadline_ends_a_request_that_waits_or_streams() -> None:
    is_over = threading.Event()
    with talking(until_set(is_over)) as fixture:
        (received,) = fixture.submit("late", deadline_s=0.2)
        last = read(received)[-1]
        is_over.set()
        assert isinstance(last.error, DeadlineExceededError)
        seconds_left = fixture.script.asked[0].samples[0].seconds_left
        assert seconds_left is not None and 0.0 < seconds_left <= 0.2
        (received,) = fixture.submit("too late", deadline_s=-1.0)
        assert isinstance(read(received)[-1].error, DeadlineExceededError)
        assert len(fixture.script.asked) == 1


def test_closing_ends_every_request() -> None:
    is_over = threading.Event()
    with talking(until_set(is_over)) as fixture:
        (received,) = fixture.submit("r")
        until(lambda: bool(fixture.script.asked))
        fixture.engine.close()
        is_over.set()
        assert isinstance(read(received)[-1].error, EngineClosedError)
        assert not fixture.engine.is_alive
        with pytest.raises(EngineClosedError):
            fixture.submit("after")
        fixture.engine.close()


def test_answer_does_not_go_on_with_another_model() -> None:
    with talking(CUT, number=1) as fixture:
        fixture.engines[0].start_again("second", fingerprint=b"g" * 32)
        error = fixture.failure()
    assert isinstance(error, EngineUnavailableError) and "model changed" in str(error)


def test_front_waits_for_an_engine_of_its_model_that_replies_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_client, "_STATE_SECONDS", 20.0)
    with wire_engines([WHOLE], INFO) as (engines, script):
        first, second = sorted(engines, key=lambda one: one.url)
        first.info = replace(INFO, run="other", fingerprint=b"g" * 32, model="bigger")
        first.state = replace(first.state, run="other")
        second.waits_for = first.is_used
        with front([first.url, second.url], 5.0, Patience(3, 20.0)) as engine:
            engine.wait_until_ready()
            assert engine.alive == {first.url: False, second.url: True}
            assert tokens(ClusterFixture(engine, engines, script).ask()) == [3, 4, 5]
        assert script.by == [second.url]


def test_documents_of_lost_and_refused_engines_are_shared_by_the_others() -> None:
    with wire_engines([], INFO, 4) as (engines, _):
        one, two, refused, lost = engines
        refused.info = replace(INFO, run="refused", knowledge_base="another")
        with front([each.url for each in engines], 5.0, Patience(3, 20.0)):
            until(lambda: one.sharing == two.sharing == {one.url, two.url, lost.url})
            lost.close()
            lost.close = lambda: None  # type: ignore[method-assign]
            until(lambda: one.sharing == two.sharing == {one.url, two.url})


@pytest.mark.parametrize(
    ("info", "told"),
    [
        (refusal(401), "STILLROOM_CLUSTER__SECRET"),
        (refusal(404), "HTTP 404"),
        (reply(200, {"wire": 1}), "version 1"),
    ],
)
def test_engines_that_never_fit_are_told_at_the_start(info: bytes, told: str) -> None:
    with wire_engines([], INFO) as (engines, _):
        for one in engines:
            one.info = info
        with front([one.url for one in engines], 5.0, Patience(3, 20.0)) as engine:
            with pytest.raises(EngineRefusedError, match=told):
                engine.wait_until_ready()
            assert engine.problem is not None


def test_start_without_an_engine_says_what_was_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    told = rf"within 0.3 s .*127.0.0.1:{port}: .*cannot be reached"
    with (
        front([f"http://127.0.0.1:{port}"], 5.0, Patience(3, 0.3)) as engine,
        pytest.raises(EngineUnavailableError, match=told),
    ):
        engine.wait_until_ready()
