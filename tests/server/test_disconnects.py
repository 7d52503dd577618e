"""Clients that disconnect, and a server that is stopped while it answers."""

import gc
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from stillroom.config.settings import ServerConfig, StillroomConfig
from stillroom.core.cancellation import Cancellation
from stillroom.server.routes.upload_queue import QueuedChange
from tests.server.fakes import NUM_BLOCKS, FakeStillroom, as_stillroom, until
from tests.server.harness import QUESTION, events, running


@contextmanager
def streaming(url: str) -> Iterator[Iterator[str]]:
    """Yield the lines of a stream that has begun."""
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


def test_disconnect_from_a_stream_frees_its_blocks(client: httpx.Client, stillroom: FakeStillroom) -> None:
    stillroom.gate.clear()
    with streaming(str(client.base_url)):
        assert stillroom.num_free_blocks == NUM_BLOCKS - 1

    until(lambda: stillroom.num_free_blocks == NUM_BLOCKS)
    until(lambda: b'status="499"' in stillroom.metrics.render())


def test_disconnect_before_a_complete_answer_frees_its_blocks(client: httpx.Client, stillroom: FakeStillroom) -> None:
    stillroom.gate.clear()

    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=QUESTION, timeout=0.3)

    until(lambda: stillroom.num_free_blocks == NUM_BLOCKS)
    until(lambda: b'status="499"' in stillroom.metrics.render())


def test_stopping_waits_for_a_stream_to_end(stillroom: FakeStillroom) -> None:
    stillroom.gate.clear()
    with running(as_stillroom(stillroom)) as server, streaming(server.url) as lines:
        server.stop()
        until(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=QUESTION)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) > 0
        stillroom.gate.set()

        assert list(lines)[-2] == "data: [DONE]"
    assert refuses(server.port)


@pytest.mark.parametrize("is_twice", [False, True])
def test_stream_that_outlasts_the_grace_period_ends_with_an_error_event(is_twice: bool) -> None:
    config = StillroomConfig(server=ServerConfig(grace_s=60.0 if is_twice else 0.2))
    stillroom = FakeStillroom(config=config)
    stillroom.gate.clear()
    with running(as_stillroom(stillroom)) as server, streaming(server.url) as lines:
        server.stop()
        if is_twice:
            server.stop()
        last = json.loads([line for line in lines if line][-1].removeprefix("data: "))

    assert last["error"]["code"] == "shutting_down"
    assert stillroom.num_free_blocks == NUM_BLOCKS


@pytest.mark.parametrize("is_stream", [True, False])
def test_running_upload_outlasts_the_grace_period_and_a_waiting_one_never_begins(
    is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stillroom = FakeStillroom(config=StillroomConfig(server=ServerConfig(grace_s=0.2)))
    begun, go_on, upload = threading.Event(), threading.Event(), stillroom.upload
    arrived: list[None] = []
    monkeypatch.setattr(
        "stillroom.server.routes.upload_queue.UploadQueue.check_capacity", lambda _: arrived.append(None)
    )

    def slow(*given: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return upload(*given)

    monkeypatch.setattr(stillroom, "upload", slow)
    headers = {"accept": "text/event-stream"} if is_stream else {}

    def send(name: str) -> httpx.Response:
        files = {"file": (name, b"a" * 2_000_000)}
        return httpx.post(f"{server.url}/v1/documents", files=files, headers=headers, timeout=20)

    with ThreadPoolExecutor(2) as pool, running(as_stillroom(stillroom)) as server:
        first = pool.submit(send, "a.md")
        assert begun.wait(20)
        second = pool.submit(send, "b.md")
        until(lambda: len(arrived) == 2)
        server.stop()
        for reply in (first.result(), second.result()):
            error = events(reply)[-1] if is_stream else reply.json()
            assert error["error"]["code"] == "shutting_down"
            assert reply.status_code == (200 if is_stream else 503)
        go_on.set()
    assert "uploads/a.md" in stillroom.texts and "uploads/b.md" not in stillroom.texts


def test_stopping_server_does_not_complete_interrupted_uploads_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stillroom = FakeStillroom()
    begun, queued = threading.Event(), []

    def complete(stop: Cancellation) -> int:
        begun.set()
        until(lambda: stop.is_cancelled)
        stop.check()
        return 0

    class Counted(QueuedChange[Any]):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            queued.append(self)

    monkeypatch.setattr(stillroom, "complete_uploads", complete)
    monkeypatch.setattr("stillroom.server.routes.upload_queue.QueuedChange", Counted)
    with running(as_stillroom(stillroom)):
        assert begun.wait(20)
    assert len(queued) == 1 and queued[0].is_cancelled
    gc.collect()  # asyncio reports a pending task when it is destroyed
    assert not caplog.records
