"""Many clients that disconnect at any moment, are refused or send invalid data.

Every answer that was read completely is correct, and no block, listener, thread or open file remains.
"""

import gc
import json
import os
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from stillroom.backends.local import LocalBackend
from stillroom.config.settings import QueryCacheConfig, RuntimeConfig, StillroomConfig, TraceConfig
from stillroom.engine.engine import Engine
from stillroom.rag.stillroom import Stillroom
from stillroom_bench.instrument.harness import peak_rss_bytes, reset_peak_rss
from tests.server.fakes import until
from tests.server.harness import serving
from tests.server.knowledge import ANSWER, QUESTION, write_knowledge

pytestmark = pytest.mark.microworld

NUM_CLIENTS = 8
PATIENCE = 60.0
MAX_GROWTH = 16 * 2**20
RANDOM_TEXT = {"max_tokens": 400, "temperature": 50.0}  # almost uniform sampling, so that answers are long


@pytest.fixture
def stillroom(tmp_path: Path) -> Iterator[Stillroom]:
    config = StillroomConfig(
        query_cache=QueryCacheConfig(max_tokens=0),
        runtime=RuntimeConfig(num_threads=1, max_waiting=6, max_num_seqs=4),
        trace=TraceConfig(keep=50),
    )
    with Stillroom.open(tmp_path / "kb", config=config) as stillroom:
        stillroom.add(write_knowledge(tmp_path / "docs"))
        stillroom.warm_up()
        yield stillroom


@dataclass
class Client:
    """Asks one question after the other, each on its own connection."""

    address: tuple[str, int]
    count: int
    draw: random.Random
    ends: Counter[str] = field(default_factory=Counter)
    problem: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(self.count):
                with socket.create_connection(self.address, timeout=PATIENCE) as connection:
                    self.ends[self._ask(connection)] += 1
        except BaseException as error:
            self.problem = error

    def _ask(self, connection: socket.socket) -> str:
        kind = self.draw.random()
        if kind < 0.05:
            connection.sendall(_request({"messages": "nonsense"}))
            assert _status(self._read(connection)) in (400, 422, 429)
            return "nonsense"
        if kind < 0.10:
            connection.sendall(_request(_body())[: self.draw.randint(1, 150)])
            self._leave(connection)
            return "left while asking"
        if kind < 0.50:
            is_streamed = self.draw.random() < 0.6
            connection.sendall(_request(_body(stream=is_streamed, seed=self.draw.randint(0, 9), **RANDOM_TEXT)))
            self._leave(connection)
            return "left"
        if kind < 0.60:
            connection.sendall(_request(_body(deadline_seconds=0.02, **RANDOM_TEXT)))
            reply = self._read(connection)
            assert _status(reply) in (429, 504), reply
            return "late" if _status(reply) == 504 else "refused"
        is_streamed = kind < 0.80
        connection.sendall(_request(_body(stream=is_streamed, n=1 if is_streamed else self.draw.choice((1, 2)))))
        reply = self._read(connection)
        if _status(reply) == 429:
            return "refused"
        assert _text_of(reply, is_streamed) == ANSWER, reply
        return "answered"

    def _leave(self, connection: socket.socket) -> None:
        """Disconnect after some bytes of the reply or none; with a FIN, or with a reset as after a crash."""
        for _ in range(self.draw.choice((0, 0, 1, 2, 5))):
            connection.settimeout(0.01)
            try:
                if not connection.recv(200):
                    break
            except TimeoutError:
                pass
        if self.draw.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _read(self, connection: socket.socket) -> bytes:
        pieces = []
        while piece := connection.recv(65536):
            pieces.append(piece)
        return b"".join(pieces)


def _body(**options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": QUESTION}]} | options


def _request(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Connection: close\r\nContent-Type: application/json\r\n\r\n".encode() + content


def _status(reply: bytes) -> int:
    return int(reply.split(None, 2)[1])


def _text_of(reply: bytes, is_streamed: bool) -> str:
    assert _status(reply) == 200, reply
    body = reply.partition(b"\r\n\r\n")[2]
    if not is_streamed:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    events = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)


def soak(url: str, stillroom: Stillroom, count: int, seed: int) -> Counter[str]:
    """Run the clients and count how their requests ended."""
    parts, draw = urlsplit(url), random.Random(seed)
    address = (str(parts.hostname), int(parts.port or 0))
    clients = [Client(address, count // NUM_CLIENTS, random.Random(draw.random())) for _ in range(NUM_CLIENTS)]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        if client.problem is not None:
            raise client.problem
    until(lambda: _is_idle(stillroom))
    return sum((client.ends for client in clients), Counter())


def _is_idle(stillroom: Stillroom) -> bool:
    backend = stillroom._loader.backend
    assert isinstance(backend, LocalBackend)
    load = backend.load
    is_free = load.num_free_blocks == load.num_blocks > 0
    return is_free and load.num_waiting == load.num_running == 0 and not backend.engine._listeners


def _check_books(stillroom: Stillroom) -> None:
    backend, checked = stillroom._loader.backend, threading.Event()
    assert isinstance(backend, LocalBackend)

    def check(engine: Engine) -> None:
        engine.check_integrity()
        checked.set()

    backend.engine.run(check)
    assert checked.wait(PATIENCE)


def _num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


ENDS = {"nonsense", "left while asking", "left", "late", "refused", "answered"}


def test_disconnects_at_any_moment_free_everything(stillroom: Stillroom) -> None:
    with serving(stillroom) as url:
        soak(url, stillroom, 2 * NUM_CLIENTS, seed=0)
        stillroom.ask(QUESTION)
        assert stillroom.records.recent(), "the request log, opened by another thread, must be open by now"
        before = _num_open_files()
        ends = soak(url, stillroom, 15 * NUM_CLIENTS, seed=1)
        until(lambda: _num_open_files() <= before)
    assert ends["answered"] > 20 and ends["left"] > 20 and ends["late"], ends
    _check_books(stillroom)


@pytest.mark.slow
def test_thousands_of_connections_free_everything(stillroom: Stillroom) -> None:
    with serving(stillroom) as url:
        ends = soak(url, stillroom, 400, seed=2)
        before = _memory()
        ends += soak(url, stillroom, 1600, seed=3)
        growth = _memory() - before
    _check_books(stillroom)
    assert growth < MAX_GROWTH, f"{growth / 2**20:.1f} MiB more after 1,600 connections"
    assert sum(ends.values()) == 2000 and set(ends) == ENDS, ends


def _memory() -> int:
    gc.collect()
    reset_peak_rss()
    return peak_rss_bytes()
