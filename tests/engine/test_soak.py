"""Soak: requests from several threads through the engine's thread, with a small pool, a host and a disk tier. Some
are cancelled, some take too long, some listeners are slow or fail. Every request gets its last event, the window
bounds overtaking, and every block and byte is released."""

import gc
import logging
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stillroom.backends.engine_building import build_engine
from stillroom.config.settings import ReuseConfig, RuntimeConfig
from stillroom.core.batch import Batch, StepResult
from stillroom.core.clock import VirtualClock
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import OWN_TIERS, Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent
from stillroom.errors import PromptTooLongError, RequestTimeoutError
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.kvstore.files import size_on_disk
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_own_decoder
from stillroom.runner.torch_runner import Runner
from stillroom_bench.instrument.harness import peak_rss_bytes, reset_peak_rss
from tests.devices import TEST_DEVICE
from tests.fakes import ManualClock, random_checkpoint

BLOCK, NUM_BLOCKS, HOST_TOKENS, DISK_RECORDS = 8, 48, 100, 15
WINDOW = 8
STEP_SECONDS, TIMEOUT = 0.01, 0.6
"""In seconds on the engine's clock: a request may take sixty steps, twice."""
NUM_THREADS, NUM_OPEN = 4, 6
"""Threads that ask, and the requests in progress of each."""
LONG = 180
"""Tokens of an answer that exceeds the time limit."""
MAX_GROWTH = 12 * 2**20
"""Python's table of interned strings, which holds names of files, sometimes grows by 7 MiB at once."""
PATIENCE = 120.0


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("checkpoint")
    random_checkpoint(path, "Llama", num_hidden_layers=1)
    return load_own_decoder(path, device=TEST_DEVICE, dtype="float32")


class TickingRunner:
    """Advances the engine's clock by the same time in each step, and reports the requests that run."""

    def __init__(self, inner: Runner, clock: VirtualClock, on_run: Callable[[RequestId], None]) -> None:
        self.inner, self.clock, self.on_run = inner, clock, on_run

    def execute(self, batch: Batch) -> StepResult:
        for entry in batch.sequences:
            self.on_run(entry.request_id)
        self.clock.advance(STEP_SECONDS)
        return self.inner.execute(batch)

    def recover(self) -> None:
        self.inner.recover()


class WatchedEngine(Engine):
    """Counts for each waiting request how many later ones were admitted before it."""

    def __init__(self, inner: Engine, clock: VirtualClock) -> None:
        super().__init__(inner.scheduler, TickingRunner(inner.runner, clock, self._seen), clock, TIMEOUT)
        self.overtaken: dict[RequestId, int] = {}
        """Counts of the requests that have not run yet, in order of arrival."""
        self.most_overtaken = 0

    def submit(self, request: Request, *samples: Request) -> None:
        super().submit(request, *samples)
        self.overtaken[request.request_id] = 0

    def cancel(self, request_id: RequestId) -> TokenEvent | None:
        self.overtaken.pop(request_id, None)
        return super().cancel(request_id)

    def _seen(self, request_id: RequestId) -> None:
        if request_id not in self.overtaken:
            return
        for earlier in self.overtaken:
            if earlier == request_id:
                break
            self.overtaken[earlier] += 1
            self.most_overtaken = max(self.most_overtaken, self.overtaken[earlier])
        del self.overtaken[request_id]


class SoakFixture:
    """An engine in its thread, over small tiers."""

    def __init__(self, decoder: Decoder, folder: Path) -> None:
        spec = decoder.spec
        self.bytes_per_token = per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
        self.disk_bytes = DISK_RECORDS * size_on_disk(10 * per_token)
        runtime = RuntimeConfig(
            block_size=BLOCK,
            kv_bytes=NUM_BLOCKS * BLOCK * per_token,
            max_num_seqs=6,
            max_num_batched_tokens=64,
            scheduling="cache_first",
            starvation_window=WINDOW,
        )
        reuse = ReuseConfig(host_bytes=HOST_TOKENS * per_token, disk_bytes=self.disk_bytes, tail_blocks=1)
        clock = ManualClock()
        profile = linear_profile(1e-3, 1e-4, 1e-7)  # loading costs nothing, so kept KV is used
        inner, self.cache = build_engine(
            decoder, runtime, clock, reuse=reuse, fingerprint=b"m" * 32, profile=profile, kv_folder=folder
        )
        self.watched = WatchedEngine(inner, clock)
        self.engine = AsyncEngine(self.watched)

    def ask_engine(self, command: Callable[[Engine], object]) -> None:
        """Run a command in the engine's thread, and return when it has run; its exceptions are raised here."""
        done, errors = threading.Event(), list[BaseException]()

        def carry_out(engine: Engine) -> None:
            try:
                command(engine)
            except BaseException as error:
                errors.append(error)
            done.set()

        self.engine.run(carry_out)
        assert done.wait(PATIENCE), "the engine does not answer"
        if errors:
            raise errors[0]

    def check_idle(self) -> None:
        """Assert that no request is left, and that kept KV is within its limits."""

        def check(engine: Engine) -> None:
            engine.check_integrity()
            assert not engine.has_work and not self.watched.overtaken
            assert engine._deadlines.next_at == math.inf and not self.engine._listeners

        self.ask_engine(check)
        assert self.engine.num_free_blocks == self.engine.num_blocks == NUM_BLOCKS
        self._check_bytes()

    def check_empty(self) -> None:
        """Assert that every block and byte is released when no KV is kept."""
        tree = self.cache.tree
        assert tree is not None
        self.ask_engine(lambda _: tree.clear())
        assert self.watched.scheduler.kv.pool.num_free == NUM_BLOCKS
        assert [tree.num_bytes(tier) for tier in OWN_TIERS] == [0, 0, 0]
        self._check_bytes()

    def _check_bytes(self) -> None:
        tree, tiers = self.cache.tree, self.cache.tiers
        assert tree is not None and tiers is not None and tiers.disk is not None
        assert tiers.host.num_bytes == tree.num_bytes(Tier.HOST) <= HOST_TOKENS * self.bytes_per_token
        assert tree.num_bytes(Tier.DISK) <= self.disk_bytes
        assert len(tiers.disk.records()) == tree.num_nodes(Tier.DISK)


@dataclass
class RequestPlan:
    """Planned events of a request."""

    max_tokens: int
    cancel_after: int | None = None
    """Cancel after this many tokens; 0: at once."""
    fails_after: int | None = None
    """Event at which its listener fails; 0: the first one."""
    is_slow: bool = False


def plan_request(draw: random.Random) -> RequestPlan:
    kind, length = draw.random(), draw.randint(1, 8)
    if kind < 0.12:
        return RequestPlan(length, cancel_after=draw.randint(0, length))
    if kind < 0.17:
        return RequestPlan(length, fails_after=draw.randint(0, length - 1))
    if kind < 0.18:
        return RequestPlan(LONG)
    return RequestPlan(length, is_slow=kind < 0.20)


def question(name: str, draw: random.Random, max_tokens: int) -> Request:
    """Return a random request: popular documents are frequent; some are of another tenant, urgent or too long."""
    documents = [min(int(draw.paretovariate(0.7)), 60) for _ in range(draw.randint(1, 3))]
    segments = [Segment(SegmentKind.SYSTEM, (3, 4, 5, 6, 7))]
    for document in documents:
        length = 400 if draw.random() < 0.003 else 8 + 5 * document % 23
        ids = tuple(10 + (document * 31 + i * 7) % 280 for i in range(length))
        segments.append(Segment(SegmentKind.CHUNK, ids, ChunkId(document)))
    segments.append(Segment(SegmentKind.QUESTION, tuple(draw.randint(20, 290) for _ in range(draw.randint(1, 9)))))
    return Request(
        request_id=RequestId(name),
        prompt=SegmentedPrompt(tuple(segments)),
        sampling=SamplingParams(max_tokens=max_tokens),
        cache_salt=draw.choice(("", "", "", "other")),
        priority=draw.choice((0, 0, 0, 1)),
    )


@dataclass
class SoakClient:
    """A client with a few requests in progress at any time."""

    fixture: SoakFixture
    name: str
    count: int
    draw: random.Random
    lasts: Counter[RequestId] = field(default_factory=Counter)
    """Last events of each request."""
    ends: Counter[str] = field(default_factory=Counter)
    failed: set[RequestId] = field(default_factory=set)
    """Requests whose listeners failed, and so get no further event."""
    late: list[str] = field(default_factory=list)
    """Requests that got an event after their last one."""
    problem: BaseException | None = None

    def __post_init__(self) -> None:
        self.open = threading.Semaphore(NUM_OPEN)

    def run(self) -> None:
        try:
            for number in range(self.count):
                assert self.open.acquire(timeout=PATIENCE), "no request ends"
                self._ask(f"{self.name}-{number}")
            for _ in range(NUM_OPEN):
                assert self.open.acquire(timeout=PATIENCE), "a request does not end"
        except BaseException as error:
            self.problem = error

    def _ask(self, name: str) -> None:
        what = plan_request(self.draw)
        one = question(name, self.draw, what.max_tokens)
        num_heard = 0

        def hear(event: TokenEvent) -> None:
            nonlocal num_heard
            num_heard += 1
            if self.lasts[one.request_id] or one.request_id in self.failed:
                self.late.append(name)
            if what.is_slow:
                sum(range(100_000))
            if num_heard == what.cancel_after:
                self.fixture.engine.cancel(one.request_id)
            if what.fails_after is not None and num_heard > what.fails_after:
                self.failed.add(one.request_id)
                self.ends["listener failed"] += 1
                self.open.release()
                raise ConnectionError("the reader has gone")
            if event.finish_reason is not None:
                self.lasts[one.request_id] += 1
                is_late = isinstance(event.error, RequestTimeoutError)
                self.ends["timed out" if is_late else event.finish_reason.value] += 1
                assert event.error is None or is_late
                self.open.release()

        try:
            self.fixture.engine.submit(one, hear)
        except PromptTooLongError:
            self.lasts[one.request_id] += 1
            self.ends["refused"] += 1
            self.open.release()
        else:
            if what.cancel_after == 0:
                self.fixture.engine.cancel(one.request_id)


def soak(fixture: SoakFixture, count: int, seed: int) -> Counter[str]:
    """Run requests, check them while they run and after all have ended; returns how they ended."""
    draw = random.Random(seed)
    clients = [
        SoakClient(fixture, f"{seed}-{at}", count // NUM_THREADS, random.Random(draw.random()))
        for at in range(NUM_THREADS)
    ]
    threads = [threading.Thread(target=client.run, name=f"client {client.name}") for client in clients]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        fixture.ask_engine(lambda engine: engine.check_integrity())
        threads[0].join(0.05)
    for client in clients:
        if client.problem is not None:
            raise client.problem
        assert not client.late
        told = {one for one, times in client.lasts.items() if times == 1}
        assert len(told) == len(client.lasts), "a request got two last events"
        assert not told & client.failed and len(told) + len(client.failed) == client.count
    fixture.check_idle()
    return sum((client.ends for client in clients), Counter())


def memory() -> int:
    gc.collect()
    reset_peak_rss()
    return peak_rss_bytes()


@pytest.fixture
def fixture(decoder: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[SoakFixture]:
    caplog.set_level(logging.CRITICAL, "stillroom.engine.async_engine")  # hundreds of log records of failed listeners
    fixture = SoakFixture(decoder, tmp_path)
    yield fixture
    fixture.engine.close()
    fixture.cache.close()


ENDS = {"length", "aborted", "timed out", "listener failed", "refused"}


def test_soak_of_hundreds_of_requests_leaks_nothing(fixture: SoakFixture) -> None:
    ends = soak(fixture, 400, seed=1)
    assert ends["length"] > 200 and ends["aborted"] and ends["listener failed"], ends
    assert 0 < fixture.watched.most_overtaken <= WINDOW
    fixture.check_empty()


@pytest.mark.slow
def test_soak_of_ten_thousand_requests_leaks_nothing(fixture: SoakFixture) -> None:
    ends = soak(fixture, 2000, seed=2)
    before = memory()
    ends += soak(fixture, 8000, seed=3)
    growth = memory() - before
    assert growth < MAX_GROWTH, f"{growth / 2**20:.1f} MiB more after eight thousand requests"
    assert sum(ends.values()) == 10_000 and set(ends) == ENDS, ends
    assert 0 < fixture.watched.most_overtaken <= WINDOW
    assert fixture.cache.tree is not None
    stats = fixture.cache.tree.stats
    assert all(stats.hits[tier] and stats.evictions[tier] for tier in OWN_TIERS), "every tier was in use"
    fixture.check_empty()
