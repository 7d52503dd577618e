"""Reuse at any position in long random traffic: inexact KV is never used as exact, and preloading changes nothing.

In a soak that changes between modes, every request whose report names no placed document answers as without reuse.
"""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from stillroom.config.settings import TokenSelector
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import OWN_TIERS, Tier
from stillroom.core.request import Request
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.models.decoder import Decoder
from tests.engine.engine_fixture import EngineFixture, Oracle, anywhere_fixture, damage, question, without


def disturb(fixture: EngineFixture, folder: Path, randomness: random.Random) -> None:
    if randomness.random() < 0.02:
        damage(folder, randomness)
    elif randomness.random() < 0.005:
        fixture.cache.device.lose()
    elif randomness.random() < 0.01:
        fixture.engine.scheduler.forget_chunks(partial(without, ChunkId(randomness.randint(0, 14))))
    elif not fixture.engine.has_work:
        fixture.engine.do_idle_work()


def soak(decoder: Decoder, oracle: Oracle, folder: Path, num_requests: int, seed: int) -> EngineFixture:
    """Run a soak in which modes, ratios and selectors change at any time, also while requests run."""
    randomness, fixture = random.Random(seed), anywhere_fixture(decoder, folder, blocks=45)
    alive: dict[RequestId, Request] = {}
    number = num_exact = 0
    while number < num_requests or fixture.engine.has_work:
        if randomness.random() < 0.15:
            options = AnywhereOptions(
                randomness.choice((0.0, 0.1, 0.5, 1.0)),
                randomness.choice(get_args(TokenSelector)),
                randomness.choice((None, 0.5)),
                randomness.choice((0, 1)),
            )
            fixture.cache.manager.allow_anywhere(None if randomness.random() < 0.4 else options)
        if number < num_requests and len(alive) < 12 and randomness.random() < 0.6:
            number += 1
            documents = [min(int(randomness.expovariate(0.35)), 14) for _ in range(randomness.randint(0, 4))]
            one = question(
                f"r{number}", *documents, tail=randomness.choice((1, 3, 20)), max_tokens=randomness.randint(1, 8)
            )
            group = [one]
            if randomness.random() < 0.1:
                group += [replace(one, request_id=RequestId(f"r{number}/{i}")) for i in range(1, 3)]
            alive |= {member.request_id: member for member in group}
            fixture.submit(*group)
        elif randomness.random() < 0.03 and alive:
            victim = randomness.choice(sorted(alive))
            assert fixture.engine.cancel(victim) is not None
            del alive[victim]
        else:
            disturb(fixture, folder, randomness)
        fixture.step()
        for request_id in [request_id for request_id in alive if request_id in fixture.last]:
            one = alive.pop(request_id)
            if request_id in fixture.reuse and not fixture.reuse[request_id].has_placed:
                num_exact += 1
                assert fixture.tokens[request_id] == oracle.answer(one), request_id
    assert not alive and num_exact > num_requests / 5
    return fixture


@pytest.mark.parametrize(("num_requests", "seed"), [(120, 1), pytest.param(2_000, 2, marks=pytest.mark.slow)])
def test_soak_through_all_modes(decoder: Decoder, oracle: Oracle, tmp_path: Path, num_requests: int, seed: int) -> None:
    fixture = soak(decoder, oracle, tmp_path, num_requests, seed)
    stats = fixture.tree.stats
    assert stats.placed[Tier.DEVICE] and stats.placed[Tier.HOST] and stats.hits[Tier.DEVICE], stats
    fixture.tree.clear()
    fixture.engine.check_integrity()
    assert fixture.cache.manager.pool.num_used == 0, "a block leaked"


def test_layer_preloading_changes_no_result(decoder: Decoder, tmp_path: Path) -> None:
    """The same traffic through two engines with tiny tiers: placements, loads, evictions, preemptions and aborts."""
    fixtures = [
        anywhere_fixture(decoder, tmp_path / name, blocks=30, host_tokens=40, prefetch_bytes=num_bytes, preload=preload)
        for name, num_bytes, preload in (("at once", 0, "off"), ("ahead", 2**14, "layers"))
    ]
    randomness, num_requests = random.Random(4), 60
    alive: set[RequestId] = set()
    number = 0
    while number < num_requests or alive:
        if number < num_requests and len(alive) < 6 and randomness.random() < 0.6:
            number += 1
            documents = [min(int(randomness.expovariate(0.35)), 9) for _ in range(randomness.randint(1, 4))]
            one = question(f"r{number}", *documents, max_tokens=randomness.randint(1, 8))
            alive.add(one.request_id)
            for fixture in fixtures:
                fixture.submit(one)
        elif alive and randomness.random() < 0.03:
            victim = randomness.choice(sorted(alive))
            alive.remove(victim)
            assert all(fixture.engine.cancel(victim) is not None for fixture in fixtures)
        elif alive and randomness.random() < 0.02:
            victim = randomness.choice(sorted(alive))
            assert len({fixture.engine.scheduler.restart(victim) for fixture in fixtures}) == 1
        for fixture in fixtures:
            fixture.step()
        at_once, ahead = fixtures
        assert at_once.tokens == ahead.tokens and at_once.reuse == ahead.reuse
        alive -= set(ahead.last)
    assert all(ahead.tree.stats.placed[tier] for tier in OWN_TIERS) and ahead.tree.stats.loads, ahead.tree.stats
    assert ahead.cache.tiers is not None and ahead.cache.tiers._prefetcher is not None
    assert ahead.cache.tiers.stats.prefetch.used_bytes > 0 and ahead.cache.tiers._prefetcher.num_bytes == 0
    for fixture in fixtures:
        fixture.cache.close()
