"""`/v1/rerank` and `/v2/rerank` of a real server with a fake Stillroom, and with a real cross-encoder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stillroom.config.settings import SearchConfig, ServerConfig, StillroomConfig
from stillroom.rag.stillroom import Stillroom
from stillroom.server.auth.key_ring import KeyRing
from tests.fakes import random_cross_encoder
from tests.server.fakes import FakeStillroom, as_stillroom
from tests.server.harness import serving
from tests.server.test_keys import add, bearer

PATHS = ("/v1/rerank", "/v2/rerank")
TEXTS = ["cats sleep", "rotate keys", "keys"]
BODY: dict[str, Any] = {"query": "rotate keys", "documents": TEXTS}
CONFIG = StillroomConfig(search=SearchConfig(reranker="/models/fake-reranker"))


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(as_stillroom(FakeStillroom(config=CONFIG))) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_results_are_best_first_with_their_place_in_the_request(client: httpx.Client, path: str) -> None:
    body = client.post(path, json=BODY).json()

    assert body["results"] == [
        {"index": 1, "relevance_score": 1.0},
        {"index": 2, "relevance_score": 0.5},
        {"index": 0, "relevance_score": 0.0},
    ]
    assert body["id"] and body["model"] == "fake-reranker"
    assert body["meta"] == {"api_version": {"version": path[2]}}
    assert body["usage"] == {"prompt_tokens": 0, "total_tokens": 0}


def test_documents_are_texts_or_objects_and_returned_on_request(client: httpx.Client) -> None:
    documents = [*TEXTS[:2], {"text": TEXTS[2], "title": "ignored"}]
    options = {"documents": documents, "top_n": 2, "return_documents": True, "model": "fake-reranker"}
    cohere = {"rank_fields": ["text"], "max_chunks_per_doc": 10, "max_tokens_per_doc": 4096, "priority": 0}
    found = client.post("/v1/rerank", json=BODY | options | cohere).json()["results"]
    assert [one["document"] for one in found] == [{"text": "rotate keys"}, {"text": "keys"}]
    assert [one["index"] for one in client.post("/v1/rerank", json=BODY | {"top_n": 99}).json()["results"]] == [1, 2, 0]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"query": " "}, "query"),
        ({"query": None}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["x"] * 1001}, "documents"),
        ({"documents": [{"title": "x"}]}, "documents"),
        ({"documents": "x"}, "documents"),
        ({"documents": [3]}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"top_n": "2"}, "top_n"),
        ({"return_documents": "yes"}, "return_documents"),
        ({"rank_fields": ["title"]}, "rank_fields"),
    ],
)
def test_invalid_request_is_400_and_names_the_field(client: httpx.Client, change: dict[str, Any], param: str) -> None:
    response = client.post("/v1/rerank", json=BODY | change)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


def test_document_without_text_is_explained(client: httpx.Client) -> None:
    error = client.post("/v1/rerank", json=BODY | {"documents": ["x", {"title": "x"}]}).json()["error"]
    assert error["message"] == 'documents.1: must be a text, or an object with a text: {"text": "..."}'
    error = client.post("/v1/rerank", json=BODY | {"rank_fields": ["title", "text"]}).json()["error"]
    assert error["message"].startswith('rank_fields: can only be ["text"]')


def test_unknown_model_is_404_and_names_the_reranker(client: httpx.Client) -> None:
    response = client.post("/v1/rerank", json=BODY | {"model": "rerank-v3.5"})
    assert response.status_code == 404 and "fake-reranker" in response.json()["error"]["message"]
    assert client.post("/v1/rerank", json=BODY | {"model": "stillroom"}).status_code == 200
    assert "fake-reranker" in [one["id"] for one in client.get("/v1/models").json()["data"]]


def test_server_without_a_reranker_names_the_setting(any_client: httpx.Client) -> None:
    for path in PATHS:
        response = any_client.post(path, json=BODY | {"model": "rerank-v3.5"})
        assert response.status_code == 400 and "search.reranker" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_keys_and_limits_hold(tmp_path: Path, path: str) -> None:
    key = add(tmp_path / "keys.json", "anna")
    server = ServerConfig(requests_per_minute=1, max_body_bytes=2000)
    fake = FakeStillroom(config=StillroomConfig(search=CONFIG.search, server=server))
    with serving(as_stillroom(fake), keys=KeyRing(tmp_path / "keys.json")) as url, httpx.Client(base_url=url) as client:
        assert client.post(path, json=BODY).status_code == 401
        assert client.post(path, json=BODY | {"query": "x" * 3000}, headers=bearer(key)).status_code == 413
        statuses = [client.post(path, json=BODY, headers=bearer(key)).status_code for _ in range(2)]
        assert statuses == [200, 429]


def test_scores_are_those_of_the_cross_encoder(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    model = random_cross_encoder(tmp_path / "model")
    config = StillroomConfig(search=SearchConfig(reranker=str(model)))
    with (
        Stillroom.open(tmp_path / "kb", config=config) as stillroom,
        serving(stillroom) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        body = client.post("/v1/rerank", json=BODY).json()
    expected = CrossEncoder(str(model), device="cpu").rank("rotate keys", TEXTS, show_progress_bar=False)
    assert body["model"] == "model"
    assert [one["index"] for one in body["results"]] == [one["corpus_id"] for one in expected]
    for found, one in zip(body["results"], expected, strict=True):
        assert found["relevance_score"] == pytest.approx(float(one["score"]), abs=1e-5)
