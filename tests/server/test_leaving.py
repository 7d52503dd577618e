"""Clients that leave, and a server that is stopped while it answers."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from stillroom.server import run
from tests.server.fakes import NUM_BLOCKS, FakeRoom, as_room, until
from tests.server.harness import QUESTION, running


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
