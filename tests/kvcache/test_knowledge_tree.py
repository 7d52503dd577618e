"""The knowledge tree: hand-worked PGDSF, where copies go, and what happens when they cannot."""

import pytest

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NodeRecord, Tier
from stillroom.core.reuse import Reason
from stillroom.errors import NonFiniteError
from stillroom.kvcache.blocks.pool import BlockPool
from stillroom.kvcache.chunk_reuse.plan import reusability as context_of
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.tree.cost_model import Link, linear_profile
from stillroom.kvcache.tree.eviction import POLICIES, NodeUse, gdsf, lfu, lru, pgdsf, prefix_heat, reusability, tamm
from stillroom.kvcache.tree.provenance import Context
from tests.kvcache.prefix_memory import prefix_hash
from tests.kvcache.tree_fixture import SIZE, S, TreeFixture


def reasons(lease: Lease) -> list[tuple[Tier | None, Reason]]:
    assert lease.reuse is not None
    return [(segment.source, segment.reason) for segment in lease.reuse.segments]


NEW, TAIL = (None, Reason.NEVER_SEEN), (None, Reason.TAIL)


def test_the_second_question_computes_only_itself() -> None:
    fixture = TreeFixture()
    assert reasons(fixture.serve(1, 2)) == [NEW, NEW, NEW, TAIL]
    again = fixture.serve(1, 2)
    assert reasons(again) == [(Tier.DEVICE, Reason.HIT)] * 3 + [TAIL]
    assert again.reuse is not None and again.reuse.num_cached_tokens == 12
    assert again.reuse.saved_seconds == pytest.approx(12.0)  # a second per token, and nothing else
    assert fixture.tree.stats.hit_tokens == {Tier.DEVICE: 12}


def test_kv_that_is_not_finite_is_kept_by_no_tier_and_takes_what_was_used_with_it() -> None:
    fixture = TreeFixture(host_bytes=100, disk_bytes=100)
    fixture.serve(1)
    fixture.serve(3)
    lease = fixture.lease(1, 2)
    assert fixture.admit(lease) == 2 * SIZE, "the system prompt and document 1 are kept"
    fixture.memory.poisoned.add(prefix_hash([S] * SIZE + [1] * SIZE + [2]))
    with pytest.raises(NonFiniteError):
        fixture.compute(lease)
    assert fixture.node(1, 2) is None
    assert fixture.manager.drop_suspect(lease) == 3, "document 3 hangs from the same system prompt"
    fixture.manager.release(lease)
    fixture.check()
    assert len(fixture.tree) == fixture.pool.num_used == 0


def test_another_order_is_another_path_and_says_so() -> None:
    fixture = TreeFixture()
    fixture.serve(1, 2)
    assert reasons(fixture.serve(2, 1)) == [(Tier.DEVICE, Reason.HIT), *[(None, Reason.ORDER_DIFFERS)] * 2, TAIL]


def test_a_long_question_is_kept_in_pieces_but_for_its_last_token() -> None:
    fixture = TreeFixture(12)
    fixture.serve(1, question=9)
    again = fixture.serve(1, question=12)
    assert again.reuse is not None and again.reuse.num_cached_tokens == 8 + 8
    assert reasons(again)[-2:] == [(Tier.DEVICE, Reason.HIT), TAIL]


def test_pgdsf_is_algorithm_1_by_hand() -> None:
    """T(cached, new) = 2 + new: a step costs as much as two tokens. Prompts: S, one document, a question of 2 tokens.

    The first computes 10 tokens in 12 s, every later one with S cached 6 in 8 s: per token 1.2 and 4/3.
    """
    fixture = TreeFixture(8, profile=linear_profile(2.0, 1.0, 0.0), policy=pgdsf)
    fixture.serve(1)  # 1.2 x 1 use
    fixture.serve(2)  # 4/3 x 1 use
    fixture.serve(1)  # a hit: 1.2 x 2 uses
    expected = {1: 2.4, 2: 4 / 3}
    for document, priority in expected.items():
        node = fixture.node(document)
        assert node is not None and node.priority[Tier.DEVICE] == pytest.approx(priority)
    fixture.tree.make_room(6)  # 3 of 8 blocks are kept: one must go
    assert fixture.node(2) is None and fixture.node(1) is not None
    fixture.serve(3)  # after the eviction the clock stands at 4/3
    node = fixture.node(3)
    assert node is not None and node.priority[Tier.DEVICE] == pytest.approx(4 / 3 + 4 / 3)


def test_only_leaves_of_the_device_leave_it() -> None:
    fixture = TreeFixture(8)
    fixture.serve(1, 2)
    for _ in range(5):
        fixture.serve(1)  # S and 1 are used far more often than 2
    assert fixture.tree.make_room(6)
    assert fixture.tier(1, 2) is None and fixture.tier(1) is Tier.DEVICE
    assert fixture.tree.make_room(8), "in the end the root goes too"
    assert len(fixture.tree) == 0


def test_swap_out_only_once() -> None:
    fixture = TreeFixture(4, host_bytes=100)
    for _ in range(4):
        fixture.serve(1)
        fixture.tree.make_room(4)
    assert fixture.memory.log.count(("offload", Tier.HOST)) == 2, "S and 1, once each"
    assert fixture.tree.stats.loads[Tier.HOST] == 2 * 3
    assert fixture.tier(1) is Tier.HOST


def test_a_full_host_sends_its_leaf_of_least_priority_to_disk() -> None:
    fixture = TreeFixture(8, host_bytes=2 * SIZE, disk_bytes=100)
    fixture.serve(1)
    fixture.serve(2)
    fixture.tree.make_room(8)
    tiers = {fixture.tier(1), fixture.tier(2)}
    assert tiers == {Tier.HOST, Tier.DISK} and fixture.tier() is Tier.HOST
    fixture.check()


def test_without_a_lower_tier_what_leaves_is_gone_and_said_to_be_evicted() -> None:
    fixture = TreeFixture(4)
    fixture.serve(1)
    fixture.tree.make_room(4)
    assert reasons(fixture.serve(1)) == [*[(None, Reason.EVICTED)] * 2, TAIL]
    assert fixture.tree.stats.lost == 2


def test_what_is_in_use_stays_and_a_request_that_finds_no_room_waits() -> None:
    fixture = TreeFixture(5)
    lease = fixture.lease(1, 2)
    assert fixture.admit(lease) == 0
    fixture.compute(lease)
    other = fixture.lease(3)
    assert fixture.admit(other) is None
    fixture.check(lease)
    fixture.manager.release(lease)
    assert fixture.admit(other) == SIZE, "S is still there"
    fixture.check(other)


def test_a_request_that_has_to_wait_evicts_nothing_meanwhile() -> None:
    fixture = TreeFixture(8)
    fixture.serve(1)
    lease = fixture.lease(2, 3)
    assert fixture.admit(lease) == SIZE
    before = fixture.tree.stats.evictions[Tier.DEVICE]
    for _ in range(3):
        assert fixture.admit(fixture.lease(4, 5, 6, 7)) is None
    assert fixture.tree.stats.evictions[Tier.DEVICE] == before and fixture.tier(1) is Tier.DEVICE
    fixture.check(lease)


def test_two_at_once_compute_the_same_and_end_up_with_one_copy() -> None:
    fixture = TreeFixture(16)
    leases = [fixture.lease(1, 2) for _ in range(2)]
    for lease in leases:
        assert fixture.admit(lease) == 0
    assert fixture.pool.num_used == 8
    for lease in leases:
        fixture.compute(lease)
        fixture.check(*leases)
    assert fixture.pool.num_used == 5, "three shared blocks, and a question each"
    assert leases[0].table.block_ids[:3] == leases[1].table.block_ids[:3]
    assert leases[0].table.slots.tolist()[:12] == leases[1].table.slots.tolist()[:12]


def test_loading_that_takes_longer_than_computing_is_not_done() -> None:
    slow = linear_profile(0.0, 1.0, 0.0, {Tier.HOST: Link(100.0, 1e9)})
    for always_loads, source in ((False, (None, Reason.CHEAPER)), (True, (Tier.HOST, Reason.HIT))):
        fixture = TreeFixture(4, profile=slow, host_bytes=100, always_loads=always_loads)
        fixture.serve(1)
        fixture.tree.make_room(4)
        assert reasons(fixture.serve(1)) == [source, source, TAIL]
        assert fixture.tree.stats.cheaper == (0 if always_loads else 2)
        assert fixture.tier(1) is Tier.DEVICE, "computed or loaded, it is on the device again"


def test_a_damaged_record_is_a_miss_and_what_stands_on_it_goes_too() -> None:
    fixture = TreeFixture(8, disk_bytes=1000)
    fixture.serve(1, 2)
    fixture.tree.make_room(8)
    node = fixture.node(1)
    assert node is not None and node.tier is Tier.DISK
    fixture.memory.damaged.add(node.key)
    assert reasons(fixture.serve(1, 2)) == [(Tier.DISK, Reason.HIT), *[(None, Reason.RECORD_FAILED)] * 2, TAIL]
    assert fixture.tree.stats.failed_loads[Tier.DISK] == 1
    assert reasons(fixture.serve(1, 2)) == [(Tier.DEVICE, Reason.HIT)] * 3 + [TAIL]


def test_a_disk_that_cannot_be_written_costs_only_hits() -> None:
    fixture = TreeFixture(8, host_bytes=SIZE, disk_bytes=1000)
    fixture.memory.is_disk_full = True
    fixture.serve(1)
    fixture.tree.make_room(8)
    fixture.check()
    assert fixture.tier() is Tier.HOST and fixture.node(1) is None


def test_what_was_flushed_is_there_after_a_restart_least_valuable_first_to_go() -> None:
    fixture = TreeFixture(12, disk_bytes=3 * SIZE)
    fixture.serve(1)
    for _ in range(3):
        fixture.serve(2, 3)
    assert fixture.tree.flush() == 3
    records = [fixture.memory.records[key] for key in fixture.memory.lower[Tier.DISK]]
    fixture.pool = BlockPool(12, SIZE)
    fixture.open()
    assert fixture.tree.restore(records) == []
    fixture.check()
    assert (fixture.tier(2, 3), fixture.tier(1)) == (Tier.DISK, None)
    assert reasons(fixture.serve(2, 3)) == [(Tier.DISK, Reason.HIT)] * 3 + [TAIL]


def test_records_that_no_path_leads_to_are_named() -> None:
    fixture = TreeFixture(12, disk_bytes=1000)
    fixture.serve(1, 2)
    fixture.tree.flush()
    records = {record.chunk_id: record for record in fixture.memory.records.values()}
    fixture.pool = BlockPool(12, SIZE)
    fixture.open()
    left: list[NodeRecord] = [records[None], records[ChunkId(2)]]
    assert fixture.tree.restore(left) == [records[ChunkId(2)].key]


def test_a_chunk_of_unknown_context_fits_into_no_other_after_a_restart() -> None:
    """The first is exact where nothing is before it; the second was computed behind something nobody knows."""
    fixture = TreeFixture(12, disk_bytes=1000)
    lease = fixture.lease(1, 2)
    assert fixture.admit(lease) == 0
    fixture.compute(lease)
    piece = lease.pieces[2]
    context = Context((b"1" * 32,), frozenset(map(ChunkId, (1, 2))))
    alone = fixture.tree.insert_detached(piece, lease.table.blocks_of(piece.start, SIZE), context, 1.0)
    assert alone.mass is None
    fixture.tree.flush()
    fixture.pool = BlockPool(12, SIZE)
    fixture.open()
    assert fixture.tree.restore(fixture.memory.records.values()) == []
    again = fixture.tree.get(alone.key)
    assert again is not None and context_of(again, ()).overlap == context_of(again, (b"1" * 32,)).overlap == 0.0


def test_a_record_that_cannot_be_read_just_now_is_computed_and_stays() -> None:
    fixture = TreeFixture(12, disk_bytes=1000)
    fixture.serve(1, 2)
    assert fixture.tree.make_room(12)
    fixture.memory.unreadable = set(fixture.memory.records)
    assert reasons(fixture.serve(1, 2)) == [(None, Reason.RECORD_FAILED)] * 3 + [TAIL]
    fixture.memory.unreadable = set()
    assert fixture.tree.make_room(12)
    assert reasons(fixture.serve(1, 2)) == [(Tier.DISK, Reason.HIT)] * 3 + [TAIL]


def test_idle_moments_bring_everything_to_disk() -> None:
    fixture = TreeFixture(12, disk_bytes=1000)
    fixture.serve(1, 2)
    assert sum(1 for _ in iter(fixture.tree.store_next, False)) == 3
    assert fixture.tree.num_nodes(Tier.DISK) == 3
    fixture.check()


def test_what_is_seldom_asked_for_does_not_displace_what_is_popular() -> None:
    for admits_by_frequency in (True, False):
        fixture = TreeFixture(8, disk_bytes=2 * SIZE, admits_by_frequency=admits_by_frequency)
        for _ in range(4):
            fixture.serve(1)
        fixture.tree.make_room(8)
        fixture.serve(2)
        fixture.tree.make_room(8)
        assert (fixture.tier(1), fixture.tier(2)) == ((Tier.DISK, None) if admits_by_frequency else (None, Tier.DISK))
        assert fixture.tree.stats.rejected == admits_by_frequency


def test_what_a_waiting_request_will_use_leaves_last() -> None:
    for looks_ahead in (True, False):
        fixture = TreeFixture(8, looks_ahead=looks_ahead)
        fixture.serve(1)
        for _ in range(3):
            fixture.serve(2)
        waiting = fixture.lease(1)
        fixture.manager.protect(waiting)
        fixture.tree.make_room(6)
        assert (fixture.tier(1), fixture.tier(2)) == ((Tier.DEVICE, None) if looks_ahead else (None, Tier.DEVICE))
        fixture.manager.unprotect(waiting)
        fixture.check()


def test_only_a_removed_document_goes_and_what_stands_behind_it() -> None:
    fixture = TreeFixture(16, disk_bytes=1000)
    fixture.serve(1, 2)
    fixture.serve(3, 1)
    fixture.tree.flush()
    assert fixture.tree.forget_chunks(lambda chunk_id: chunk_id != 1) == 3
    fixture.check()
    assert (fixture.tier(3), fixture.node(1), fixture.node(3, 1)) == (Tier.DEVICE, None, None)
    assert len(fixture.memory.lower[Tier.DISK]) == 2


def test_a_document_removed_under_a_running_request_does_it_no_harm() -> None:
    fixture = TreeFixture(16)
    fixture.serve(1)
    lease = fixture.lease(1, 2)
    assert fixture.admit(lease) == 8
    fixture.tree.forget_chunks(lambda chunk_id: chunk_id != 1)
    fixture.check(lease)
    fixture.compute(lease)
    fixture.check(lease)
    assert fixture.node(1, 2) is None, "nothing is kept behind a document that is gone"
    other = fixture.serve(1, 2, running=[lease])
    assert other.reuse is not None and other.reuse.num_cached_tokens == SIZE
    fixture.manager.release(lease)
    fixture.check()


def test_what_is_being_computed_of_a_removed_document_is_not_kept_either() -> None:
    fixture = TreeFixture(16)
    lease = fixture.lease(1, 2, 3)
    assert fixture.admit(lease) == 0
    fixture.manager.forget_chunks(lambda chunk_ids: chunk_ids - {ChunkId(2)}, [lease])
    fixture.compute(lease)
    other = fixture.lease(1, 2, 3)
    fixture.manager.fork(lease, other)
    fixture.manager.commit(other, other.prompt.num_tokens)
    fixture.check(lease, other)
    fixture.manager.release(other)
    assert fixture.tier(1) is Tier.DEVICE
    assert fixture.node(1, 2) is None and fixture.node(1, 2, 3) is None
    fixture.manager.release(lease)
    fixture.check()


def test_after_losing_the_device_the_system_prompt_comes_from_its_replica() -> None:
    fixture = TreeFixture(16, host_bytes=100, replicates_system=True)
    fixture.serve(1)
    fixture.memory.lose_device()
    fixture.tree.lose_device()
    fixture.check()
    assert reasons(fixture.serve(1)) == [(Tier.HOST, Reason.HIT), (None, Reason.EVICTED), TAIL]


def test_policies_are_sort_keys() -> None:
    use = NodeUse(
        key=b"",  # type: ignore[arg-type]
        num_tokens=4,
        clock=10.0,
        frequency=3.0,
        avg_cost=2.0,
        cost_alone=0.5,
        recency=8,
        cost_here=32.0,
        heat=5.0,
        depth=3,
        reusability=7.0,
    )
    assert [policy(use) for policy in (pgdsf, gdsf, lru, lfu, tamm)] == [16.0, 11.5, 8.0, 3.0, 2.0]
    assert reusability(use) == 7.0
    assert prefix_heat(use) == 5.0 + 1.0 - 2.0
    assert set(POLICIES) == {"prefix_heat", "pgdsf", "gdsf", "lru", "lfu", "tamm", "reusability"}


def test_heat_is_the_logarithm_of_uses_that_fade() -> None:
    fixture = TreeFixture(8, half_life_uses=2.0)
    fixture.serve(1)  # uses 1 (S) and 2 (the document)
    fixture.serve(1)  # uses 3 and 4
    node = fixture.node(1)
    assert node is not None
    assert 2 ** (node.heat - 4 / 2) == pytest.approx(1 + 1 / 2), "one use now, and one that is a half-life old"


def test_an_eviction_does_not_end_the_memory_of_uses() -> None:
    for policy, survivor in ((prefix_heat, 1), (pgdsf, 2)):
        fixture = TreeFixture(8, policy=policy)
        for _ in range(3):
            fixture.serve(1)
        fixture.tree.make_room(8)
        fixture.serve(1)
        fixture.serve(2)
        fixture.serve(2)
        fixture.tree.make_room(6)
        assert [d for d in (1, 2) if fixture.node(d)] == [survivor]


def test_of_paths_used_alike_the_deeper_end_leaves_first() -> None:
    fixture = TreeFixture(8)
    fixture.serve(2)
    fixture.serve(1, 3)  # later, so that LRU would take 2
    fixture.tree.make_room(5)
    assert (fixture.tier(1, 3), fixture.tier(1), fixture.tier(2)) == (None, Tier.DEVICE, Tier.DEVICE)
