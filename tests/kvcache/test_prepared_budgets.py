"""What prepared KV counts as: uses, budgets, evictions, and what a restart finds."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.core.kv import OWN_TIERS, Tier
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from tests.examples import most_examples
from tests.kvcache.prepared_fixture import ANYWHERE, LENGTH_OF_QUESTION, PREPARED, SIZE, PreparedFixture, prefixes

# Counting


@pytest.mark.parametrize("anywhere", [PREPARED, ANYWHERE, None])
def test_preparing_counts_no_use_and_no_hit_or_miss(anywhere: AnywhereOptions | None) -> None:
    fixture = PreparedFixture(anywhere)
    fixture.prepare((1, 2), num_tokens=2 * SIZE)
    fixture.prepare((1, 2))
    stats = fixture.tree.stats
    assert (stats.hits.total(), stats.misses, stats.prepared) == (0, 0, 2)
    assert len(fixture.tree) == 3
    chunks = [node for node in fixture.tree if node.chunk_id is not None]
    assert all(node.frequency.value(0.0) == 0.0 and not node.is_used for node in chunks)


def test_each_placement_counts_one_use() -> None:
    prepared = PreparedFixture()
    prepared.prepare((1, 2, 3))
    copy, other = prepared.copy(1, 2), prepared.copy(1, 2, 3)
    for num_uses in (1, 2, 3):
        prepared.ask((2,), (1, 2, 3))
        assert copy.frequency.value(0.0) == num_uses and copy.is_used and not other.is_used
    stats = prepared.tree.stats
    assert stats.prepared_tokens == stats.placed_tokens == 3 * SIZE and stats.misses == 0
    assert stats.hits == {Tier.DEVICE: 3}, "the system message"
    assert stats.placed == {Tier.DEVICE: 3} and stats.recomputed_tokens == 0


def test_a_question_that_begins_with_prepared_chunks_counts_a_use_of_each() -> None:
    fixture = PreparedFixture(None)
    fixture.prepare((1, 2))
    assert fixture.ask((1, 3)).num_exact == 1
    root, first, second = fixture.exact(), fixture.exact(1), fixture.exact(1, 2)
    assert root is not None and first is not None and second is not None
    assert [node.frequency.value(0.0) for node in (root, first, second)] == [2, 1, 0]
    assert root.is_used and first.is_used and not second.is_used


# Budgets


def test_unused_copies_stop_at_the_budget_of_the_disk() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 100, "unused_disk_bytes": 3 * SIZE + 1})
    assert fixture.tree.unused_room() == 3 * SIZE + 1
    fixture.prepare((1, 2, 3, 4))
    rooms = []
    while fixture.manager.store_next():
        fixture.check()
        rooms.append(fixture.tree.unused_room())
    assert rooms == [3 * SIZE + 1, 2 * SIZE + 1, SIZE + 1, 1], "the system message counts as used"
    assert fixture.tree.num_unused_bytes(Tier.DISK) == 3 * SIZE
    fixture.tree.flush()
    assert fixture.tree.num_bytes(Tier.DISK) == 4 * SIZE
    fixture.ask((9,))
    while fixture.manager.store_next():
        fixture.check()
    assert fixture.tree.num_bytes(Tier.DISK) == 5 * SIZE, "the chunk of a question is still stored"


def test_unused_copies_stop_at_the_budget_of_the_host() -> None:
    fixture = PreparedFixture(options={"host_bytes": 100, "unused_host_bytes": 3 * SIZE})
    fixture.prepare((1, 2, 3, 4))
    assert fixture.tree.make_room(fixture.num_blocks)
    fixture.check()
    assert fixture.tree.num_unused_bytes(Tier.HOST) == 3 * SIZE and len(fixture.tree) == 4
    assert fixture.tree.unused_room() == 0


def test_unused_room_is_that_of_the_disk_where_there_is_one() -> None:
    budgets = {"host_bytes": 8 * SIZE, "unused_host_bytes": 3 * SIZE, "disk_bytes": 9, "unused_disk_bytes": 5 * SIZE}
    assert PreparedFixture(options=budgets).tree.unused_room() == 9
    assert PreparedFixture(options=budgets | {"disk_bytes": 0}).tree.unused_room() == 3 * SIZE


def test_used_nodes_reduce_the_room_of_unused_copies_where_little_is_free() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 4 * SIZE, "unused_disk_bytes": 3 * SIZE})
    fixture.ask((8,))
    fixture.tree.flush()
    assert fixture.tree.unused_room() == 2 * SIZE
    fixture.ask((8, 9))
    fixture.tree.flush()
    assert fixture.tree.unused_room() == SIZE


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("anywhere", [PREPARED, None])
def test_unused_copies_displace_no_used_node(tier: Tier, anywhere: AnywhereOptions | None) -> None:
    name = tier.label
    fixture = PreparedFixture(anywhere, options={f"{name}_bytes": 3 * SIZE, f"unused_{name}_bytes": 100})
    fixture.ask((8, 9))
    assert fixture.tree.make_room(fixture.num_blocks)
    used = fixture.used(tier)
    assert len(used) == 3
    fixture.prepare((1, 2))
    assert fixture.tree.make_room(fixture.num_blocks)
    fixture.tree.flush()
    fixture.check()
    assert fixture.used(tier) == used and len(fixture.tree) == 3


@pytest.mark.parametrize("anywhere", [PREPARED, None])
def test_the_device_evicts_unused_copies_before_any_used_node(anywhere: AnywhereOptions | None) -> None:
    fixture = PreparedFixture(anywhere, num_blocks=12)
    fixture.ask((8,))
    fixture.prepare((1, 2, 3))
    fixture.ask((9,))
    used = fixture.used(Tier.DEVICE)
    assert fixture.tree.make_room(12 - len(used))
    fixture.check()
    assert {node.key for node in fixture.tree} == used, "the unused copies are gone although they are newer than 8"


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_full_tier_evicts_unused_copies_before_any_used_node(tier: Tier) -> None:
    name = tier.label
    fixture = PreparedFixture(options={f"{name}_bytes": 5 * SIZE, f"unused_{name}_bytes": 100})
    fixture.ask((8,))
    assert fixture.tree.make_room(fixture.num_blocks)
    fixture.prepare((1, 2, 3))
    assert fixture.tree.make_room(fixture.num_blocks)
    assert fixture.tree.num_unused_bytes(tier) == 3 * SIZE
    used = fixture.used(tier)
    for chunk, num_unused in ((9, 2), (10, 1), (11, 0)):
        fixture.ask((chunk,))
        assert fixture.tree.make_room(fixture.num_blocks)
        fixture.check()
        assert used < fixture.used(tier) and fixture.tree.num_unused_bytes(tier) == num_unused * SIZE
        used = fixture.used(tier)


def test_the_first_use_frees_the_budget_in_every_tier() -> None:
    budgets = {"host_bytes": 100, "disk_bytes": 100, "unused_host_bytes": 5 * SIZE, "unused_disk_bytes": 4 * SIZE}
    fixture = PreparedFixture(options=budgets)
    fixture.prepare((1, 2))
    fixture.tree.flush()
    assert fixture.tree.make_room(fixture.num_blocks)
    unused = [fixture.tree.num_unused_bytes(tier) for tier in OWN_TIERS]
    assert unused == [0, 2 * SIZE, 2 * SIZE] and fixture.tree.unused_room() == 2 * SIZE
    fixture.ask((2,), (1, 2))
    unused = [fixture.tree.num_unused_bytes(tier) for tier in OWN_TIERS]
    assert unused == [0, SIZE, SIZE], "system message and 2 are used, 1 is not"
    assert fixture.tree.unused_room() == 3 * SIZE
    fixture.ask((2, 1), (1, 2))
    assert [fixture.tree.num_unused_bytes(tier) for tier in OWN_TIERS] == [0, 0, 0]
    assert fixture.tree.num_bytes(Tier.HOST) == fixture.tree.num_bytes(Tier.DISK) == 3 * SIZE


small = st.integers(0, 6).map(lambda count: count * SIZE)
windows = st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True)
actions = st.one_of(
    st.tuples(st.just("prepare"), windows),
    st.tuples(st.just("ask"), windows),
    st.tuples(st.just("evict"), st.integers(1, 20)),
    st.tuples(st.just("store")),
    st.tuples(st.just("restart")),
)


def check_eviction(fixture: PreparedFixture, num_blocks: int) -> None:
    """Make room on the device, and check the order in which nodes leave it."""
    before = {node.key for node in fixture.tree if node.block_ids is not None and node.is_used}
    fixture.tree.make_room(num_blocks)
    after = {node.key: node for node in fixture.tree if node.block_ids is not None}
    if not before <= after.keys():
        leaves = [node for node in after.values() if not node.num_children_in[Tier.DEVICE]]
        assert all(node.is_used for node in leaves), "a used node left the device before an unused one"


@given(small, small, small, small, st.sampled_from([PREPARED, None]), st.lists(actions, max_size=16))
@settings(max_examples=most_examples(80), deadline=None)
def test_budgets_hold_and_unused_kv_is_evicted_first(
    host: int, disk: int, unused_host: int, unused_disk: int, anywhere: AnywhereOptions | None, steps: list[Any]
) -> None:
    budgets = {
        "host_bytes": host,
        "disk_bytes": disk,
        "unused_host_bytes": unused_host,
        "unused_disk_bytes": unused_disk,
    }
    fixture = PreparedFixture(anywhere, num_blocks=20, options=budgets)
    document = tuple(range(1, 10))
    for name, *rest in steps:
        used = {tier: fixture.used(tier) for tier in (Tier.HOST, Tier.DISK)}
        if name == "prepare":
            fixture.prepare(sorted(rest[0]))
        elif name == "ask":
            fixture.ask(rest[0], document)
        elif name == "evict":
            check_eviction(fixture, rest[0])
        elif name == "store":
            fixture.manager.store_next()
            assert all(used[tier] <= fixture.used(tier) for tier in used), "storing while idle displaces nothing"
        else:
            fixture.restart()
        fixture.check()
        assert fixture.tree.num_unused_bytes(Tier.HOST) <= unused_host
        assert fixture.tree.num_unused_bytes(Tier.DISK) <= unused_disk


# Restart


def test_a_restored_copy_is_unused_and_placed_in_its_context() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 100, "unused_disk_bytes": 6 * SIZE})
    fixture.prepare((3, 1, 2))
    fixture.tree.flush()
    records = {record.seen: record for record in fixture.memory.records.values() if record.is_in_document}
    assert sorted(records) == sorted(map(tuple, prefixes(3, 1, 2))), "in the order of the document"
    assert not any(record.is_used for record in records.values())
    fixture.restart()
    assert fixture.copies() == sorted(prefixes(3, 1, 2)) and fixture.is_prepared((3, 1, 2))
    assert not any(node.is_used for node in fixture.tree if node.chunk_id is not None)
    assert fixture.tree.num_unused_bytes(Tier.DISK) == 3 * SIZE and fixture.tree.unused_room() == 3 * SIZE
    answered = fixture.ask((2, 1), (3, 1, 2))
    assert answered.copies == {2: (3, 1, 2), 1: (3, 1)} and answered.num_computed == LENGTH_OF_QUESTION
    assert fixture.tree.num_unused_bytes(Tier.DISK) == SIZE, "the system message and two copies are used"
    assert fixture.ask((2,), (1, 3, 2)).copies == {}, "the document has another order now"


def test_a_copy_that_was_used_before_it_was_stored_is_restored_as_used() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 100, "unused_disk_bytes": 100})
    fixture.prepare((1, 2))
    fixture.ask((2,), (1, 2))
    fixture.tree.flush()
    fixture.restart()
    assert fixture.copy(1, 2).is_used and not fixture.copy(1).is_used
    assert fixture.tree.num_unused_bytes(Tier.DISK) == SIZE


def test_restored_chunks_of_an_interrupted_prompt_are_not_computed_again() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 100, "unused_disk_bytes": 100})
    fixture.prepare((1, 2, 3), num_tokens=3 * SIZE)
    fixture.tree.flush()
    fixture.restart()
    assert fixture.prepare((1, 2, 3)) == SIZE + LENGTH_OF_QUESTION


def test_a_disk_with_a_smaller_budget_loses_unused_copies_first() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 100, "unused_disk_bytes": 100})
    fixture.ask((8, 9))
    fixture.prepare((1, 2))
    fixture.tree.flush()
    fixture.options["disk_bytes"] = 3 * SIZE
    fixture.restart()
    assert fixture.copies() == [] and fixture.exact(8, 9) is not None
