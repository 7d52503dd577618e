"""Exact reuse with a real model and real files: greedy float32 tokens are those of an engine that reuses nothing.

A soak over tiers so small that all of them evict, offload, store and load, with cancellations, forks, damaged records,
removed documents and a device that loses its memory; and each of RAGCache's promises (section 6) by itself.
"""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stillroom.backends.assembly import KVCache
from stillroom.backends.local import build_engine
from stillroom.config.settings import ReuseConfig, RuntimeConfig
from stillroom.core.batch import Batch, StepResult
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import FinishReason, Request, SamplingParams
from stillroom.core.reuse import PromptReuse, Reason
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent
from stillroom.errors import RequestTimeoutError
from stillroom.kvcache.tree.cost_model import CostProfile, linear_profile
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvstore.files import size_on_disk
from stillroom.models.decoder import Decoder
from stillroom.telemetry import catalogue
from tests.fakes import ManualClock

BLOCK = 8
VOCABULARY = 301
PROFILE = linear_profile(1e-3, 1e-4, 1e-7)
"""Loading costs nothing, so everything that is kept is used."""


class House:
    """One process's engine and cache over a folder of kept KV."""

    def __init__(  # noqa: PLR0913  one parameter per size
        self,
        decoder: Decoder,
        folder: Path | None,
        *,
        blocks: int = 40,
        host_tokens: int = 80,
        disk_records: int = 12,
        timeout: float = 0.0,
        profile: CostProfile = PROFILE,
        **changes: Any,
    ) -> None:
        """
        Args:
            disk_records: room for so many records of 10 tokens.
            changes: to the reuse configuration.
        """
        spec = decoder.spec
        self.bytes_per_token = per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
        config = RuntimeConfig(
            block_size=BLOCK,
            kv_bytes=blocks * BLOCK * per_token,
            max_num_seqs=6,
            max_num_batched_tokens=33,
            request_timeout_s=timeout,
        )
        host_bytes, disk_bytes = host_tokens * per_token, disk_records * size_on_disk(10 * per_token)
        reuse = ReuseConfig(host_bytes=host_bytes, disk_bytes=disk_bytes, tail_blocks=1, **changes)
        self.clock = ManualClock()
        self.engine: Engine
        self.cache: KVCache
        self.engine, self.cache = build_engine(
            decoder, config, self.clock, reuse=reuse, fingerprint=b"m" * 32, profile=profile, kv_folder=folder
        )
        self.num_computed = 0
        self._execute = self.engine.runner.execute
        self.engine.runner.execute = self._counting  # type: ignore[method-assign]
        self.tokens: dict[RequestId, list[int]] = {}
        self.last: dict[RequestId, TokenEvent] = {}
        self.reuse: dict[RequestId, PromptReuse] = {}

    def _counting(self, batch: Batch) -> StepResult:
        self.num_computed += sum(entry.num_scheduled_tokens for entry in batch.sequences)
        return self._execute(batch)

    @property
    def tree(self) -> KnowledgeTree:
        assert self.cache.tree is not None
        return self.cache.tree

    def submit(self, *group: Request) -> None:
        for one in group:
            self.tokens[one.request_id] = []
        self.engine.submit(*group)

    def step(self) -> None:
        self.clock.advance(0.25)
        for event in self.engine.step():
            if event.token_id is not None:
                self.tokens[event.request_id].append(event.token_id)
            if event.reuse is not None:
                self.reuse.setdefault(event.request_id, event.reuse)
            if event.finish_reason is not None:
                self.last[event.request_id] = event
        self.engine.check_integrity()

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    def run(self, one: Request) -> tuple[list[int], PromptReuse]:
        self.submit(one)
        self.finish()
        return self.tokens[one.request_id], self.reuse[one.request_id]


def question(name: str, *documents: int, tail: int = 3, max_tokens: int = 6) -> Request:
    """Document d has tokens of its own and 3 + 5d mod 17 of them."""
    segments = [Segment(SegmentKind.SYSTEM, (3, 4, 5, 6, 7))]
    for document in documents:
        ids = tuple(10 + (document * 31 + i * 7) % 280 for i in range(3 + 5 * document % 17))
        segments.append(Segment(SegmentKind.CHUNK, ids, ChunkId(document)))
    segments.append(Segment(SegmentKind.QUESTION, tuple(20 + i % 5 for i in range(tail))))
    return Request(
        request_id=RequestId(name),
        prompt=SegmentedPrompt(tuple(segments)),
        sampling=SamplingParams(max_tokens=max_tokens),
        stop_token_ids=frozenset({1}),
    )


class Oracle:
    """Each distinct prompt alone, in an engine that reuses nothing."""

    def __init__(self, decoder: Decoder) -> None:
        config = RuntimeConfig(block_size=BLOCK, kv_bytes=2**22, max_num_batched_tokens=512)
        self._engine, _ = build_engine(decoder, config, ManualClock())
        self._known: dict[tuple[int, ...], list[int]] = {}

    def answer(self, request: Request) -> list[int]:
        prompt = request.prompt.token_ids
        if prompt not in self._known:
            longest = replace(request, request_id=RequestId("oracle"), sampling=SamplingParams(max_tokens=8))
            self._engine.submit(longest)
            found = []
            while self._engine.has_work:
                found += [event.token_id for event in self._engine.step() if event.token_id is not None]
            self._known[prompt] = found
        return self._known[prompt][: request.sampling.max_tokens]


def test_files_of_kept_kv_never_take_more_than_their_budget(decoder: Decoder, tmp_path: Path) -> None:
    """Of a record so small, its header is most."""
    house = House(decoder, tmp_path, disk_records=4)
    budget = 4 * size_on_disk(10 * house.bytes_per_token)
    for number in range(8):
        house.run(question(f"q{number}", number % 7, number % 5, max_tokens=1))
        while house.engine.do_idle_work():
            pass
        taken = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.kv"))
        assert 0 < taken <= house.tree.num_bytes(Tier.DISK) <= budget


def soak(decoder: Decoder, folder: Path, num_requests: int, seed: int, **changes: Any) -> House:
    randomness = random.Random(seed)
    house, oracle = House(decoder, folder, **changes), Oracle(decoder)
    alive: dict[RequestId, Request] = {}
    number = 0
    while number < num_requests or house.engine.has_work:
        if number < num_requests and len(alive) < 12 and randomness.random() < 0.6:
            number += 1
            documents = [min(int(randomness.expovariate(0.35)), 14) for _ in range(randomness.randint(0, 4))]
            tail, length = randomness.choice((1, 3, 20)), randomness.randint(1, 8)
            one = question(f"r{number}", *documents, tail=tail, max_tokens=length)
            group = [one]
            if randomness.random() < 0.1:
                group += [replace(one, request_id=RequestId(f"r{number}/{i}")) for i in range(1, 3)]
            alive |= {member.request_id: member for member in group}
            house.submit(*group)
        elif randomness.random() < 0.03 and alive:
            victim = randomness.choice(sorted(alive))
            assert house.engine.cancel(victim) is not None
            del alive[victim]
        elif randomness.random() < 0.05:
            damage(folder, randomness)
        elif randomness.random() < 0.005:
            house.cache.device.lose()
        elif randomness.random() < 0.01:
            gone = ChunkId(randomness.randint(0, 14))
            house.engine.scheduler.forget_chunks(partial(without, gone))
        elif not house.engine.has_work:
            house.engine.do_idle_work()
        house.step()
        for request_id in [request_id for request_id in alive if request_id in house.last]:
            assert house.tokens[request_id] == oracle.answer(alive.pop(request_id)), request_id
    assert not alive
    return house


def without(gone: ChunkId, chunk_ids: set[ChunkId]) -> set[ChunkId]:
    return chunk_ids - {gone}


def damage(folder: Path, randomness: random.Random) -> None:
    """Flip a bit anywhere in a record, or cut it short."""
    records = sorted(folder.rglob("*.kv"))
    if not records:
        return
    path = randomness.choice(records)
    content = bytearray(path.read_bytes())
    if randomness.random() < 0.3:
        content = content[: randomness.randrange(len(content))]
    else:
        content[randomness.randrange(len(content))] ^= 1 << randomness.randrange(8)
    path.write_bytes(content)


def check_soak(house: House) -> None:
    stats = house.tree.stats
    assert all(stats.hits[tier] for tier in Tier), stats.hits
    assert all(stats.evictions[tier] for tier in Tier), stats.evictions
    assert stats.offloads and stats.stores and stats.failed_loads[Tier.DISK]
    assert house.cache.tiers is not None
    moves = house.cache.tiers.stats
    assert sum(moves.verify_failures.values()) > 0
    assert moves.prefetch.used_bytes > 0, "nothing was prefetched"
    house.tree.clear()
    house.engine.check_integrity()
    assert house.cache.manager.pool.num_used == 0, "a block leaked"
    assert house.tree.num_bytes(Tier.HOST) == house.tree.num_bytes(Tier.DISK) == 0


@pytest.mark.parametrize("preload", ["off", "layers"])
def test_a_soak_changes_no_token(decoder: Decoder, tmp_path: Path, preload: str) -> None:
    check_soak(soak(decoder, tmp_path, 300, seed=1, preload=preload))


@pytest.mark.slow
def test_a_long_soak_changes_no_token(decoder: Decoder, tmp_path: Path) -> None:
    check_soak(soak(decoder, tmp_path, 2_000, seed=2))


def test_a_warm_start_answers_from_disk(decoder: Decoder, tmp_path: Path) -> None:
    first = House(decoder, tmp_path)
    tokens, _ = first.run(question("a", 1, 2))
    first.cache.close()

    second = House(decoder, tmp_path)
    again, reuse = second.run(question("b", 1, 2))

    assert again == tokens
    assert [segment.source for segment in reuse.segments] == [Tier.DISK] * 3 + [None]
    assert reuse.num_cached_tokens == 5 + 8 + 13


def test_what_a_waiting_request_needs_is_read_ahead(decoder: Decoder, tmp_path: Path) -> None:
    first = House(decoder, tmp_path)
    tokens, _ = first.run(question("a", 1, 2))
    first.cache.close()

    second = House(decoder, tmp_path)
    second.submit(question("b", 1, 2))
    assert second.cache.tiers is not None and second.cache.tiers._prefetcher is not None
    for entry in second.cache.tiers._prefetcher._entries.values():
        assert entry.future.result(30.0) is not None
    for path in tmp_path.rglob("*.kv"):
        path.unlink()
    second.finish()

    assert second.tokens[RequestId("b")] == tokens
    assert second.reuse[RequestId("b")].num_cached_tokens == 5 + 8 + 13
    prefetched = second.cache.readings()[catalogue.KV_PREFETCHED_BYTES]
    assert prefetched == {"used": 26 * second.bytes_per_token, "wasted": 0}
    assert second.cache.tiers._prefetcher.num_bytes == 0


def test_what_was_read_ahead_for_a_request_that_left_is_wasted(decoder: Decoder, tmp_path: Path) -> None:
    first = House(decoder, tmp_path)
    first.run(question("a", 1))
    first.cache.close()

    second = House(decoder, tmp_path)
    second.submit(question("b", 1))
    assert second.cache.tiers is not None and second.cache.tiers._prefetcher is not None
    for entry in second.cache.tiers._prefetcher._entries.values():
        entry.future.result(30.0)
    assert second.engine.cancel(RequestId("b")) is not None
    assert second.cache.tiers._prefetcher.num_bytes == 0
    assert second.cache.tiers.stats.prefetch.wasted_bytes == 13 * second.bytes_per_token


def test_what_an_idle_moment_stored_survives_a_kill(decoder: Decoder, tmp_path: Path) -> None:
    killed = House(decoder, tmp_path)
    tokens, _ = killed.run(question("a", 1))
    while killed.engine.do_idle_work():
        pass
    assert killed.cache.tiers is not None and killed.cache.tiers.disk is not None
    killed.cache.tiers.disk.close()  # as a kill does: the lock goes, nothing is flushed

    again, reuse = House(decoder, tmp_path).run(question("b", 1))

    assert again == tokens and reuse.num_tokens_from(Tier.DISK) == 5 + 8


def test_a_second_process_reads_and_stores_nothing(decoder: Decoder, tmp_path: Path) -> None:
    first = House(decoder, tmp_path)
    first.run(question("a", 1))
    first.tree.flush()
    files = sorted(tmp_path.rglob("*.kv"))

    second = House(decoder, tmp_path)
    _, reuse = second.run(question("b", 1, 2))
    second.cache.close()

    assert reuse.num_tokens_from(Tier.DISK) == 5 + 8
    assert second.tree.options.is_disk_read_only
    assert sorted(tmp_path.rglob("*.kv")) == files


def test_another_model_finds_nothing(decoder: Decoder, tmp_path: Path) -> None:
    house = House(decoder, tmp_path)
    house.run(question("a", 1))
    house.cache.close()
    config = RuntimeConfig(block_size=BLOCK, kv_bytes=2**20)
    _, cache = build_engine(
        decoder, config, ManualClock(), reuse=ReuseConfig(), fingerprint=b"x" * 32, profile=PROFILE, kv_folder=tmp_path
    )
    assert cache.tree is not None and len(cache.tree) == 0


def test_tenants_share_nothing(decoder: Decoder) -> None:
    house = House(decoder, None)
    house.run(replace(question("a", 1), cache_salt="one"))
    _, other = house.run(replace(question("b", 1), cache_salt="two"))
    _, same = house.run(replace(question("c", 1), cache_salt="one"))
    assert other.num_cached_tokens == 0 and same.num_cached_tokens == 5 + 8


def test_a_lost_device_costs_time_and_no_token(decoder: Decoder) -> None:
    """One request is in its prompt, one in its answer."""
    oracle = Oracle(decoder)
    house = House(decoder, None, host_tokens=100)
    early, late = question("early", 1, 2, max_tokens=8), question("late", 3, 4, 5, max_tokens=8)
    house.submit(early)
    while len(house.tokens[early.request_id]) < 3:
        house.step()
    house.submit(late)
    house.step()
    house.cache.device.lose()
    house.finish()
    for one in (early, late):
        assert house.tokens[one.request_id] == oracle.answer(one)
    assert house.tree.stats.loads[Tier.HOST], "the system prompt came from its replica"


def test_a_preempted_request_resumes_from_kept_kv(decoder: Decoder) -> None:
    """Two answers grow until the pool is empty; the younger one waits, and computes only its end again."""
    oracle = Oracle(decoder)
    house = House(decoder, None, blocks=9)
    two = [question(name, document, max_tokens=8) for name, document in (("a", 1), ("b", 2))]
    for one in two:
        house.submit(one)
    house.finish()
    assert [house.tokens[one.request_id] for one in two] == [oracle.answer(one) for one in two]

    one = question("c", 1, max_tokens=8)
    house.submit(one)
    while not house.tokens[one.request_id]:
        house.step()
    num_generated, num_computed = len(house.tokens[one.request_id]), house.num_computed
    before = house.tree.stats.hit_tokens.copy()
    assert house.engine.scheduler.restart(one.request_id)
    house.step()
    assert house.num_computed - num_computed == 3 + num_generated, "the question and the answer so far"
    house.finish()
    assert house.tokens[one.request_id] == oracle.answer(one)
    assert house.tree.stats.hit_tokens == before, "a resumed request is no new demand"


def test_a_request_that_takes_too_long_is_started_again_once_and_then_given_up(decoder: Decoder) -> None:
    house = House(decoder, None, timeout=10.0)
    quick, slow = question("quick", 1, max_tokens=8), question("slow", 2, max_tokens=8)
    house.submit(quick)
    house.step()
    house.clock.advance(11.0)
    house.finish()
    assert house.last[quick.request_id].error is None
    assert house.tokens[quick.request_id] == Oracle(decoder).answer(quick)

    house.submit(slow)
    for _ in range(2):
        house.step()
        house.clock.advance(11.0)
    house.step()
    last = house.last[slow.request_id]
    assert last.finish_reason is FinishReason.ABORTED and isinstance(last.error, RequestTimeoutError)
    assert "runtime.request_timeout_s" in str(last.error)
    assert house.cache.manager.num_free_blocks == 40


def test_why_is_said_segment_by_segment(decoder: Decoder) -> None:
    house = House(decoder, None)
    house.run(question("a", 1, 2))
    _, reuse = house.run(question("b", 2, 1, tail=9))
    assert [segment.reason for segment in reuse.segments] == [
        Reason.HIT,
        Reason.ORDER_DIFFERS,
        Reason.ORDER_DIFFERS,
        Reason.NEVER_SEEN,
        Reason.TAIL,
    ]
