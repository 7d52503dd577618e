"""The remote engine with a scripted server: retries, errors, cancellation. Sleeping is an argument."""

import logging
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from stillroom.config.settings import EngineConfig
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, SampleRequest, SamplingParams
from stillroom.engine.events import RemoteUsage, TokenEvent
from stillroom.engine.openai_engine import OpenAIEngine
from stillroom.engine.openai_protocol import ChatPrompt, RemotePrompt, ServerChoice
from stillroom.engine.server_pool import ServerPool
from stillroom.errors import (
    DeadlineExceededError,
    EngineClosedError,
    EngineError,
    EngineRefusedError,
    EngineUnavailableError,
    PromptTooLongError,
)
from tests.engine.scripted import (
    DONE,
    GOOD,
    STREAM_HEAD,
    USAGE,
    Reply,
    ScriptedServer,
    delta,
    error,
    event,
    read_request,
    reply,
)
from tests.fakes import ManualClock

KEY = "sk-do-not-show"
CHAT = ChatPrompt("Be brief.", "How often?")


@dataclass
class RemoteEngineFixture:
    """An engine, its scripted server, and the recorded events and sleeps."""

    engine: OpenAIEngine
    server: ScriptedServer
    slept: list[float] = field(default_factory=list)

    def submit(
        self,
        prompt: RemotePrompt = CHAT,
        name: str = "r",
        deadline: float | None = None,
        choice: ServerChoice | None = None,
    ) -> "queue.SimpleQueue[TokenEvent]":
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        sampling = SamplingParams(max_tokens=7)
        request = SampleRequest(request_id=RequestId(name), sampling=sampling, deadline=deadline)
        self.engine.submit(prompt, request, events.put, choice)
        return events

    def ask(self, prompt: RemotePrompt = CHAT) -> list[TokenEvent]:
        return read(self.submit(prompt))

    def failure(self) -> str:
        *_, last = self.ask()
        assert last.finish_reason is FinishReason.ABORTED and last.error is not None
        assert KEY not in str(last.error)
        raise last.error


def read(events: "queue.SimpleQueue[TokenEvent]") -> list[TokenEvent]:
    """Return all events up to the last."""
    found = [events.get(timeout=20)]
    while found[-1].finish_reason is None:
        found.append(events.get(timeout=20))
    return found


def text(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events)


@contextmanager
def talking(*replies: Reply, model: str = "m", **settings: object) -> Iterator[RemoteEngineFixture]:
    with ScriptedServer(replies) as server:
        config = EngineConfig(kind="openai", base_url=server.url, api_key=KEY, **settings)  # type: ignore[arg-type]
        clock, slept = ManualClock(), list[float]()

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            clock.advance(seconds)

        with OpenAIEngine(ServerPool(config, clock, sleep=sleep, uniform=lambda: 0.5), model, clock) as engine:
            yield RemoteEngineFixture(engine, server, slept)


def test_pieces_arrive_and_the_last_event_has_reason_and_usage() -> None:
    with talking(GOOD) as fixture:
        *pieces, last = fixture.ask()

    assert [piece.text for piece in pieces] == ["Twice ", "a year."]
    assert (last.finish_reason, last.usage) == (FinishReason.STOP, RemoteUsage(9, 4, 2))


def test_body_of_a_request() -> None:
    with talking(GOOD, GOOD, GOOD) as fixture:
        fixture.ask()
        fixture.ask("Once upon")
        fixture.ask((1, 5, 7))
        chat, written, tokens = fixture.server.asked

    common = {"model": "m", "max_tokens": 7, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    common |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    common |= {"top_k": 2**20, "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0}
    common |= {"stream": True, "stream_options": {"include_usage": True}}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How often?"}]
    assert (chat.path, chat.body) == ("/v1/chat/completions", common | {"messages": messages})
    assert (written.path, written.body) == ("/v1/completions", common | {"prompt": "Once upon"})
    assert tokens.body == common | {"prompt": [1, 5, 7]}
    assert chat.headers["authorization"] == f"Bearer {KEY}"


def test_failures_before_the_first_token_are_retried_with_growing_pauses() -> None:
    cut_before_text = STREAM_HEAD + delta("")
    with talking(b"", error(503, "loading"), error(500, "oh"), cut_before_text, GOOD) as fixture:
        answer = fixture.ask()

    assert text(answer) == "Twice a year."
    assert fixture.slept == [0.5, 1.0, 2.0, 4.0]
    assert len({str(asked.body) for asked in fixture.server.asked}) == 1


def test_retry_after_is_respected() -> None:
    in_ten_seconds = "retry-after: Thu, 01 Jan 1970 00:00:10 GMT\r\n"
    replies = error(429, "busy", "retry-after: 7\r\n"), error(429, "busy", in_ten_seconds), error(429, "busy"), GOOD
    with talking(*replies) as fixture:
        fixture.ask()

    assert fixture.slept == [7.0, 3.0, 2.0]


def test_too_long_retry_after_ends_the_request() -> None:
    with (
        talking(error(429, "come back tomorrow", "retry-after: 86400\r\n"), GOOD) as fixture,
        pytest.raises(EngineUnavailableError, match="too many requests.*come back tomorrow"),
    ):
        fixture.failure()

    assert fixture.slept == []


def test_number_of_retries_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG),
        talking(*[error(502, f"bad {KEY}")] * 3, GOOD, max_retries=2) as fixture,
        pytest.raises(EngineUnavailableError, match=r"failed \(HTTP 502\): bad \*\*\*"),
    ):
        fixture.failure()

    assert len(fixture.server.asked) == 3
    assert "trying again in 0.5 s" in caplog.text
    assert KEY not in caplog.text


def test_x_should_retry_false_is_respected() -> None:
    with (
        talking(error(500, "broken", "x-should-retry: false\r\n"), GOOD) as fixture,
        pytest.raises(EngineUnavailableError, match="broken"),
    ):
        fixture.failure()


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (error(401, f"Incorrect API key: {KEY}"), EngineRefusedError, r"refuses the API key.*\*\*\*.*ENGINE__API_KEY"),
        (error(404, "no model m"), EngineRefusedError, "does not serve the model 'm': no model m.*--engine-model"),
        (reply(404, {"detail": "Not Found"}), EngineRefusedError, "is engine.base_url right"),
        (reply(307, {}, "location: /elsewhere\r\n"), EngineRefusedError, "is engine.base_url right"),
        (reply(200, {"hello": 1}), EngineRefusedError, "instead of a stream of events"),
        (error(400, "bad top_p"), EngineRefusedError, r"refuses the request \(HTTP 400\): bad top_p"),
        (
            reply(409, {"error": {"message": "no documents", "code": "knowledge_base_empty"}}),
            EngineRefusedError,
            r"\(HTTP 409\): no documents; it is a Stillroom .* engine.prompt = 'tokens' and --model",
        ),
        (
            reply(400, {"object": "error", "message": "This model's maximum context length is 512 tokens. You asked"}),
            PromptTooLongError,
            "maximum context length is 512 tokens.*search.top_k",
        ),
        (error(500, "Requested tokens exceed context window of 512"), PromptTooLongError, "window of 512"),
    ],
)
def test_refusals_say_what_to_do_and_are_not_retried(answer: bytes, kind: type[Exception], message: str) -> None:
    with talking(answer, GOOD) as fixture, pytest.raises(kind, match=message):
        fixture.failure()

    assert len(fixture.server.asked) == 1


@pytest.mark.parametrize(
    ("rest", "kind", "message"),
    [
        (b"", EngineUnavailableError, "broke off after 6 characters of the answer"),
        (b"data: {half\n\n", EngineError, "not in OpenAI's format: {half"),
        (b"data: [1]\n\n", EngineError, "not in OpenAI's format"),
        (event({"choices": [{"delta": {"content": 5}}]}), EngineError, "not in OpenAI's format"),
        (
            event({"error": {"message": "out of memory"}}),
            EngineUnavailableError,
            "ended the answer with an error: out of memory",
        ),
        (delta("", "abort"), EngineUnavailableError, "ended the answer with an error"),
    ],
)
def test_failure_within_an_answer_is_an_error_without_retry(rest: bytes, kind: type[Exception], message: str) -> None:
    with talking(STREAM_HEAD + delta("Twice ") + rest, GOOD) as fixture:
        first, last = fixture.ask()

    assert first.text == "Twice "
    assert isinstance(last.error, kind)
    assert len(fixture.server.asked) == 1 and fixture.slept == []
    with pytest.raises(kind, match=message):
        raise last.error


def test_stream_without_events_is_an_error() -> None:
    with (
        talking(STREAM_HEAD, GOOD) as fixture,
        pytest.raises(EngineUnavailableError, match="without an answer.*too long, lower search.top_k"),
    ):
        fixture.failure()


def test_stream_that_ends_after_its_reason_is_complete() -> None:
    with talking(STREAM_HEAD + delta("Yes", "length")) as fixture:
        *_, last = fixture.ask()

    assert (last.finish_reason, last.usage, last.error) == (FinishReason.LENGTH, None, None)


def test_unreachable_server_is_an_error_with_its_address() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # the port is taken, and no process listens on it
        port = bound.getsockname()[1]
        config = EngineConfig(kind="openai", base_url=f"http://127.0.0.1:{port}", max_retries=0)
        told = f"http://127.0.0.1:{port}/v1 cannot be reached.*is the server run"
        with (
            OpenAIEngine(ServerPool(config, ManualClock()), "", ManualClock()) as engine,
            pytest.raises(EngineUnavailableError, match=told),
        ):
            engine.find_model()


def test_silent_server_is_an_error() -> None:
    def silent(connection: socket.socket) -> None:
        connection.recv(1)  # until the client closes

    with (
        talking(silent, read_timeout_s=0.05) as fixture,
        pytest.raises(EngineUnavailableError, match="silent for 0.05 s.*read_timeout_s"),
    ):
        fixture.failure()


def test_deadline_closes_the_connection() -> None:
    has_left = threading.Event()

    def silent(connection: socket.socket) -> None:
        if connection.recv(1) == b"":
            has_left.set()

    with talking(silent, GOOD) as fixture:
        last = read(fixture.submit(deadline=0.5))[-1]
        assert last.finish_reason is FinishReason.ABORTED and isinstance(last.error, DeadlineExceededError)
        assert has_left.wait(20)
        assert text(read(fixture.submit(deadline=1000.0))) == "Twice a year."


def test_cancelling_closes_the_connection() -> None:
    has_left = threading.Event()

    def endless(connection: socket.socket) -> None:
        connection.sendall(STREAM_HEAD + delta("and on"))
        if connection.recv(1) == b"":
            has_left.set()

    with talking(endless, GOOD) as fixture:
        events = fixture.submit()
        assert events.get(timeout=20).text == "and on"
        assert (fixture.engine.num_running, fixture.engine.num_waiting) == (1, 0)
        fixture.engine.cancel(RequestId("r"))

        last = events.get(timeout=20)
        assert (last.finish_reason, last.error) == (FinishReason.ABORTED, None)
        assert has_left.wait(20)
        assert text(fixture.ask()) == "Twice a year."
        fixture.engine.cancel(RequestId("r"))  # it has ended


def test_close_ends_waiting_requests_and_refuses_new_ones() -> None:
    def silent(connection: socket.socket) -> None:
        connection.recv(1)

    with talking(silent) as fixture:
        events = fixture.submit()
        fixture.engine.close()

        assert isinstance(events.get(timeout=20).error, EngineClosedError)
        with pytest.raises(EngineClosedError):
            fixture.submit()


def test_model_is_the_first_that_is_listed() -> None:
    listed = reply(200, {"object": "list", "data": [{"id": "first"}, {"id": "second"}]})
    with talking(error(503, "loading"), listed, model="") as fixture:
        assert fixture.engine.find_model() == "first"
        assert fixture.engine.find_model() == "first"

    assert [asked.path for asked in fixture.server.asked] == ["/v1/models", "/v1/models"]
    assert fixture.slept == [0.5]


@pytest.mark.parametrize("listed", [{"data": []}, {"data": [{}]}, ["x"]])
def test_server_without_models_is_an_error(listed: object) -> None:
    with (
        talking(reply(200, listed), model="") as fixture,
        pytest.raises(EngineRefusedError, match="name one with --engine-model"),
    ):
        fixture.engine.find_model()


def test_requests_run_concurrently() -> None:
    both = threading.Barrier(2)

    def wait_for_the_other(connection: socket.socket) -> None:
        def answer(to: socket.socket) -> None:
            both.wait(20)
            to.sendall(GOOD)

        other = threading.Thread(target=answer, args=(connection,))
        other.start()
        second, _ = fixture.server._socket.accept()
        with second:
            assert read_request(second) is not None
            answer(second)
        other.join(20)

    with talking(wait_for_the_other) as fixture:
        queues = [fixture.submit(name="a"), fixture.submit(name="b")]
        assert [text(read(events)) for events in queues] == ["Twice a year."] * 2


def test_text_does_not_depend_on_how_bytes_arrive() -> None:
    whole = STREAM_HEAD + delta("z\u00e4hlt \u2028 \u0085 auch") + delta(None, "stop") + USAGE + DONE

    def byte_by_byte(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(whole)):
            connection.sendall(whole[at : at + 1])

    with talking(byte_by_byte) as fixture:
        assert text(fixture.ask()) == "z\u00e4hlt \u2028 \u0085 auch"
