"""The routes, over a real server and a fake room."""

import base64
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from stillroom.core.ids import parse_chunk_id
from stillroom.errors import (
    DeadlineExceededError,
    EngineClosedError,
    IndexUnavailableError,
    KnowledgeBaseBusyError,
    PromptTooLongError,
    QueueFullError,
    RequestTimeoutError,
)
from stillroom.retrieval.tiered_index import ListFigures
from stillroom.server import run
from tests.server.fakes import NUM_BLOCKS, FakeRoom, as_room, until
from tests.server.harness import running, serving

QUESTION = {"messages": [{"role": "user", "content": "How do I rotate keys?"}]}


@pytest.fixture
def room() -> FakeRoom:
    return FakeRoom()


@pytest.fixture
def client(room: FakeRoom) -> Iterator[httpx.Client]:
    with serving(as_room(room)) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


@contextmanager
def streaming(url: str) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    request = QUESTION | {"stream": True}
    with (
        httpx.Client(timeout=20) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=request) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        yield lines


def refuses(port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) != 0


def test_answer_has_the_usual_fields_and_ours(client: httpx.Client, room: FakeRoom) -> None:
    response = client.post("/v1/chat/completions", json=QUESTION)

    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "fake-model"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "How do I rotate keys?", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 5,
        "total_tokens": 105,
        "prompt_tokens_details": {"cached_tokens": 40},
    }
    ours = body["stillroom"]
    assert body["id"] == f"chatcmpl-{ours['request_id']}"
    assert set(ours) == {"request_id", "sources", "timing", "reuse", "speculation"}
    assert ours["sources"][0]["document"] == "docs/keys.md"
    assert ours["sources"][0]["position"] == 1
    assert ours["timing"]["ttft_seconds"] == 0.02
    assert (ours["reuse"]["num_prompt_tokens"], ours["reuse"]["num_cached_tokens"]) == (100, 40)
    assert room.num_free_blocks == NUM_BLOCKS


def test_options_of_the_request_reach_the_room(client: httpx.Client, room: FakeRoom) -> None:
    client.post(
        "/v1/chat/completions",
        json=QUESTION
        | {
            "model": "fake-model",
            "max_tokens": 9,
            "max_completion_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 7,
            "presence_penalty": 1.0,
            "frequency_penalty": -1.0,
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "priority": -1,
            "deadline_seconds": 2.5,
            "logit_bias": {"5": -100},
            "stop": ["\n", "END"],
            "logprobs": True,
            "top_logprobs": 2,
            "stillroom": {"top_k": 3, "mode": "sparse"},
        },
    )

    [(question, options)] = room.asked
    assert question == "How do I rotate keys?"
    assert (options.max_tokens, options.temperature, options.top_p, options.seed) == (2, 0.5, 0.9, 7)
    assert (options.top_k, options.mode) == (3, "sparse")
    assert (options.presence_penalty, options.frequency_penalty, options.repetition_penalty) == (1.0, -1.0, 1.1)
    assert (options.sample_top_k, options.min_p, options.min_tokens) == (40, 0.05, 2)
    assert (options.priority, options.deadline_seconds) == (-1, 2.5)
    assert (options.logit_bias, options.stop, options.logprobs) == ({5: -100}, ["\n", "END"], 2)


def test_what_the_request_leaves_out_is_left_to_the_configuration(client: httpx.Client, room: FakeRoom) -> None:
    client.post("/v1/chat/completions", json=QUESTION | {"temperature": None})

    [(_, options)] = room.asked
    assert (options.max_tokens, options.temperature, options.top_p, options.seed) == (None,) * 4


def test_question_is_the_last_message_of_the_user(client: httpx.Client, room: FakeRoom) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "second"}, {"type": "text", "text": "part"}]},
        {"role": "assistant", "content": "prefilled"},
    ]

    client.post("/v1/chat/completions", json={"messages": messages})

    assert [question for question, _ in room.asked] == ["second\npart"]


def test_stream_is_openai_chunks_with_sources_first_and_timing_last(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=QUESTION | {"stream": True, "max_tokens": 3})

    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response)
    assert done == "[DONE]"
    first, last = chunks[0], chunks[-1]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert set(first["stillroom"]) == {"request_id", "sources"}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "How do I"
    assert last["choices"][0]["delta"] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
    assert set(last["stillroom"]) == {"request_id", "timing", "reuse", "speculation"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_stream_with_usage_ends_with_a_chunk_without_choices(client: httpx.Client) -> None:
    request = QUESTION | {"stream": True, "stream_options": {"include_usage": True}}

    *_, usage, done = events(client.post("/v1/chat/completions", json=request))

    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 40}


def test_log_probabilities_in_openais_form(client: httpx.Client) -> None:
    request = QUESTION | {"logprobs": True, "top_logprobs": 2, "max_tokens": 2}

    whole = client.post("/v1/chat/completions", json=request).json()
    *chunks, _ = events(client.post("/v1/chat/completions", json=request | {"stream": True}))

    [choice] = whole["choices"]
    assert choice["logprobs"]["content"] == [
        {
            "token": word,
            "logprob": -0.5,
            "bytes": list(word.encode()),
            "top_logprobs": [
                {"token": "\u00e4", "logprob": -0.25, "bytes": [195, 164]},
                {"token": "\ufffd", "logprob": -9999.0, "bytes": [195]},
            ],
        }
        for word in ("How", "do")
    ]
    streamed = [chunk["choices"][0].get("logprobs", {"content": []})["content"] for chunk in chunks]
    assert [len(content) for content in streamed] == [0, 1, 1, 0]
    assert sum(streamed, []) == choice["logprobs"]["content"]


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}, {"type": "integer"}),
        ({"type": "json_schema", "json_schema": {"name": "anything"}}, {}),
    ],
)
def test_response_formats(
    client: httpx.Client, room: FakeRoom, response_format: dict[str, Any], schema: dict[str, Any] | None
) -> None:
    client.post("/v1/chat/completions", json=QUESTION | {"response_format": response_format})

    assert room.asked[0][1].json_schema == schema


def test_alternatives_without_log_probabilities_are_a_contradiction(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=QUESTION | {"top_logprobs": 2})

    assert response.status_code == 400
    assert "top_logprobs needs logprobs" in response.json()["error"]["message"]


def test_several_answers_are_choices_and_the_prompt_is_counted_once(client: httpx.Client) -> None:
    body = client.post("/v1/chat/completions", json=QUESTION | {"n": 3}).json()

    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"How do I rotate keys?"}
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (100, 15)


def test_several_answers_in_one_stream(client: httpx.Client) -> None:
    request = QUESTION | {"n": 2, "stream": True, "max_tokens": 3, "stream_options": {"include_usage": True}}

    *chunks, usage, done = events(client.post("/v1/chat/completions", json=request))

    assert done == "[DONE]" and usage["usage"]["completion_tokens"] == 6
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "How do I"
        assert [choice["finish_reason"] for choice in mine] == [None] * 4 + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_failure_of_one_of_several_answers_ends_the_stream(client: httpx.Client, room: FakeRoom) -> None:
    room.fails_at = "rotate"

    *_, error = events(client.post("/v1/chat/completions", json=QUESTION | {"stream": True, "n": 3}))

    assert error["error"]["message"] == "the fake failed on purpose"
    until(lambda: room.num_free_blocks == NUM_BLOCKS)


def test_failure_in_the_middle_of_a_stream_is_an_error_event(client: httpx.Client, room: FakeRoom) -> None:
    room.fails_at = "rotate"

    *chunks, error = events(client.post("/v1/chat/completions", json=QUESTION | {"stream": True}))

    assert chunks[-1]["choices"][0]["delta"] == {"content": " I"}
    assert error == {
        "error": {
            "message": "the fake failed on purpose",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
    assert room.num_free_blocks == NUM_BLOCKS


def test_client_that_leaves_a_stream_frees_its_blocks(client: httpx.Client, room: FakeRoom) -> None:
    room.gate.clear()
    with streaming(str(client.base_url)):
        assert room.num_free_blocks == NUM_BLOCKS - 1

    until(lambda: room.num_free_blocks == NUM_BLOCKS)


def test_client_that_does_not_wait_for_a_whole_answer_frees_its_blocks(client: httpx.Client, room: FakeRoom) -> None:
    room.gate.clear()

    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=QUESTION, timeout=0.3)

    until(lambda: room.num_free_blocks == NUM_BLOCKS)
    until(lambda: b'status="499"' in room.metrics.render())


def test_stopping_waits_for_a_stream_to_end(room: FakeRoom) -> None:
    room.gate.clear()
    with running(as_room(room)) as server, streaming(server.url) as lines:
        server.stop()
        until(lambda: refuses(server.port))
        room.gate.set()

        assert list(lines)[-2] == "data: [DONE]"


def test_stream_that_outlasts_the_grace_is_cancelled(room: FakeRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE_SECONDS", 0.2)
    room.gate.clear()
    with running(as_room(room)) as server, streaming(server.url) as lines:
        server.stop()
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)

    assert room.num_free_blocks == NUM_BLOCKS


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"n": 0}, "n"),
        ({"stop": ""}, "stop.0"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"word": 1}}, "logit_bias.word.[key]"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stillroom": {"top_k": 0}}, "stillroom.top_k"),
        ({"stillroom": {"mode": "magic"}}, "stillroom.mode"),
        ({"stillroom": {"topk": 3}}, "stillroom.topk"),
    ],
)
def test_impossible_request_is_400_and_names_the_field(
    client: httpx.Client, change: dict[str, Any], param: str
) -> None:
    response = client.post("/v1/chat/completions", json=QUESTION | change)

    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "no question"}],
        [{"role": "user", "content": "  "}],
        [{"role": "user", "content": []}],
    ],
)
def test_messages_without_a_question_are_400(client: httpx.Client, messages: list[dict[str, Any]]) -> None:
    response = client.post("/v1/chat/completions", json={"messages": messages})

    assert response.status_code == 400
    assert "no question" in response.json()["error"]["message"]


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
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)


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


def test_models_are_the_generator_and_the_embedder(client: httpx.Client, room: FakeRoom) -> None:
    names = [model["id"] for model in client.get("/v1/models").json()["data"]]

    assert names == ["fake-model", room.config.embedder.model]
    assert client.get("/v1/models/fake-model").json()["object"] == "model"
    assert client.get("/v1/models/stillroom").json()["id"] == "fake-model"
    assert client.get("/v1/models/org/other").status_code == 404


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/embeddings"])
def test_another_model_is_404_and_names_the_served_one(client: httpx.Client, room: FakeRoom, route: str) -> None:
    response = client.post(route, json=QUESTION | {"input": "x", "model": "gpt-4o"})

    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert room.asked == []


def test_embeddings_as_numbers_and_as_base64_are_the_same(client: httpx.Client, room: FakeRoom) -> None:
    texts = ["one", "two"]

    plain = client.post("/v1/embeddings", json={"input": texts}).json()
    packed = client.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"}).json()

    assert [item["index"] for item in plain["data"]] == [0, 1]
    assert plain["model"] == room.config.embedder.model
    for expected, a, b in zip(room.embed(texts), plain["data"], packed["data"], strict=True):
        assert a["embedding"] == pytest.approx(expected.tolist())
        assert struct.unpack("<4f", base64.b64decode(b["embedding"])) == pytest.approx(expected.tolist())


def test_embedding_of_one_text(client: httpx.Client) -> None:
    body = client.post("/v1/embeddings", json={"input": "one", "dimensions": 4, "model": "stillroom"}).json()

    assert len(body["data"]) == 1


@pytest.mark.parametrize(
    "request_body",
    [{}, {"input": []}, {"input": [""]}, {"input": [[1, 2]]}, {"input": "x", "dimensions": 7}, {"input": ["x"] * 2049}],
)
def test_impossible_embedding_request_is_400(client: httpx.Client, request_body: dict[str, Any]) -> None:
    response = client.post("/v1/embeddings", json=request_body)

    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_search_returns_results_and_timing(client: httpx.Client) -> None:
    body = client.post("/v1/search", json={"query": "keys", "mode": "dense", "top_k": 1}).json()

    assert (body["query"], body["mode"]) == ("keys", "dense")
    [result] = body["results"]
    parse_chunk_id(result.pop("chunk_id"))
    assert result == {
        "document": "docs/keys.md",
        "text": "Rotate keys with care.\nTwice a year.",
        "score": 1.0,
        "scores": {"dense": 0.5, "sparse": 2.0},
        "heading": "Keys > Rotation",
        "start_line": 3,
        "end_line": 4,
        "start_page": 0,
        "end_page": 0,
    }
    assert set(body["timing"]) == {"embed_seconds", "search_seconds", "total_seconds"}


def test_search_without_a_mode_names_the_configured_one(client: httpx.Client) -> None:
    assert client.post("/v1/search", json={"query": "keys"}).json()["mode"] == "hybrid"


@pytest.mark.parametrize("request_body", [{}, {"query": " "}, {"query": "x", "top_k": 0}, {"query": "x", "k": 3}])
def test_impossible_search_is_400(client: httpx.Client, request_body: dict[str, Any]) -> None:
    assert client.post("/v1/search", json=request_body).status_code == 400


def test_health_shows_model_documents_and_blocks(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {
        "status": "ok",
        "model": "fake-model",
        "documents": 1,
        "kv_blocks": {"free": NUM_BLOCKS, "total": NUM_BLOCKS},
    }


def test_health_shows_the_tiers_of_an_index(client: httpx.Client, room: FakeRoom) -> None:
    room.list_figures = ListFigures(10, 3, 100, 30, 0, 0, 0.0, 0)
    assert client.get("/healthz").json()["index_lists"] == {"ram": 3, "total": 10}


def test_metrics_count_routes_by_template(client: httpx.Client) -> None:
    client.get("/v1/models/fake-model")
    client.get("/wp-login.php")

    response = client.get("/metrics")

    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'stillroom_http_requests_total{path="/v1/models/{model:path}",status="200"} 1.0' in response.text
    assert 'stillroom_http_requests_total{path="other",status="404"} 1.0' in response.text
    assert "wp-login" not in response.text
