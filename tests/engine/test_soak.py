"""Thousands of requests from several threads through the engine's thread, with a small pool, a host and a disk: some
are cancelled, some take too long, some listeners are slow or fail. Afterwards everybody was told his end, nobody was
overtaken without end, and every block and byte is back."""

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
import torch

from stillroom.backends.local import build_engine
from stillroom.config.settings import ReuseConfig, RuntimeConfig
from stillroom.core.batch import Batch, StepResult
from stillroom.core.clock import VirtualClock
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent
from stillroom.errors import PromptTooLongError, RequestTimeoutError
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.kvstore.files import size_on_disk
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_decoder
from stillroom.runner.torch_runner import Runner
from stillroom_bench.instrument.harness import peak_rss_bytes, reset_peak_rss
from tests.fakes import ManualClock, random_checkpoint

BLOCK, NUM_BLOCKS, HOST_TOKENS, DISK_RECORDS = 8, 48, 100, 15
WINDOW = 8
STEP_SECONDS, TIMEOUT = 0.01, 0.6
"""On the engine's clock: sixty steps, then once more."""
NUM_THREADS, NUM_OPEN = 4, 6
"""Who ask, and how many of each one's requests are under way."""
LONG = 180
"""Tokens of an answer that takes too long."""
MAX_GROWTH = 12 * 2**20
"""Python's table of interned strings, which the names of files go through, grows by 7 MiB at once now and then."""
PATIENCE = 120.0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The model is tiny: two threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("checkpoint")
    random_checkpoint(path, "Llama", num_hidden_layers=1)
    return load_decoder(path, device="cpu", dtype="float32")


class TickingRunner:
    """Each step takes as long on the engine's clock, and admissions are seen in it."""

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
    """Counts for each request that waits how many later ones went first."""

    def __init__(self, inner: Engine, clock: VirtualClock) -> None:
        super().__init__(inner.scheduler, TickingRunner(inner.runner, clock, self._seen), clock, TIMEOUT)
        self.overtaken: dict[RequestId, int] = {}
        """Of those that have not run yet, in the order in which they came."""
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


class House:
    """An engine in its thread, over tiers that hold little."""

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
        profile = linear_profile(1e-3, 1e-4, 1e-7)  # loading costs nothing, so what is kept is used
        inner, self.cache = build_engine(
            decoder, runtime, clock, reuse=reuse, fingerprint=b"m" * 32, profile=profile, kv_folder=folder
        )
        self.watched = WatchedEngine(inner, clock)
        self.engine = AsyncEngine(self.watched)

    def ask_engine(self, command: Callable[[Engine], object]) -> None:
        """Done in the engine's thread before this returns; what it raises is raised here."""
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
        """Nothing is left of anybody, and what is kept is within its limits."""

        def check(engine: Engine) -> None:
            engine.check_integrity()
            assert not engine.has_work and not self.watched.overtaken
            assert engine._deadlines.next_at == math.inf and not self.engine._listeners

        self.ask_engine(check)
        assert self.engine.num_free_blocks == self.engine.num_blocks == NUM_BLOCKS
        self._check_bytes()

    def check_empty(self) -> None:
        """Every block and byte is back once nothing is kept."""
        tree = self.cache.tree
        assert tree is not None
        self.ask_engine(lambda _: tree.clear())
        assert self.watched.scheduler.kv.pool.num_free == NUM_BLOCKS
        assert [tree.num_bytes(tier) for tier in Tier] == [0, 0, 0]
        self._check_bytes()

    def _check_bytes(self) -> None:
        tree, tiers = self.cache.tree, self.cache.tiers
        assert tree is not None and tiers is not None and tiers.disk is not None
        assert tiers.host.num_bytes == tree.num_bytes(Tier.HOST) <= HOST_TOKENS * self.bytes_per_token
        assert tree.num_bytes(Tier.DISK) <= self.disk_bytes
        assert len(tiers.disk.records()) == tree.num_nodes(Tier.DISK)


@dataclass
class Fate:
    """What is to happen to a request."""

    max_tokens: int
    cancel_after: int | None = None
    """Tokens; 0: at once."""
    fails_after: int | None = None
    """Its listener, at this event; 0: the first one."""
    is_slow: bool = False


def fate(draw: random.Random) -> Fate:
    kind, length = draw.random(), draw.randint(1, 8)
    if kind < 0.12:
        return Fate(length, cancel_after=draw.randint(0, length))
    if kind < 0.17:
        return Fate(length, fails_after=draw.randint(0, length - 1))
    if kind < 0.18:
        return Fate(LONG)
    return Fate(length, is_slow=kind < 0.20)


def question(name: str, draw: random.Random, max_tokens: int) -> Request:
    """Popular documents far more often; now and then for somebody else, or urgent, or far too long."""
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
class Asker:
    """Somebody who has a few requests under way at any time."""

    house: House
    name: str
    count: int
    draw: random.Random
    lasts: Counter[RequestId] = field(default_factory=Counter)
    """Last events of each request."""
    ends: Counter[str] = field(default_factory=Counter)
    failed: set[RequestId] = field(default_factory=set)
    """Whose listeners failed; they hear nothing afterwards."""
    late: list[str] = field(default_factory=list)
    """Who heard something after the end."""
    problem: BaseException | None = None

    def __post_init__(self) -> None:
        self.open = threading.Semaphore(NUM_OPEN)

    def run(self) -> None:
        try:
            for number in range(self.count):
                assert self.open.acquire(timeout=PATIENCE), "nobody ends"
                self._ask(f"{self.name}-{number}")
            for _ in range(NUM_OPEN):
                assert self.open.acquire(timeout=PATIENCE), "somebody does not end"
        except BaseException as error:
            self.problem = error

    def _ask(self, name: str) -> None:
        what = fate(self.draw)
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
                self.house.engine.cancel(one.request_id)
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
            self.house.engine.submit(one, hear)
        except PromptTooLongError:
            self.lasts[one.request_id] += 1
            self.ends["refused"] += 1
            self.open.release()
        else:
            if what.cancel_after == 0:
                self.house.engine.cancel(one.request_id)


def soak(house: House, count: int, seed: int) -> Counter[str]:
    """So many requests, checked while they run and when all have ended; how they ended."""
    draw = random.Random(seed)
    askers = [
        Asker(house, f"{seed}-{at}", count // NUM_THREADS, random.Random(draw.random())) for at in range(NUM_THREADS)
    ]
    threads = [threading.Thread(target=asker.run, name=f"asker {asker.name}") for asker in askers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        house.ask_engine(lambda engine: engine.check_integrity())
        threads[0].join(0.05)
    for asker in askers:
        if asker.problem is not None:
            raise asker.problem
        assert not asker.late
        told = {one for one, times in asker.lasts.items() if times == 1}
        assert len(told) == len(asker.lasts), "somebody was told his end twice"
        assert not told & asker.failed and len(told) + len(asker.failed) == asker.count
    house.check_idle()
    return sum((asker.ends for asker in askers), Counter())


def memory() -> int:
    gc.collect()
    reset_peak_rss()
    return peak_rss_bytes()


@pytest.fixture
def house(decoder: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[House]:
    caplog.set_level(logging.CRITICAL, "stillroom.engine.async_engine")  # hundreds of failed listeners, kept as records
    house = House(decoder, tmp_path)
    yield house
    house.engine.close()
    house.cache.close()


ENDS = {"length", "aborted", "timed out", "listener failed", "refused"}


def test_hundreds_of_requests_leave_nothing_behind(house: House) -> None:
    ends = soak(house, 400, seed=1)
    assert ends["length"] > 200 and ends["aborted"] and ends["listener failed"], ends
    assert 0 < house.watched.most_overtaken <= WINDOW
    house.check_empty()


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind(house: House) -> None:
    ends = soak(house, 2000, seed=2)
    before = memory()
    ends += soak(house, 8000, seed=3)
    growth = memory() - before
    assert growth < MAX_GROWTH, f"{growth / 2**20:.1f} MiB more after eight thousand requests"
    assert sum(ends.values()) == 10_000 and set(ends) == ENDS, ends
    assert 0 < house.watched.most_overtaken <= WINDOW
    assert house.cache.tree is not None
    stats = house.cache.tree.stats
    assert all(stats.hits[tier] and stats.evictions[tier] for tier in Tier), "every tier was in use"
    house.check_empty()
