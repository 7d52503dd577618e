"""Overload: at twice the sustainable rate the server answers in bounded time, refuses the rest and frees everything.

STILLROOM_LOAD_CONNECTIONS and STILLROOM_LOAD_SECONDS set connections and duration; the figures go to stdout.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from stillroom.config.settings import RuntimeConfig, ServerConfig, StillroomConfig
from stillroom.rag.stillroom import Stillroom
from tests.server.fakes import until
from tests.server.harness import serving
from tests.server.knowledge import write_knowledge

pytestmark = pytest.mark.microworld

NUM_CONNECTIONS = int(os.environ.get("STILLROOM_LOAD_CONNECTIONS", "60"))
NUM_CLIENTS = 48
"""Clients that measure the sustainable rate: more than a batch holds, so that every step is full."""
SECONDS = float(os.environ.get("STILLROOM_LOAD_SECONDS", "10"))
MAX_WAIT = 5.0
PATIENCE = 60.0
MAX_GROWTH = 64 * 2**20
QUESTIONS = (
    "Which company employed Dola Kenric ?",
    "In which year was Jatha Jurlow born ?",
    "What did Cirik Prurs study ?",
    "Who was the mentor of Dola Kenric ?",
)
SETTINGS = {
    "STILLROOM_SERVER__MAX_WAIT_S": str(MAX_WAIT),
    "STILLROOM_SERVER__MAX_CONCURRENT": "0",
    "STILLROOM_SERVER__ACCESS_LOG": "false",
    "STILLROOM_RUNTIME__NUM_THREADS": "1",
    "STILLROOM_TRACE__KEEP": "100",
}


@dataclass
class Seen:
    """Replies that the clients received."""

    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    num_late: int = 0
    """Requests not sent, because no connection was idle."""
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Footprint:
    """Resources that the server uses."""

    rss: int
    num_files: int
    num_threads: int
    num_free_blocks: int

    @classmethod
    def of(cls, pid: int, url: str) -> "Footprint":
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        )
        health = httpx.get(f"{url}/healthz", timeout=PATIENCE).json()
        return cls(
            int(status["VmRSS"].split()[0]) * 1024,
            len(os.listdir(f"/proc/{pid}/fd")),
            int(status["Threads"]),
            health["kv_blocks"]["free"],
        )


@contextmanager
def served(kb: Path) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "stillroom.cli.main", "serve", "--kb", str(kb), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | SETTINGS, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"], process.pid
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


@asynccontextmanager
async def connections(url: str, count: int, seen: Seen) -> AsyncIterator["asyncio.Queue[Connection]"]:
    idle: asyncio.Queue[Connection] = asyncio.Queue()
    made = [Connection(url, seen) for _ in range(count)]
    for one in made:
        await one.open()
        idle.put_nowait(one)
    try:
        yield idle
    finally:
        for one in made:
            one.close()


class Connection:
    """A connection that asks one question after the other."""

    def __init__(self, url: str, seen: Seen) -> None:
        self._address = urlsplit(url)
        self._seen = seen
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        assert self._address.port
        self.close()
        self._reader, self._writer = await asyncio.open_connection(self._address.hostname, self._address.port)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def ask(self, question: str, **options: object) -> None:
        request = {"messages": [{"role": "user", "content": question}], "max_tokens": 16} | options
        body = json.dumps(request).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        try:
            async with asyncio.timeout(PATIENCE):
                status, reply = await self._exchange(head.encode() + body)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            self._seen.problems.append(repr(error))
            self.close()
            await self.open()
            return
        seconds = time.perf_counter() - began
        self._seen.statuses[status] += 1
        if status == 200:
            self._seen.latencies.append(seconds)
        else:
            self._seen.refusals.append(seconds)
            if reply["error"]["code"] != "queue_full":
                self._seen.problems.append(str(reply))

    async def _exchange(self, request: bytes) -> tuple[int, Any]:
        assert self._writer is not None
        if self._writer.is_closing() or self._reader.at_eof():  # an idle connection may be closed at any time
            await self.open()
        try:
            return await self._once(request)
        except (ConnectionError, asyncio.IncompleteReadError):
            await self.open()
            return await self._once(request)

    async def _once(self, request: bytes) -> tuple[int, Any]:
        assert self._writer is not None
        self._writer.write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("ascii")
        length = next(line for line in head.lower().split("\r\n") if line.startswith("content-length:"))
        content = await self._reader.readexactly(int(length.split(":")[1]))
        return int(head[9:12]), json.loads(content)


async def sustainable(url: str, seconds: float) -> float:
    """Measure the answers per second of clients that ask without pause."""
    seen = Seen()
    end = time.perf_counter() + seconds

    async def keep_asking(connection: Connection, index: int) -> None:
        while time.perf_counter() < end:
            await connection.ask(QUESTIONS[index % len(QUESTIONS)])

    async with connections(url, NUM_CLIENTS, seen) as idle:
        await asyncio.gather(*(keep_asking(idle.get_nowait(), index) for index in range(NUM_CLIENTS)))
    return seen.statuses[200] / seconds


async def flood(url: str, rate: float, seconds: float) -> Seen:
    """Send requests at a fixed rate, whatever the replies."""
    seen, randomness = Seen(), random.Random(0)
    tasks: set[asyncio.Task[None]] = set()

    async def send(idle: "asyncio.Queue[Connection]", connection: Connection) -> None:
        try:
            await connection.ask(randomness.choice(QUESTIONS))
        finally:
            idle.put_nowait(connection)

    async with connections(url, NUM_CONNECTIONS, seen) as idle:
        began, due = time.perf_counter(), 0.0
        while due < seconds:
            due += randomness.expovariate(rate)
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            if idle.empty():
                seen.num_late += 1
                continue
            task = asyncio.create_task(send(idle, idle.get_nowait()))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
    return seen


async def burst(url: str, count: int) -> Seen:
    """Send requests at the same time, each on its own connection, for answers of 64 tokens."""
    seen = Seen()
    async with connections(url, count, seen) as idle:
        await asyncio.gather(
            *(
                idle.get_nowait().ask(QUESTIONS[index % len(QUESTIONS)], max_tokens=64, min_tokens=64)
                for index in range(count)
            )
        )
    return seen


def test_requests_beyond_the_queue_are_served_or_refused_and_free_everything(tmp_path: Path) -> None:
    num_running, num_waiting = 4, 8
    limit = num_running + num_waiting
    runtime = RuntimeConfig(num_threads=1, max_num_seqs=num_running, max_waiting=num_waiting)
    config = StillroomConfig(runtime=runtime, server=ServerConfig(max_wait_s=0.0, max_concurrent=0))
    with Stillroom.open(tmp_path / "kb", config=config) as stillroom:
        stillroom.add(write_knowledge(tmp_path / "docs"))
        stillroom.warm_up()
        with serving(stillroom) as url:
            asyncio.run(burst(url, 2 * limit))  # starts threads and opens files that remain
            until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
            before = Footprint.of(os.getpid(), url)
            for _ in range(2):
                seen = asyncio.run(burst(url, 2 * limit))
                assert not seen.problems
                assert seen.statuses[200] >= num_running and seen.statuses[429] > 0, seen.statuses
                assert seen.statuses.total() == seen.statuses[200] + seen.statuses[429] == 2 * limit
            until(lambda: Footprint.of(os.getpid(), url).num_free_blocks == before.num_free_blocks)
            after = Footprint.of(os.getpid(), url)
    assert after.num_threads <= before.num_threads + 2 and after.num_files <= before.num_files + 2


@pytest.mark.slow
def test_twice_the_sustainable_load(tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "kb") as stillroom:
        stillroom.add(write_knowledge(tmp_path / "docs"))
    with served(tmp_path / "kb") as (url, pid):
        asyncio.run(sustainable(url, min(5.0, SECONDS)))
        rate = asyncio.run(sustainable(url, min(15.0, SECONDS)))
        asyncio.run(flood(url, 2 * rate, min(10.0, SECONDS)))  # lets buffers grow first
        until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
        before = Footprint.of(pid, url)
        seen = asyncio.run(flood(url, 2 * rate, SECONDS))
        until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before.num_files + 2)
        after = Footprint.of(pid, url)

    latencies = sorted(seen.latencies)
    served_rate = len(latencies) / SECONDS
    p50, p99 = latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99)]
    print(
        f"\n{NUM_CONNECTIONS} connections, {SECONDS:.0f} s, sustainable {rate:.1f}/s, sent {2 * rate:.1f}/s: "
        f"{dict(seen.statuses)}, {seen.num_late} found no idle connection, {served_rate:.1f} answers/s; seconds to an "
        f"answer: median {p50:.2f}, 99 % {p99:.2f}, longest {latencies[-1]:.2f}; longest to a refusal "
        f"{max(seen.refusals, default=0.0):.2f}; before {before}, after {after}; problems {seen.problems[:5]}"
    )
    assert not seen.problems
    assert set(seen.statuses) <= {200, 429}
    assert served_rate > rate / 3, "the server must still serve while it refuses"
    assert latencies[-1] < 3 * MAX_WAIT + 5
    assert after.num_free_blocks == before.num_free_blocks
    assert after.num_threads <= before.num_threads + 2
    assert after.rss - before.rss < MAX_GROWTH
