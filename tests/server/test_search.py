"""`/v1/search` of a real server with a fake Stillroom."""

from typing import Any

import httpx
import pytest

from stillroom.core.ids import parse_chunk_id
from tests.server.fakes import FakeStillroom


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
        "also_in": [],
    }
    assert set(body["timing"]) == {"embed_seconds", "search_seconds", "rerank_seconds", "total_seconds"}
    assert body["num_reranked"] == 0


def test_search_without_a_mode_names_the_configured_one(client: httpx.Client) -> None:
    assert client.post("/v1/search", json={"query": "keys"}).json()["mode"] == "hybrid"


@pytest.mark.parametrize(
    "request_body",
    [{}, {"query": " "}, {"query": "x", "top_k": 0}, {"query": "x", "top_k": 1001}, {"query": "x", "k": 3}],
)
def test_invalid_search_is_400(client: httpx.Client, request_body: dict[str, Any]) -> None:
    assert client.post("/v1/search", json=request_body).status_code == 400


def test_search_returns_at_most_a_thousand_chunks(client: httpx.Client) -> None:
    assert client.post("/v1/search", json={"query": "x", "top_k": 1000}).status_code == 200
    chat = {"messages": [{"role": "user", "content": "x"}], "stillroom": {"top_k": 1001}}
    response = client.post("/v1/chat/completions", json=chat)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stillroom.top_k")


def test_a_search_takes_a_filter(client: httpx.Client, stillroom: FakeStillroom) -> None:
    assert client.post("/v1/search", json={"query": "keys", "where": "year >= 2020"}).status_code == 200
    assert stillroom.filters == ["year >= 2020"]


def test_a_chat_takes_a_filter(client: httpx.Client, stillroom: FakeStillroom) -> None:
    messages = [{"role": "user", "content": "Keys?"}]
    assert client.post("/v1/chat/completions", json={"messages": messages, "stillroom": {"where": "a=1"}}).is_success
    assert stillroom.asked[-1][1].where == "a=1"


def test_invalid_filter_is_400_with_its_position(client: httpx.Client) -> None:
    response = client.post("/v1/search", json={"query": "keys", "where": "year >= )"})
    assert response.status_code == 400
    assert 'at character 9, before ")": a value is missing' in response.json()["error"]["message"]
