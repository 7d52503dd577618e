"""Paths of the knowledge tree that are deeper than Python's stack."""

import sys

import pytest

from stillroom.core.kv import Tier
from stillroom.kvcache.blocks.block_pool import BlockPool
from tests.kvcache.tree_fixture import SIZE, TreeFixture

DEPTH = sys.getrecursionlimit() + 100
NUM_TOKENS = DEPTH * SIZE


def deep(*, host_bytes: int = 0, disk_bytes: int = 0) -> TreeFixture:
    """Return a fixture that has served one prompt of many pieces."""
    fixture = TreeFixture(DEPTH + 10, host_bytes=host_bytes, disk_bytes=disk_bytes)
    fixture.serve(question=NUM_TOKENS - SIZE + 1)
    assert len(fixture.tree) == DEPTH
    return fixture


@pytest.mark.parametrize("host_bytes", [0, SIZE, NUM_TOKENS // 2])
def test_a_deep_path_is_evicted_to_host_and_disk(host_bytes: int) -> None:
    fixture = deep(host_bytes=host_bytes, disk_bytes=NUM_TOKENS)
    assert fixture.tree.make_room(DEPTH + 10)
    fixture.check()
    assert fixture.tree.num_nodes(Tier.HOST) == host_bytes // SIZE
    assert sum(node.tier is Tier.DISK for node in fixture.tree) == DEPTH - host_bytes // SIZE


def test_a_deep_path_is_dropped_when_its_first_record_is_damaged() -> None:
    fixture = deep(disk_bytes=NUM_TOKENS)
    fixture.tree.flush()
    fixture.pool = BlockPool(DEPTH + 10, SIZE)
    fixture.open()
    fixture.tree.restore(fixture.memory.records.values())
    fixture.memory.damaged = {fixture.lease().pieces[0].key}
    again = fixture.serve(question=NUM_TOKENS - SIZE + 1)
    assert again.reuse is not None and again.reuse.num_cached_tokens == 0
    assert fixture.tree.stats.lost == DEPTH


def test_a_deep_path_is_on_disk_only_after_a_device_loss() -> None:
    fixture = deep(disk_bytes=NUM_TOKENS)
    fixture.tree.flush()
    fixture.manager.lose_device()
    fixture.check()
    assert {node.tier for node in fixture.tree} == {Tier.DISK}
