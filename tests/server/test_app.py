"""Health and metrics of a real server with a fake Stillroom."""

import dataclasses

import httpx
import pytest
from starlette.testclient import TestClient

from stillroom.retrieval.tiers.hot_lists import ListFigures
from stillroom.server.app import create_app
from tests.server.fakes import NUM_BLOCKS, FakeStillroom, as_stillroom


def test_health_shows_model_documents_and_blocks(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {
        "status": "ok",
        "model": "fake-model",
        "documents": 1,
        "kv_blocks": {"free": NUM_BLOCKS, "total": NUM_BLOCKS},
    }


def test_health_shows_the_tiers_of_an_index(client: httpx.Client, stillroom: FakeStillroom) -> None:
    stillroom.list_figures = ListFigures(10, 3, 0, 100, 70, 30, 0, 0, 0, 0, 0.0, 0)
    assert client.get("/healthz").json()["index_lists"] == {"host": 3, "total": 10}

    on_devices = dataclasses.replace(stillroom.list_figures, num_lists_on_devices=2)
    stillroom.list_figures = on_devices
    assert client.get("/healthz").json()["index_lists"] == {"device": 2, "host": 3, "total": 10}


def test_metrics_count_routes_by_template(client: httpx.Client) -> None:
    client.get("/v1/models/fake-model")
    client.get("/wp-login.php")

    response = client.get("/metrics")

    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'stillroom_http_requests_total{path="/v1/models/{model:path}",status="200"} 1.0' in response.text
    assert 'stillroom_http_requests_total{path="other",status="404"} 1.0' in response.text
    assert "wp-login" not in response.text
    assert 'stillroom_http_requests_total{path="/v1/chat/completions",status="500"} 0.0' in response.text


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_may_use_head(client: httpx.Client, path: str) -> None:
    probe = client.head(path)
    assert (probe.status_code, probe.content) == (200, b"")
    assert client.put(path).headers["allow"] == "GET, HEAD"


def test_failed_check_makes_the_server_not_ready(stillroom: FakeStillroom) -> None:
    app = create_app(as_stillroom(stillroom))
    problems = ["the device is lost", None]
    app.state.readiness.add("device", lambda: problems[0])
    with TestClient(app, base_url="http://127.0.0.1") as client:
        lost = client.get("/readyz")
        problems.pop(0)
        recovered = client.get("/readyz")

    assert (lost.status_code, lost.json()["reasons"]) == (503, ["the device is lost"])
    assert lost.json()["checks"]["device"] is False and int(lost.headers["retry-after"]) > 0
    assert (recovered.status_code, recovered.json()["reasons"]) == (200, [])
