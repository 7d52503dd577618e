"""`/v1/models` and `/v1/embeddings` of a real server with a fake Stillroom."""

import base64
import struct
from typing import Any

import httpx
import pytest

from tests.server.fakes import FakeStillroom
from tests.server.harness import QUESTION


def test_models_are_the_generator_and_the_embedder(client: httpx.Client, stillroom: FakeStillroom) -> None:
    names = [model["id"] for model in client.get("/v1/models").json()["data"]]

    assert names == ["fake-model", stillroom.config.embedder.model]
    assert client.get("/v1/models/fake-model").json()["object"] == "model"
    assert client.get("/v1/models/stillroom").json()["id"] == "fake-model"
    assert client.get("/v1/models/org/other").status_code == 404


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/embeddings"])
def test_unknown_model_is_404_and_names_the_served_one(
    client: httpx.Client, stillroom: FakeStillroom, route: str
) -> None:
    response = client.post(route, json=QUESTION | {"input": "x", "model": "gpt-4o"})

    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"].endswith(", and 'stillroom' means whichever it has"), "the name that works everywhere"
    assert stillroom.asked == []


def test_embeddings_as_numbers_and_as_base64_are_the_same(client: httpx.Client, stillroom: FakeStillroom) -> None:
    texts = ["one", "two"]

    plain = client.post("/v1/embeddings", json={"input": texts}).json()
    packed = client.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"}).json()

    assert [item["index"] for item in plain["data"]] == [0, 1]
    assert plain["model"] == stillroom.config.embedder.model
    for expected, a, b in zip(stillroom.embed(texts), plain["data"], packed["data"], strict=True):
        assert a["embedding"] == pytest.approx(expected.tolist())
        assert struct.unpack("<4f", base64.b64decode(b["embedding"])) == pytest.approx(expected.tolist())


def test_embedding_of_one_text(client: httpx.Client) -> None:
    body = client.post("/v1/embeddings", json={"input": "one", "dimensions": 4, "model": "stillroom"}).json()

    assert len(body["data"]) == 1


@pytest.mark.parametrize(
    "request_body",
    [{}, {"input": []}, {"input": [""]}, {"input": [[1, 2]]}, {"input": "x", "dimensions": 7}, {"input": ["x"] * 2049}],
)
def test_invalid_embedding_request_is_400(client: httpx.Client, request_body: dict[str, Any]) -> None:
    response = client.post("/v1/embeddings", json=request_body)

    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
