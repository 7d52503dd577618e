"""Exact reuse with a real model and real files: greedy float32 tokens equal those of an engine without reuse.

A soak over tiers so small that all of them evict, offload, store and load, with cancellations, forks, damaged records,
removed documents and lost devices; and a test of each of RAGCache's promises (section 6).
"""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stillroom.backends.engine_building import build_engine
from stillroom.config.settings import ReuseConfig, RuntimeConfig
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import OWN_TIERS, Tier
from stillroom.core.request import FinishReason, Request
from stillroom.core.reuse import Reason
from stillroom.errors import RequestTimeoutError
from stillroom.kvstore.files import size_on_disk
from stillroom.models.decoder import Decoder
from stillroom.telemetry import catalogue
from tests.engine.engine_fixture import BLOCK, PROFILE, EngineFixture, Oracle, damage, question, without
from tests.fakes import ManualClock


def test_files_of_kept_kv_never_exceed_their_budget(decoder: Decoder, tmp_path: Path) -> None:
    """Most of such a small record is its header."""
    fixture = EngineFixture(decoder, tmp_path, disk_records=4)
    budget = 4 * size_on_disk(10 * fixture.bytes_per_token)
    for number in range(8):
        fixture.run(question(f"q{number}", number % 7, number % 5, max_tokens=1))
        while fixture.engine.do_idle_work():
            pass
        taken = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.kv"))
        assert 0 < taken <= fixture.tree.num_bytes(Tier.DISK) <= budget


def soak(decoder: Decoder, folder: Path, num_requests: int, seed: int, **changes: Any) -> EngineFixture:
    randomness = random.Random(seed)
    fixture, oracle = EngineFixture(decoder, folder, **changes), Oracle(decoder)
    alive: dict[RequestId, Request] = {}
    number = 0
    while number < num_requests or fixture.engine.has_work:
        if number < num_requests and len(alive) < 12 and randomness.random() < 0.6:
            number += 1
            documents = [min(int(randomness.expovariate(0.35)), 14) for _ in range(randomness.randint(0, 4))]
            tail, length = randomness.choice((1, 3, 20)), randomness.randint(1, 8)
            one = question(f"r{number}", *documents, tail=tail, max_tokens=length)
            group = [one]
            if randomness.random() < 0.1:
                group += [replace(one, request_id=RequestId(f"r{number}/{i}")) for i in range(1, 3)]
            alive |= {member.request_id: member for member in group}
            fixture.submit(*group)
        elif randomness.random() < 0.03 and alive:
            victim = randomness.choice(sorted(alive))
            assert fixture.engine.cancel(victim) is not None
            del alive[victim]
        elif randomness.random() < 0.05:
            damage(folder, randomness)
        elif randomness.random() < 0.005:
            fixture.cache.device.lose()
        elif randomness.random() < 0.01:
            gone = ChunkId(randomness.randint(0, 14))
            fixture.engine.scheduler.forget_chunks(partial(without, gone))
        elif not fixture.engine.has_work:
            fixture.engine.do_idle_work()
        fixture.step()
        for request_id in [request_id for request_id in alive if request_id in fixture.last]:
            assert fixture.tokens[request_id] == oracle.answer(alive.pop(request_id)), request_id
    assert not alive
    return fixture


def check_soak(fixture: EngineFixture) -> None:
    stats = fixture.tree.stats
    assert all(stats.hits[tier] for tier in OWN_TIERS), stats.hits
    assert all(stats.evictions[tier] for tier in OWN_TIERS), stats.evictions
    assert stats.offloads and stats.stores and stats.failed_loads[Tier.DISK]
    assert fixture.cache.tiers is not None
    moves = fixture.cache.tiers.stats
    assert sum(moves.verify_failures.values()) > 0
    assert moves.prefetch.used_bytes > 0, "nothing was prefetched"
    fixture.tree.clear()
    fixture.engine.check_integrity()
    assert fixture.cache.manager.pool.num_used == 0, "a block leaked"
    assert fixture.tree.num_bytes(Tier.HOST) == fixture.tree.num_bytes(Tier.DISK) == 0


@pytest.mark.parametrize("preload", [pytest.param("off", marks=pytest.mark.slow), "layers"])
def test_soak_changes_no_token(decoder: Decoder, tmp_path: Path, preload: str) -> None:
    check_soak(soak(decoder, tmp_path, 300, seed=1, preload=preload))


@pytest.mark.slow
def test_long_soak_changes_no_token(decoder: Decoder, tmp_path: Path) -> None:
    check_soak(soak(decoder, tmp_path, 2_000, seed=2))


def test_warm_start_answers_from_disk(decoder: Decoder, tmp_path: Path) -> None:
    first = EngineFixture(decoder, tmp_path)
    tokens, _ = first.run(question("a", 1, 2))
    first.cache.close()

    second = EngineFixture(decoder, tmp_path)
    again, reuse = second.run(question("b", 1, 2))

    assert again == tokens
    assert [segment.source for segment in reuse.segments] == [Tier.DISK] * 3 + [None]
    assert reuse.num_cached_tokens == 5 + 8 + 13


def test_nodes_of_a_waiting_request_are_prefetched(decoder: Decoder, tmp_path: Path) -> None:
    first = EngineFixture(decoder, tmp_path)
    tokens, _ = first.run(question("a", 1, 2))
    first.cache.close()

    second = EngineFixture(decoder, tmp_path)
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


def test_prefetch_for_a_cancelled_request_counts_as_wasted(decoder: Decoder, tmp_path: Path) -> None:
    first = EngineFixture(decoder, tmp_path)
    first.run(question("a", 1))
    first.cache.close()

    second = EngineFixture(decoder, tmp_path)
    second.submit(question("b", 1))
    assert second.cache.tiers is not None and second.cache.tiers._prefetcher is not None
    for entry in second.cache.tiers._prefetcher._entries.values():
        entry.future.result(30.0)
    assert second.engine.cancel(RequestId("b")) is not None
    assert second.cache.tiers._prefetcher.num_bytes == 0
    assert second.cache.tiers.stats.prefetch.wasted_bytes == 13 * second.bytes_per_token


def test_kv_stored_while_idle_survives_a_kill(decoder: Decoder, tmp_path: Path) -> None:
    killed = EngineFixture(decoder, tmp_path)
    tokens, _ = killed.run(question("a", 1))
    while killed.engine.do_idle_work():
        pass
    assert killed.cache.tiers is not None and killed.cache.tiers.disk is not None
    killed.cache.tiers.disk.close()  # as a kill does: the lock is released, nothing is flushed

    again, reuse = EngineFixture(decoder, tmp_path).run(question("b", 1))

    assert again == tokens and reuse.num_tokens_from(Tier.DISK) == 5 + 8


def test_second_process_reads_and_stores_nothing(decoder: Decoder, tmp_path: Path) -> None:
    first = EngineFixture(decoder, tmp_path)
    first.run(question("a", 1))
    first.tree.flush()
    files = sorted(tmp_path.rglob("*.kv"))

    second = EngineFixture(decoder, tmp_path)
    _, reuse = second.run(question("b", 1, 2))
    second.cache.close()

    assert reuse.num_tokens_from(Tier.DISK) == 5 + 8
    assert second.tree.options.is_disk_read_only
    assert sorted(tmp_path.rglob("*.kv")) == files


def test_another_model_finds_no_kept_kv(decoder: Decoder, tmp_path: Path) -> None:
    fixture = EngineFixture(decoder, tmp_path)
    fixture.run(question("a", 1))
    fixture.cache.close()
    config = RuntimeConfig(block_size=BLOCK, kv_bytes=2**20)
    _, cache = build_engine(
        decoder, config, ManualClock(), reuse=ReuseConfig(), fingerprint=b"x" * 32, profile=PROFILE, kv_folder=tmp_path
    )
    assert cache.tree is not None and len(cache.tree) == 0


def test_tenants_share_no_kv(decoder: Decoder) -> None:
    fixture = EngineFixture(decoder, None)
    fixture.run(replace(question("a", 1), cache_salt="one"))
    _, other = fixture.run(replace(question("b", 1), cache_salt="two"))
    _, same = fixture.run(replace(question("c", 1), cache_salt="one"))
    assert other.num_cached_tokens == 0 and same.num_cached_tokens == 5 + 8


def test_lost_device_changes_no_token(decoder: Decoder) -> None:
    """One request is in its prompt, the other in its answer."""
    oracle = Oracle(decoder)
    fixture = EngineFixture(decoder, None, host_tokens=100)
    early, late = question("early", 1, 2, max_tokens=8), question("late", 3, 4, 5, max_tokens=8)
    fixture.submit(early)
    while len(fixture.tokens[early.request_id]) < 3:
        fixture.step()
    fixture.submit(late)
    fixture.step()
    fixture.cache.device.lose()
    fixture.finish()
    for one in (early, late):
        assert fixture.tokens[one.request_id] == oracle.answer(one)
    assert fixture.tree.stats.loads[Tier.HOST], "the system prompt was loaded from its replica"


def test_preempted_request_resumes_from_kept_kv(decoder: Decoder) -> None:
    """Two answers grow until the pool is empty; the younger one waits, and computes only its end again."""
    oracle = Oracle(decoder)
    fixture = EngineFixture(decoder, None, blocks=9)
    two = [question(name, document, max_tokens=8) for name, document in (("a", 1), ("b", 2))]
    for one in two:
        fixture.submit(one)
    fixture.finish()
    assert [fixture.tokens[one.request_id] for one in two] == [oracle.answer(one) for one in two]

    one = question("c", 1, max_tokens=8)
    fixture.submit(one)
    while not fixture.tokens[one.request_id]:
        fixture.step()
    num_generated, num_computed = len(fixture.tokens[one.request_id]), fixture.num_computed
    before = fixture.tree.stats.hit_tokens.copy()
    assert fixture.engine.scheduler.restart(one.request_id)
    fixture.step()
    assert fixture.num_computed - num_computed == 3 + num_generated, "the question and the answer so far"
    fixture.finish()
    assert fixture.tokens[one.request_id] == oracle.answer(one)
    assert fixture.tree.stats.hit_tokens == before, "a resumed request counts as no new use"


def test_request_over_the_time_limit_restarts_once_and_then_ends(decoder: Decoder) -> None:
    fixture = EngineFixture(decoder, None, timeout=10.0)
    quick, slow = question("quick", 1, max_tokens=8), question("slow", 2, max_tokens=8)
    fixture.submit(quick)
    fixture.step()
    fixture.clock.advance(11.0)
    fixture.finish()
    assert fixture.last[quick.request_id].error is None
    assert fixture.tokens[quick.request_id] == Oracle(decoder).answer(quick)

    fixture.submit(slow)
    for _ in range(2):
        fixture.step()
        fixture.clock.advance(11.0)
    fixture.step()
    last = fixture.last[slow.request_id]
    assert last.finish_reason is FinishReason.ABORTED and isinstance(last.error, RequestTimeoutError)
    assert "runtime.request_timeout_s" in str(last.error)
    assert fixture.cache.manager.num_free_blocks == 40


def test_report_gives_a_reason_for_each_segment(decoder: Decoder) -> None:
    fixture = EngineFixture(decoder, None)
    fixture.run(question("a", 1, 2))
    _, reuse = fixture.run(question("b", 2, 1, tail=9))
    assert [segment.reason for segment in reuse.segments] == [
        Reason.HIT,
        Reason.ORDER_DIFFERS,
        Reason.ORDER_DIFFERS,
        Reason.NEVER_SEEN,
        Reason.TAIL,
    ]
