"""Several scripted servers behind one engine: where a request goes when a server fails. Time is an argument."""

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

from stillroom.cluster.front_engines import engine_name
from stillroom.config.settings import EngineConfig
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason
from stillroom.engine.events import Route, TokenEvent
from stillroom.engine.openai_engine import OpenAIEngine
from stillroom.engine.openai_protocol import ServerChoice
from stillroom.engine.server_pool import ServerPool
from stillroom.errors import EngineError, EngineRefusedError, EngineUnavailableError, PromptTooLongError
from tests.engine.scripted import DONE, GOOD, STREAM_HEAD, Reply, ScriptedServer, delta, error, event, reply
from tests.engine.test_openai_engine import CHAT, RemoteEngineFixture, read, text
from tests.fakes import ManualClock
from tests.server.fakes import until

BUSY = error(429, "busy", "retry-after: 7\r\n")
LISTED = reply(200, {"data": [{"id": "m"}, {"id": "other"}]})


@dataclass
class Servers:
    """An engine with scripted servers."""

    engine: OpenAIEngine
    scripted: list[ScriptedServer]
    clock: ManualClock
    slept: list[float] = field(default_factory=list)

    def ask(self, first: int, cache_salt: str = "") -> list[TokenEvent]:
        """Ask a question that was meant for the server of this number."""
        fixture = RemoteEngineFixture(self.engine, self.scripted[0])
        choice = ServerChoice(self.scripted[first].url, cache_salt=cache_salt)
        return read(fixture.submit(CHAT, choice=choice))

    @property
    def num_asked(self) -> list[int]:
        return [len(server.asked) for server in self.scripted]

    def answered_by(self, first: int) -> int:
        """Ask, and return the number of the server that answered."""
        *_, last = self.ask(first)
        assert last.finish_reason is FinishReason.STOP
        assert last.route is not None
        return [engine_name(server.url) for server in self.scripted].index(last.route.engine)


@contextmanager
def talking(*replies: Sequence[Reply], model: str = "m", **settings: object) -> Iterator[Servers]:
    with ExitStack() as stack:
        servers = [stack.enter_context(ScriptedServer(one)) for one in replies]
        config = EngineConfig(kind="openai", base_url=",".join(one.url for one in servers), **settings)  # type: ignore[arg-type]
        clock, slept = ManualClock(), list[float]()

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            clock.advance(seconds)

        pool = ServerPool(config, clock, sleep=sleep, uniform=lambda: 0.5)
        yield Servers(stack.enter_context(OpenAIEngine(pool, model, clock)), servers, clock, slept)


@pytest.mark.parametrize("failure", [error(503, "loading"), error(500, "oh"), BUSY, b"", STREAM_HEAD + delta("")])
def test_failed_request_goes_to_another_server_at_once(failure: bytes) -> None:
    with talking([failure], [GOOD]) as servers:
        answer = servers.ask(0)
        assert text(answer) == "Twice a year."
        route = Route(engine_name(servers.scripted[1].url), None, 0, num_migrations=1)
        assert [event.route for event in answer] == [route] * 3
        assert servers.slept == [] and servers.num_asked == [1, 1]
        assert servers.scripted[0].asked[0].body == servers.scripted[1].asked[0].body


BROKEN_REPLIES = [
    STREAM_HEAD + event({"error": {"message": "out of memory", "code": 500}}),
    STREAM_HEAD + delta("", "abort"),
    STREAM_HEAD + b"data: {half\n\n",
    STREAM_HEAD + b"data: " + b"[" * 100_000 + b"\n\n",
    STREAM_HEAD,
    STREAM_HEAD + DONE,
    reply(200, {"hello": 1}),
]


@pytest.mark.parametrize("broken", BROKEN_REPLIES)
def test_reply_that_is_no_answer_is_a_failure_of_the_server(broken: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with talking([broken], [GOOD, GOOD]) as servers:
        assert [servers.answered_by(0) for _ in range(2)] == [1, 1]
        assert servers.num_asked == [1, 2], "it is avoided"
        failed, _ = servers.engine.servers.states()
        assert (failed.num_refused, failed.num_broken, failed.is_available) == (1, 0, False)
        assert servers.slept == [] and f"{failed.url} " in caplog.text


def test_request_waits_for_a_server_that_is_avoided_if_the_other_sends_no_answers() -> None:
    with talking([error(503, "loading"), GOOD], [BROKEN_REPLIES[2]] * 2) as servers:
        assert servers.answered_by(0) == 0
        assert servers.num_asked[0] == 2 and servers.slept == [0.5]


@pytest.mark.parametrize("rest", [event({"error": "oh"}), b"data: {half\n\n", delta("", "error")])
def test_server_that_breaks_within_an_answer_is_avoided(rest: bytes) -> None:
    with talking([STREAM_HEAD + delta("Twice ") + rest], [GOOD]) as servers:
        error = servers.ask(0)[-1].error
        assert isinstance(error, EngineError) and str(error).startswith(servers.scripted[0].url)
        assert servers.answered_by(0) == 1
        assert [one.num_broken for one in servers.engine.servers.states()] == [1, 0]


def test_error_of_the_request_within_a_reply_is_not_a_failure_of_the_server() -> None:
    bad = {"message": "bad top_p", "type": "invalid_request_error", "code": None}
    long = {"message": "the request exceeds the available context size", "code": 400}
    with talking([STREAM_HEAD + event({"error": one}) for one in (bad, long)], []) as servers:
        assert isinstance(servers.ask(0)[-1].error, EngineRefusedError)
        assert isinstance(servers.ask(0)[-1].error, PromptTooLongError)
        assert servers.num_asked == [2, 0] and servers.engine.servers.states()[0].num_refused == 0


def test_prompts_that_every_server_answers_with_nothing_do_not_lengthen_the_wait() -> None:
    with talking([STREAM_HEAD] * 3, [STREAM_HEAD] * 3) as servers:
        for _ in range(3):
            assert "too long, lower search.top_k" in str(servers.ask(0)[-1].error)
            servers.clock.advance(0.5)
            assert [one.is_available for one in servers.engine.servers.states()] == [True, True]
        assert servers.slept == []


def test_busy_server_is_avoided_until_it_wants_requests_again() -> None:
    with talking([BUSY, GOOD], [GOOD, GOOD]) as servers:
        assert servers.answered_by(0) == 1
        servers.clock.advance(6.9)
        assert servers.answered_by(0) == 1
        servers.clock.advance(0.1)
        assert servers.answered_by(0) == 0
        first, second = servers.engine.servers.states()
    assert (first.num_sent, first.num_refused, first.is_available) == (2, 1, True)
    assert (second.num_sent, second.num_refused, second.num_outstanding) == (2, 0, 0)


def test_without_an_available_server_a_request_waits_for_the_first() -> None:
    with talking([BUSY], [error(429, "busy", "retry-after: 3\r\n"), GOOD]) as servers:
        assert servers.answered_by(0) == 1
        assert servers.slept == [3.0] and servers.num_asked == [1, 2]


def test_attempts_on_all_servers_count(caplog: pytest.LogCaptureFixture) -> None:
    with talking([error(502, "bad")] * 2, [error(502, "bad")] * 2, max_retries=2) as servers:
        *_, last = servers.ask(0)
        assert isinstance(last.error, EngineUnavailableError) and "HTTP 502" in str(last.error)
        assert sum(servers.num_asked) == 3 and servers.slept == [0.5]
    assert "trying another server" in caplog.text and "trying again in 0.5 s" in caplog.text


def test_failure_after_the_first_token_is_an_error_and_the_server_is_avoided() -> None:
    with talking([STREAM_HEAD + delta("Twice ")], [GOOD]) as servers:
        *_, last = servers.ask(0)
        assert isinstance(last.error, EngineUnavailableError) and "broke off after 6 characters" in str(last.error)
        assert servers.num_asked == [1, 0]
        assert servers.answered_by(0) == 1
        assert [one.num_broken for one in servers.engine.servers.states()] == [1, 0]


def test_killed_server_is_left_and_used_again_when_it_is_back() -> None:
    with talking([GOOD], [GOOD, GOOD]) as servers:
        assert servers.answered_by(0) == 0
        servers.scripted[0].stop()
        assert servers.answered_by(0) == 1
        servers.clock.advance(0.5)
        assert servers.answered_by(0) == 1, "it was tried again: 1 s more"
        port = int(servers.scripted[0].url.split(":")[2].removesuffix("/v1"))
        with socket.create_server(("127.0.0.1", port)) as back:
            answering = threading.Thread(target=answer_once, args=(back,))
            answering.start()
            servers.clock.advance(1.0)
            assert servers.answered_by(0) == 0
            answering.join(20)
        assert [one.num_refused for one in servers.engine.servers.states()] == [2, 0]


def test_servers_that_failed_are_probed_until_they_answer() -> None:
    clock = ManualClock()

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)
        await asyncio.sleep(0)

    failing = error(503, "loading")
    with ScriptedServer([failing, failing, LISTED]) as server:
        config = EngineConfig(kind="openai", base_url=server.url, max_retries=0)
        with OpenAIEngine(ServerPool(config, clock, sleep=sleep), "m", clock) as engine:
            assert read(RemoteEngineFixture(engine, server).submit(CHAT))[-1].error is not None
            clock.advance(10.0)
            assert engine.problem == "the server takes no requests now"
            engine.watch()
            until(lambda: engine.problem is None)
    assert [asked.path for asked in server.asked] == ["/v1/chat/completions", "/v1/models", "/v1/models"]


def test_server_that_comes_up_with_another_model_is_not_alive() -> None:
    another = reply(200, {"data": [{"id": "n"}]})
    with talking([error(503, "loading"), another, LISTED], [LISTED], model="") as servers:
        servers.engine.find_model()
        for seconds, is_alive in ((0.5, False), (1.0, True)):
            servers.clock.advance(seconds)
            servers.engine._thread.start(servers.engine.servers.probe).result(20)
            assert [one.is_alive for one in servers.engine.servers.states()] == [is_alive, True]


def answer_once(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(GOOD)


def test_silent_server_is_avoided() -> None:
    def silent(connection: socket.socket) -> None:
        connection.recv(1)  # until the client closes

    with talking([silent], [GOOD], read_timeout_s=0.05) as servers:
        assert "silent for 0.05 s" in str(servers.ask(0)[-1].error)
        assert servers.answered_by(0) == 1


def test_refusal_is_an_error_without_another_attempt() -> None:
    with talking([error(400, "bad top_p")], [GOOD]) as servers:
        assert isinstance(servers.ask(0)[-1].error, EngineRefusedError)
        assert servers.num_asked == [1, 0]


def test_cancelled_request_is_not_counted_as_outstanding() -> None:
    def endless(connection: socket.socket) -> None:
        connection.sendall(STREAM_HEAD + delta("and on"))
        connection.recv(1)

    with talking([endless], []) as servers:
        fixture = RemoteEngineFixture(servers.engine, servers.scripted[0])
        events = fixture.submit(CHAT, choice=ServerChoice(servers.scripted[0].url))
        assert events.get(timeout=20).text == "and on"
        assert [one.num_outstanding for one in servers.engine.servers.states()] == [1, 0]
        servers.engine.cancel(RequestId("r"))
        assert events.get(timeout=20).finish_reason is FinishReason.ABORTED
        assert [one.num_outstanding for one in servers.engine.servers.states()] == [0, 0]


def test_salt_is_sent() -> None:
    with talking([GOOD], [GOOD]) as servers:
        servers.ask(0, cache_salt="s3cret")
        servers.ask(1)
        salted, plain = (server.asked[0].body for server in servers.scripted)
    assert salted == plain | {"cache_salt": "s3cret"}


def test_all_servers_must_serve_the_model_of_the_first() -> None:
    with talking([LISTED], [LISTED], model="") as servers:
        assert servers.engine.find_model() == "m"
    with talking([LISTED], [reply(200, {"data": [{"id": "n"}]})], model="") as servers:
        message = f"{servers.scripted[1].url} does not serve the model 'm', only n; .*--engine-model"
        with pytest.raises(EngineRefusedError, match=message):
            servers.engine.find_model()


def test_named_model_is_checked_on_all_servers() -> None:
    with talking([LISTED], [LISTED], model="other") as servers:
        assert servers.engine.find_model() == "other"
    with (
        talking([LISTED], [LISTED], model="absent") as servers,
        pytest.raises(EngineRefusedError, match="does not serve the model 'absent', only m, other"),
    ):
        servers.engine.find_model()


def test_server_that_is_down_at_the_start_is_checked_before_its_first_request(caplog: pytest.LogCaptureFixture) -> None:
    with talking([error(503, "loading"), LISTED, GOOD], [LISTED, GOOD], model="") as servers:
        assert servers.engine.find_model() == "m"
        assert servers.slept == [] and "it gets requests when it answers" in caplog.text
        assert [one.is_alive for one in servers.engine.servers.states()] == [False, True]
        servers.clock.advance(0.5)
        assert servers.answered_by(0) == 0
        assert [asked.path for asked in servers.scripted[0].asked][1:] == ["/v1/models", "/v1/chat/completions"]


def test_server_that_comes_up_with_another_model_gets_no_request(caplog: pytest.LogCaptureFixture) -> None:
    another = reply(200, {"data": [{"id": "n"}]})
    with talking([error(503, "loading"), another], [LISTED, GOOD], model="") as servers:
        assert servers.engine.find_model() == "m"
        servers.clock.advance(0.5)
        with caplog.at_level(logging.INFO):
            assert servers.answered_by(0) == 1
    assert "does not serve the model 'm', only n" in caplog.text


def test_server_that_stays_down_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with talking([error(503, "loading")] * 2, [LISTED, GOOD], model="") as servers:
        servers.engine.find_model()
        servers.clock.advance(0.5)
        assert servers.answered_by(0) == 1 and servers.num_asked == [2, 2]
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1


def test_without_any_server_every_address_is_named() -> None:
    loading = [error(503, "loading")]
    with talking(loading, loading, model="", max_retries=0) as servers:
        first, second = (one.url for one in servers.scripted)
        with pytest.raises(EngineUnavailableError, match=f"none of the 2 servers answers: {first} .*; {second} "):
            servers.engine.find_model()


def test_servers_are_not_asked_before_they_want_requests_again() -> None:
    busy = error(429, "busy", "retry-after: 300\r\n")
    with talking([busy, GOOD], [busy, GOOD]) as servers:
        for passed, left in ((0.0, 300.0), (100.0, 200.0)):
            servers.clock.advance(passed)
            failure = servers.ask(0)[-1].error
            assert isinstance(failure, EngineUnavailableError) and failure.retry_after_seconds == left
        assert servers.num_asked == [1, 1] and servers.slept == []
        servers.clock.advance(180.0)
        assert text(servers.ask(0)) == "Twice a year."
        assert servers.slept == [20.0]


def test_without_any_server_the_start_is_retried() -> None:
    loading = error(503, "loading", "retry-after: 2\r\n")
    with talking([loading, LISTED], [loading, loading], model="") as servers:
        assert servers.engine.find_model() == "m"
        assert servers.slept == [2.0]


def test_log_shows_no_key(caplog: pytest.LogCaptureFixture) -> None:
    key = "sk-do-not-show"
    with caplog.at_level(logging.DEBUG), talking([error(503, key)], [GOOD], api_key=key) as servers:
        servers.ask(0)
    assert "***" in caplog.text and key not in caplog.text
