"""Client of a Qdrant server over HTTP: unreachable, silent, refusing, or without the collection."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

from stillroom.config.settings import IndexConfig, QdrantConfig
from stillroom.errors import IndexUnavailableError
from stillroom.retrieval.index.qdrant_collection import QdrantCollection

D = 12
INDEX = IndexConfig(kind="qdrant")


def on_server(tmp_path: Path, config: QdrantConfig) -> QdrantCollection:
    return QdrantCollection(config, INDEX, tmp_path / "unused", "c0ffee", D)


def answering(collection: QdrantCollection, answer: Callable[[httpx.Request], httpx.Response]) -> list[httpx.Request]:
    """Replace the server by `answer`; return the list of its requests."""
    asked: list[httpx.Request] = []

    def take(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answer(request)

    api = collection._connected()._client.openapi_client.client
    api._client.close()
    api._client = httpx.Client(transport=httpx.MockTransport(take), headers=dict(api._client.headers))
    return asked


def test_unreachable_server_is_reported(tmp_path: Path) -> None:
    collection = on_server(tmp_path, QdrantConfig(url="http://127.0.0.1:9", timeout_s=1))  # discard: nobody listens
    with pytest.raises(
        IndexUnavailableError, match=r"stillroom-c0ffee \(http://127.0.0.1:9\) cannot be used: .*refused"
    ):
        collection.read_mark()
    collection.close()


def test_server_timeout_is_reported(tmp_path: Path) -> None:
    def silent(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("")

    collection = on_server(tmp_path, QdrantConfig(url="http://127.0.0.1:9"))
    answering(collection, silent)
    with pytest.raises(IndexUnavailableError, match="cannot be used"):
        collection.read_mark()
    collection.close()


@pytest.mark.filterwarnings("ignore:Api key is used with an insecure connection")
def test_refused_key_is_reported_without_showing_it(tmp_path: Path) -> None:
    collection = on_server(tmp_path, QdrantConfig(url="http://127.0.0.1:9", api_key="sk-secret"))
    asked = answering(collection, lambda _: httpx.Response(403, text="forbidden: sk-secret"))
    with pytest.raises(IndexUnavailableError, match="STILLROOM_QDRANT__API_KEY") as caught:
        collection.read_mark()
    assert asked[0].headers["api-key"] == "sk-secret" and "sk-secret" not in str(caught.value)
    answering(collection, lambda _: httpx.Response(500, text="failed for sk-secret"))
    with pytest.raises(IndexUnavailableError, match="500") as caught:
        collection.count()
    assert "sk-secret" not in str(caught.value)
    collection.close()


def test_a_collection_that_a_server_does_not_have_is_missing(tmp_path: Path) -> None:
    collection = on_server(tmp_path, QdrantConfig(url="http://127.0.0.1:9"))
    answering(collection, lambda _: httpx.Response(404, json={"status": {"error": "Not found"}}))
    assert collection.read_mark() is None
    collection.close()


@pytest.mark.parametrize("exact", [False, True])
def test_search_parameters_are_sent_to_the_server(tmp_path: Path, exact: bool) -> None:
    collection = on_server(tmp_path, QdrantConfig(url="http://127.0.0.1:9", exact=exact))
    body = {"result": {"points": [{"id": 2**63 - 2, "version": 1, "score": 0.5}]}, "status": "ok", "time": 0.1}
    asked = answering(collection, lambda _: httpx.Response(200, json=body))
    assert collection.nearest(np.ones(D, dtype=np.float32), 3, 77, [4, 5]) == [2**63 - 2]
    sent = json.loads(asked[0].content)
    assert sent["params"] == {"hnsw_ef": 77, "exact": exact}
    assert sent["filter"] == {"must_not": {"has_id": [4, 5]}}
    assert (sent["limit"], sent["using"]) == (3, "dense")
    assert asked[0].url.path == "/collections/stillroom-c0ffee/points/query"
    collection.close()
