"""Every error has a status, a code and OpenAI's shape."""

import httpx
import pytest

from stillroom.errors import (
    DeadlineExceededError,
    EngineClosedError,
    IndexUnavailableError,
    KnowledgeBaseBusyError,
    PromptTooLongError,
    QueueFullError,
    RequestTimeoutError,
)
from tests.server.fakes import FakeRoom, as_room
from tests.server.harness import QUESTION, serving


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
        (KnowledgeBaseBusyError("busy"), 503, "knowledge_base_busy", None),
        (IndexUnavailableError("away"), 503, "index_unavailable", None),
        (EngineClosedError("closing"), 503, "shutting_down", None),
        (QueueFullError("full", 2.2), 429, "queue_full", None),
        (RequestTimeoutError("slow"), 504, "request_timeout", "false"),
        (DeadlineExceededError("late"), 504, "deadline_exceeded", "false"),
    ],
)
def test_errors_of_the_room_have_a_status_and_a_code(
    client: httpx.Client, room: FakeRoom, failure: Exception, status: int, code: str, should_retry: str | None
) -> None:
    room.fails_at, room.failure = "How", failure

    response = client.post("/v1/chat/completions", json=QUESTION)

    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.json()["error"]["message"] == str(failure)
    assert response.headers.get("x-should-retry") == should_retry
    assert response.headers.get("retry-after") == {429: "3", 503: "5"}.get(status)


def test_empty_knowledge_base_is_409_and_says_what_to_do() -> None:
    with serving(as_room(FakeRoom(texts={}))) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json=QUESTION)

    assert response.status_code == 409
    assert "stillroom add" in response.json()["error"]["message"]


def test_bug_is_500_without_a_stack_trace(
    client: httpx.Client, room: FakeRoom, caplog: pytest.LogCaptureFixture
) -> None:
    room.fails_at, room.failure = "How", ZeroDivisionError("secret detail")

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
