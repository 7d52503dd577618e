"""Block pool, block table and manager: exact ids, and an invariant check under random use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.ids import BlockId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.manager import KVCacheManager


def prompt(*lengths: int) -> SegmentedPrompt:
    return SegmentedPrompt(tuple(Segment(SegmentKind.CHUNK, (7,) * length) for length in lengths))


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4, 16)
    assert pool.try_allocate(3) == [0, 1, 2]
    assert pool.try_allocate(2) is None
    assert pool.num_free == 1 and pool.num_used == 3
    pool.check_integrity()


def test_used_blocks_are_allocated_before_unused_ones() -> None:
    pool = BlockPool(6, 16)
    assert pool.try_allocate(3) == [0, 1, 2]
    pool.release([BlockId(2), BlockId(0)])
    assert pool.try_allocate(3) == [0, 2, 3]
    pool.check_integrity()


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(2, 16)
    blocks = pool.try_allocate(1)
    assert blocks == [0]
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.ref_count(BlockId(0)) == 1 and pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="release of free block"):
        pool.release(blocks)


def test_segments_start_on_fresh_blocks_and_padding_has_no_slot() -> None:
    manager = KVCacheManager(BlockPool(8, 4))
    lease = manager.new_lease(prompt(3, 5, 4), 20)
    table = lease.table
    assert manager.try_admit(lease, [3, 5, 4]) == 0
    assert table.block_ids == [0, 1, 2, 3]
    assert table.slots.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 12, 13, 14, 15]


def test_generated_tokens_fill_the_last_block_and_then_take_a_fresh_one() -> None:
    manager = KVCacheManager(BlockPool(3, 4))
    lease = manager.new_lease(prompt(4, 3), 20)
    table = lease.table
    assert manager.try_admit(lease, [4, 3]) == 0
    assert manager.try_append_token(table) and manager.try_append_token(table)
    assert table.slots.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    for _ in range(3):
        assert manager.try_append_token(table)
    assert not manager.try_append_token(table), "the pool is empty"
    assert table.num_slots == 12
    manager.release(lease)
    assert manager.pool.num_free == 3 and table.num_slots == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, 9), min_size=1, max_size=4)), max_size=40))
def test_random_use_keeps_reference_counts_consistent(actions: list[tuple[int, list[int]]]) -> None:
    manager = KVCacheManager(BlockPool(12, 4))
    leases: dict[int, Lease] = {}
    for name, lengths in actions:
        if name in leases:
            manager.release(leases.pop(name))
        else:
            lease = manager.new_lease(prompt(*lengths), 64)
            before = manager.pool.num_free
            if manager.try_admit(lease, lengths) is not None:
                leases[name] = lease
                manager.try_append_token(lease.table)
                assert len(set(lease.table.slots.tolist())) == lease.table.num_slots
            else:
                assert manager.pool.num_free == before and not lease.table.block_ids
        manager.check_integrity(leases.values())
        held = [block for lease in leases.values() for block in lease.table.block_ids]
        assert len(held) == len(set(held)) == manager.pool.num_used
