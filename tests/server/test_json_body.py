"""Invalid and extreme JSON bodies are refused in OpenAI's shape, never with 500."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from stillroom.server.error_replies import Refused
from stillroom.server.routes.json_body import MAX_DEPTH, parse
from stillroom.server.schemas.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DocumentsRequest,
    EmbeddingRequest,
)
from tests.examples import most_examples

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b'{"query": "a"} x', "Extra data"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b'{"query": "\xc3"}', "not UTF-8 at byte 11"),
        (b'{"query": "a", "top_k": NaN}', "NaN is not a number"),
        (b'{"query": "a", "top_k": -Infinity}', "-Infinity is not a number"),
        (b'{"query": "a", "x": 1e999}', "a number is too large"),
        (b'{"query": "a", "x": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
        (b'{"query": "a", "query": "b"}', "'query' occurs twice"),
        (b'{"query": "a", "x": {"y": 1, "y": 1}}', "'y' occurs twice"),
        (b'{"query": "\\ud800"}', "a lone surrogate"),
        (b'{"query": "a", "\\udfff": 1}', "a lone surrogate"),
        (b"[" * 100_000, "deeper than 100"),
        (b'{"query": "a", "x": ' + b"[" * 101 + b"]" * 101 + b"}", "deeper than 100"),
        (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, "deeper than 100"),
        (json.dumps({"query": "a", "x": dict.fromkeys(map(str, range(5_000)), 0)}).encode(), "more than 4096 keys"),
    ],
)
def test_invalid_json_is_400(any_client: httpx.Client, content: bytes, said: str) -> None:
    response = any_client.post("/v1/search", content=content, headers=JSON)

    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_json", None)
    assert said in error["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "json", "application/jsonx", None])
def test_other_content_types_are_415(any_client: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}

    response = any_client.post("/v1/search", content=b'{"query": "a"}', headers=headers)

    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.a+json"])
def test_other_json_content_types_are_accepted(any_client: httpx.Client, kind: str) -> None:
    assert any_client.post("/v1/search", content=b'{"query": "a"}', headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize("content", [b"null", b"[]", b'"text"', b"1"])
def test_json_other_than_an_object_is_400(any_client: httpx.Client, content: bytes) -> None:
    response = any_client.post("/v1/search", content=content, headers=JSON)

    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")
    assert response.json()["error"]["message"].startswith("the body must be a JSON object")


def test_large_bodies_are_parsed_in_a_thread_with_the_same_result(any_client: httpx.Client) -> None:
    query = "word " * 60_000
    assert any_client.post("/v1/search", json={"query": query}).json()["query"] == query
    assert any_client.post("/v1/search", content=b"{" + b" " * 300_000, headers=JSON).status_code == 400


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatCompletionRequest, {"messages": [1] * 10_000}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [1] * 10_000}]}),
        (CompletionRequest, {"prompt": [{}] * 10_000}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 10_000}),
        (EmbeddingRequest, {"input": [{}] * 10_000}),
        (DocumentsRequest, {"documents": [{"titel": ""}] * 10_000}),
    ],
)
def test_number_of_validation_errors_is_bounded(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() < 5


def test_types_are_strict(any_client: httpx.Client) -> None:
    for change in ({"top_k": "3"}, {"top_k": 3.5}, {"top_k": True}, {"query": 1}, {"mode": "HYBRID"}):
        assert any_client.post("/v1/search", json={"query": "a"} | change).status_code == 400


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(values)
def test_valid_json_is_parsed_as_by_python(value: object) -> None:
    assert parse(json.dumps(value).encode()) == value
    assert parse(json.dumps(value, ensure_ascii=False).encode()) == value


@settings(max_examples=most_examples(200))
@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\ud800e19.-NaInfty ', max_size=60).map(str.encode))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    try:
        parse(body)
    except Refused as error:
        assert error.status == 400 and str(error)


def test_deepest_allowed_nesting() -> None:
    assert parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
