"""A server whose application is still loading."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from fastapi import FastAPI

from stillroom.config.settings import ServerConfig
from stillroom.server.app import create_app
from stillroom.server.loading import Loading
from stillroom.server.run import HttpServer
from tests.server.fakes import FakeStillroom, as_stillroom, until

CHAT = "https://chat.example.org"


class Loads:
    """A server that loads until `go_on` is set."""

    def __init__(self) -> None:
        self.server = HttpServer("127.0.0.1", 0)
        self.go_on, self.is_ready = threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self.raised: BaseException | None = None
        self.stops = False
        """Whether the server is asked to stop when it has loaded."""

    def load(self, loading: Loading) -> FastAPI:
        loading.step = "loading the model"
        assert self.go_on.wait(20)
        if self.failure is not None:
            raise self.failure
        app = create_app(as_stillroom(FakeStillroom()))
        if self.stops:
            self.server.stop()
        return app

    def run(self) -> None:
        try:
            self.server.run(self.load, self.is_ready.set, ServerConfig(allowed_origins=CHAT))
        except BaseException as error:
            self.raised = error


@contextmanager
def loading() -> Iterator[tuple[Loads, httpx.Client, threading.Thread]]:
    loads = Loads()
    thread = threading.Thread(target=loads.run)
    thread.start()
    try:
        with httpx.Client(base_url=loads.server.url, timeout=20) as client:
            until(lambda: answers(client))
            yield loads, client, thread
    finally:
        loads.go_on.set()
        loads.server.stop()
        thread.join(20)
        assert not thread.is_alive()


def answers(client: httpx.Client) -> bool:
    try:
        return "loading the model" in client.get("/readyz").text
    except httpx.ConnectError:
        return False


def test_probes_distinguish_a_loading_server_from_a_dead_one() -> None:
    with loading() as (loads, client, _):
        alive, ready = client.get("/healthz"), client.get("/readyz")
        assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
        assert client.head("/healthz").status_code == 200
        assert (ready.status_code, ready.json()["reasons"]) == (503, ["loading: loading the model"])
        assert not loads.is_ready.is_set()
        loads.go_on.set()
        assert loads.is_ready.wait(20)
        assert client.get("/readyz").json()["status"] == "ready"
        assert client.get("/healthz").json()["model"] == "fake-model"


def test_pages_of_allowed_origins_can_read_that_the_server_is_loading() -> None:
    with loading() as (_, client, _thread):
        asked = {"origin": CHAT, "access-control-request-method": "POST"}
        preflight = client.options("/v1/search", headers=asked)
        found = client.post("/v1/search", json={"query": "keys"}, headers={"origin": CHAT})
        foreign = client.get("/v1/models", headers={"origin": "https://evil.example"})
    assert (preflight.status_code, found.status_code) == (200, 503)
    assert preflight.headers["access-control-allow-origin"] == found.headers["access-control-allow-origin"] == CHAT
    assert "retry-after" in found.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in foreign.headers


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/", "/nowhere", "/healthz/"])
def test_other_routes_are_503_with_retry_after_while_loading(path: str) -> None:
    with loading() as (_, client, _thread):
        found = client.get(path, headers={"x-request-id": "mine"})
        asked = client.post("/v1/chat/completions", json={})
    for response in (found, asked):
        assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
        assert int(response.headers["retry-after"]) > 0
    assert found.headers["x-request-id"] == "mine"


def test_server_that_is_stopped_at_the_end_of_loading_begins_nothing() -> None:
    with loading() as (loads, _, thread):
        loads.stops = True
        loads.go_on.set()
        thread.join(20)
        assert not thread.is_alive() and loads.raised is None and not loads.is_ready.is_set()


def test_loading_server_stops_at_once() -> None:
    with loading() as (loads, _, thread):
        loads.server.stop()
        thread.join(20)
        assert not thread.is_alive() and loads.server.is_loading
        assert loads.raised is None and not loads.is_ready.is_set()


@pytest.mark.parametrize("failure", [ValueError("no such model"), KeyboardInterrupt(), SystemExit(3)])
def test_exception_of_loading_ends_the_server_and_is_raised(failure: BaseException) -> None:
    with loading() as (loads, _, thread):
        loads.failure = failure
        loads.go_on.set()
        thread.join(20)
        assert not thread.is_alive() and not loads.server.is_loading
    assert loads.raised is failure
