"""Every error has a status, a code and OpenAI's shape."""

import logging
from collections.abc import AsyncIterator, Callable
from functools import partial

import httpx
import pytest
from starlette.responses import StreamingResponse
from starlette.testclient import TestClient

from stillroom.errors import (
    ConfigError,
    CorruptKnowledgeBaseError,
    DatabaseUnavailableError,
    DeadlineExceededError,
    EngineClosedError,
    EngineError,
    IndexUnavailableError,
    KnowledgeBaseBusyError,
    NonFiniteError,
    PromptTooLongError,
    QueueFullError,
    RequestTimeoutError,
    StorageError,
)
from stillroom.server.app import create_app
from tests.server.fakes import FakeStillroom, as_stillroom, until
from tests.server.harness import QUESTION, events, serving


class Panic(BaseException):
    """A Rust panic as pyo3 raises it; `except Exception` does not catch it."""


def statuses_in(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return the statuses in the access log."""
    return [
        record.fields["status"]  # type: ignore[attr-defined]
        for record in caplog.records
        if record.name == "stillroom.server.access"
    ]


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b"\xff"])
def test_body_that_is_not_an_object_is_400(client: httpx.Client, content: bytes) -> None:
    headers = {"content-type": "application/json"}

    response = client.post("/v1/chat/completions", content=content, headers=headers)

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("failure", "status", "code", "should_retry"),
    [
        (PromptTooLongError("too long"), 400, "context_length_exceeded", "false"),
        (EngineClosedError("closing"), 503, "shutting_down", None),
        (QueueFullError("full", 2.2), 429, "queue_full", None),
        (NonFiniteError(), 500, "non_finite", "false"),
        (RequestTimeoutError("slow"), 504, "request_timeout", "false"),
        (DeadlineExceededError("late"), 504, "deadline_exceeded", "false"),
    ],
)
def test_each_error_class_has_a_status_and_a_code(
    client: httpx.Client, stillroom: FakeStillroom, failure: Exception, status: int, code: str, should_retry: str | None
) -> None:
    stillroom.fails_at, stillroom.failure = "How", failure

    response = client.post("/v1/chat/completions", json=QUESTION)

    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.json()["error"]["message"] == str(failure)
    assert response.headers.get("x-should-retry") == should_retry
    assert response.headers.get("retry-after") == {429: "3", 503: "5"}.get(status)


@pytest.mark.parametrize(
    ("error", "answer", "said"),
    [
        (KnowledgeBaseBusyError, (503, "knowledge_base_busy"), "try again"),
        (IndexUnavailableError, (503, "index_unavailable"), "mode sparse"),
        (DatabaseUnavailableError, (503, "database_unavailable"), "searches go on"),
        (StorageError, (507, "storage_failed"), "full or failing"),
        (partial(CorruptKnowledgeBaseError, part="corpus.sqlite3"), (500, "knowledge_base_damaged"), "corpus.sqlite3"),
        (CorruptKnowledgeBaseError, (500, "knowledge_base_damaged"), "stillroom verify"),
        (EngineError, (500, "internal_error"), "the server's log"),
        (ConfigError, (500, "internal_error"), "the server's log"),
    ],
)
def test_server_error_names_part_and_remedy_and_logs_its_own_text(
    client: httpx.Client,
    stillroom: FakeStillroom,
    caplog: pytest.LogCaptureFixture,
    error: Callable[[str], Exception],
    answer: tuple[int, str],
    said: str,
) -> None:
    stillroom.fails_at, stillroom.failure = "How", error("/srv/kb/anna: process 4711 on alba")

    response = client.post("/v1/chat/completions", json=QUESTION)

    assert (response.status_code, response.json()["error"]["code"]) == answer
    assert said in response.json()["error"]["message"]
    assert "/srv" not in response.text and "alba" not in response.text
    assert any("/srv/kb/anna" in record.getMessage() for record in caplog.records)


def test_empty_knowledge_base_is_409_and_says_what_to_do() -> None:
    with serving(as_stillroom(FakeStillroom(texts={}))) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json=QUESTION)

    assert response.status_code == 409
    assert "stillroom add" in response.json()["error"]["message"]


def test_unexpected_exception_is_500_without_a_stack_trace(
    client: httpx.Client, stillroom: FakeStillroom, caplog: pytest.LogCaptureFixture
) -> None:
    stillroom.fails_at, stillroom.failure = "How", ZeroDivisionError("secret detail")

    response = client.post("/v1/chat/completions", json=QUESTION)

    assert response.status_code == 500
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert response.json()["error"]["type"] == "server_error"
    [record] = [record for record in caplog.records if record.exc_info]
    assert response.headers["x-request-id"] in record.getMessage()


def test_unknown_route_and_method_have_openai_shape(client: httpx.Client) -> None:
    missing = client.get("/v1/nothing")
    wrong = client.get("/v1/search")

    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "not_found"
    assert wrong.status_code == 405
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"
    assert client.put("/v1/documents").headers["allow"] == "GET, POST"
    assert client.put("/v1/documents/a").headers["allow"] == "DELETE, GET"


def test_native_panic_is_a_logged_500(
    client: httpx.Client, stillroom: FakeStillroom, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stillroom.server.access")
    stillroom.fails_at, stillroom.failure = "How", Panic("byte index 3 of `secret text`")

    response = client.post("/v1/chat/completions", json=QUESTION)

    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error" and "secret" not in response.text
    request_id = response.headers["x-request-id"]
    assert any(record.exc_info and request_id in record.getMessage() for record in caplog.records)
    until(lambda: statuses_in(caplog) == [500])


def test_native_panic_in_a_search_is_500(
    client: httpx.Client, stillroom: FakeStillroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Panic

    monkeypatch.setattr(stillroom, "search", fail)
    response = client.post("/v1/search", json={"query": "keys"})

    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert response.headers["x-request-id"]


def test_native_panic_in_a_stream_is_its_last_event(client: httpx.Client, stillroom: FakeStillroom) -> None:
    stillroom.fails_at, stillroom.failure = "rotate", Panic()

    received = events(client.post("/v1/chat/completions", json=QUESTION | {"stream": True}))

    assert received[-1]["error"]["code"] == "internal_error"


def test_failure_in_a_partial_response_closes_the_connection_and_is_logged(
    stillroom: FakeStillroom, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stillroom.server.access")
    app = create_app(as_stillroom(stillroom))

    async def half() -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            yield "half"
            raise ZeroDivisionError

        return StreamingResponse(pieces())

    app.add_api_route("/half", half)
    with TestClient(app, base_url="http://127.0.0.1") as client, pytest.raises(ZeroDivisionError):
        client.get("/half")

    assert statuses_in(caplog) == [500]
