"""Knowledge tree: PGDSF by hand, eviction to lower tiers, and failures of copies."""

import pytest

from stillroom.core.ids import ChunkId
from stillroom.core.kv import Link, NodeRecord, Tier
from stillroom.core.reuse import Reason
from stillroom.errors import NonFiniteError
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.chunk_reuse.plan import reusability as context_of
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.kvcache.tree.eviction import POLICIES, NodeUse, gdsf, lfu, lru, pgdsf, prefix_heat, reusability, tamm
from stillroom.kvcache.tree.provenance import Context
from tests.kvcache.prefix_memory import prefix_hash
from tests.kvcache.tree_fixture import SIZE, S, TreeFixture


def reasons(lease: Lease) -> list[tuple[Tier | None, Reason]]:
    assert lease.reuse is not None
    return [(segment.source, segment.reason) for segment in lease.reuse.segments]


NEW, TAIL = (None, Reason.NEVER_SEEN), (None, Reason.TAIL)


def test_a_repeated_prompt_computes_only_its_question() -> None:
    fixture = TreeFixture()
    assert reasons(fixture.serve(1, 2)) == [NEW, NEW, NEW, TAIL]
    again = fixture.serve(1, 2)
    assert reasons(again) == [(Tier.DEVICE, Reason.HIT)] * 3 + [TAIL]
    assert again.reuse is not None and again.reuse.num_cached_tokens == 12
    assert again.reuse.saved_seconds == pytest.approx(12.0)  # one second per token
    assert fixture.tree.stats.hit_tokens == {Tier.DEVICE: 12}


def test_non_finite_kv_is_not_kept_and_drops_the_kv_used_with_it() -> None:
    fixture = TreeFixture(host_bytes=100, disk_bytes=100)
    fixture.serve(1)
    fixture.serve(3)
    lease = fixture.lease(1, 2)
    assert fixture.admit(lease) == 2 * SIZE, "the system prompt and document 1 are kept"
    fixture.memory.poisoned.add(prefix_hash([S] * SIZE + [1] * SIZE + [2]))
    with pytest.raises(NonFiniteError):
        fixture.compute(lease)
    assert fixture.node(1, 2) is None
    assert fixture.manager.drop_suspect(lease) == 3, "document 3 is below the same system prompt"
    fixture.manager.release(lease)
    fixture.check()
    assert len(fixture.tree) == fixture.pool.num_used == 0


def test_documents_in_another_order_are_computed_and_reported_so() -> None:
    fixture = TreeFixture()
    fixture.serve(1, 2)
    assert reasons(fixture.serve(2, 1)) == [(Tier.DEVICE, Reason.HIT), *[(None, Reason.ORDER_DIFFERS)] * 2, TAIL]


def test_a_long_question_is_kept_in_pieces_except_its_last_token() -> None:
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
    fixture.tree.make_room(6)  # 3 of 8 blocks are kept: one is evicted
    assert fixture.node(2) is None and fixture.node(1) is not None
    fixture.serve(3)  # after the eviction the clock stands at 4/3
    node = fixture.node(3)
    assert node is not None and node.priority[Tier.DEVICE] == pytest.approx(4 / 3 + 4 / 3)


def test_only_leaves_are_evicted_from_the_device() -> None:
    fixture = TreeFixture(8)
    fixture.serve(1, 2)
    for _ in range(5):
        fixture.serve(1)  # S and 1 are used far more often than 2
    assert fixture.tree.make_room(6)
    assert fixture.tier(1, 2) is None and fixture.tier(1) is Tier.DEVICE
    assert fixture.tree.make_room(8), "the root is evicted last"
    assert len(fixture.tree) == 0


def test_a_node_is_copied_to_the_host_only_once() -> None:
    fixture = TreeFixture(4, host_bytes=100)
    for _ in range(4):
        fixture.serve(1)
        fixture.tree.make_room(4)
    assert fixture.memory.log.count(("offload", Tier.HOST)) == 2, "S and 1, once each"
    assert fixture.tree.stats.loads[Tier.HOST] == 2 * 3
    assert fixture.tier(1) is Tier.HOST


def test_a_full_host_moves_its_lowest_priority_leaf_to_disk() -> None:
    fixture = TreeFixture(8, host_bytes=2 * SIZE, disk_bytes=100)
    fixture.serve(1)
    fixture.serve(2)
    fixture.tree.make_room(8)
    tiers = {fixture.tier(1), fixture.tier(2)}
    assert tiers == {Tier.HOST, Tier.DISK} and fixture.tier() is Tier.HOST
    fixture.check()


def test_without_a_lower_tier_evicted_nodes_are_dropped_and_reported_as_evicted() -> None:
    fixture = TreeFixture(4)
    fixture.serve(1)
    fixture.tree.make_room(4)
    assert reasons(fixture.serve(1)) == [*[(None, Reason.EVICTED)] * 2, TAIL]
    assert fixture.tree.stats.lost == 2


def test_nodes_in_use_are_not_evicted_and_a_request_without_room_waits() -> None:
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


def test_a_waiting_request_evicts_nothing() -> None:
    fixture = TreeFixture(8)
    fixture.serve(1)
    lease = fixture.lease(2, 3)
    assert fixture.admit(lease) == SIZE
    before = fixture.tree.stats.evictions[Tier.DEVICE]
    for _ in range(3):
        assert fixture.admit(fixture.lease(4, 5, 6, 7)) is None
    assert fixture.tree.stats.evictions[Tier.DEVICE] == before and fixture.tier(1) is Tier.DEVICE
    fixture.check(lease)


def test_two_sequences_that_compute_the_same_piece_share_one_copy() -> None:
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


def test_kv_is_computed_where_loading_takes_longer() -> None:
    slow = linear_profile(0.0, 1.0, 0.0, {Tier.HOST: Link(100.0, 1e9)})
    for always_loads, source in ((False, (None, Reason.CHEAPER)), (True, (Tier.HOST, Reason.HIT))):
        fixture = TreeFixture(4, profile=slow, host_bytes=100, always_loads=always_loads)
        fixture.serve(1)
        fixture.tree.make_room(4)
        assert reasons(fixture.serve(1)) == [source, source, TAIL]
        assert fixture.tree.stats.cheaper == (0 if always_loads else 2)
        assert fixture.tier(1) is Tier.DEVICE, "computed or loaded, it is on the device again"


def test_a_damaged_record_is_a_miss_and_drops_its_descendants() -> None:
    fixture = TreeFixture(8, disk_bytes=1000)
    fixture.serve(1, 2)
    fixture.tree.make_room(8)
    node = fixture.node(1)
    assert node is not None and node.tier is Tier.DISK
    fixture.memory.damaged.add(node.key)
    assert reasons(fixture.serve(1, 2)) == [(Tier.DISK, Reason.HIT), *[(None, Reason.RECORD_FAILED)] * 2, TAIL]
    assert fixture.tree.stats.failed_loads[Tier.DISK] == 1
    assert reasons(fixture.serve(1, 2)) == [(Tier.DEVICE, Reason.HIT)] * 3 + [TAIL]


def test_an_unwritable_disk_costs_only_hits() -> None:
    fixture = TreeFixture(8, host_bytes=SIZE, disk_bytes=1000)
    fixture.memory.is_disk_full = True
    fixture.serve(1)
    fixture.tree.make_room(8)
    fixture.check()
    assert fixture.tier() is Tier.HOST and fixture.node(1) is None


def test_flushed_nodes_survive_a_restart_except_the_least_valuable() -> None:
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


def test_restore_returns_records_whose_path_is_incomplete() -> None:
    fixture = TreeFixture(12, disk_bytes=1000)
    fixture.serve(1, 2)
    fixture.tree.flush()
    records = {record.chunk_id: record for record in fixture.memory.records.values()}
    fixture.pool = BlockPool(12, SIZE)
    fixture.open()
    left: list[NodeRecord] = [records[None], records[ChunkId(2)]]
    assert fixture.tree.restore(left) == [records[ChunkId(2)].key]


def test_a_detached_node_of_unknown_context_has_no_overlap_after_a_restart() -> None:
    """The context of a detached node without measured attention is not stored, so it matches no prompt."""
    fixture = TreeFixture(12, disk_bytes=1000)
    lease = fixture.lease(1, 2)
    assert fixture.admit(lease) == 0
    fixture.compute(lease)
    piece = lease.pieces[2]
    context = Context((b"1" * 32,), frozenset(map(ChunkId, (1, 2))))
    detached = fixture.tree.insert_detached(piece, lease.table.blocks_of(piece.start, SIZE), context, 1.0)
    assert detached.mass is None
    fixture.tree.flush()
    fixture.pool = BlockPool(12, SIZE)
    fixture.open()
    assert fixture.tree.restore(fixture.memory.records.values()) == []
    again = fixture.tree.get(detached.key)
    assert again is not None and context_of(again, ()).overlap == context_of(again, (b"1" * 32,)).overlap == 0.0


def test_a_temporarily_unreadable_record_is_computed_and_stays() -> None:
    fixture = TreeFixture(12, disk_bytes=1000)
    fixture.serve(1, 2)
    assert fixture.tree.make_room(12)
    fixture.memory.unreadable = set(fixture.memory.records)
    assert reasons(fixture.serve(1, 2)) == [(None, Reason.RECORD_FAILED)] * 3 + [TAIL]
    fixture.memory.unreadable = set()
    assert fixture.tree.make_room(12)
    assert reasons(fixture.serve(1, 2)) == [(Tier.DISK, Reason.HIT)] * 3 + [TAIL]


def test_all_nodes_are_stored_while_idle() -> None:
    fixture = TreeFixture(12, disk_bytes=1000)
    fixture.serve(1, 2)
    assert sum(1 for _ in iter(fixture.tree.store_next, False)) == 3
    assert fixture.tree.num_nodes(Tier.DISK) == 3
    fixture.check()


def test_admission_by_frequency_does_not_displace_popular_nodes() -> None:
    for admits_by_frequency in (True, False):
        fixture = TreeFixture(8, disk_bytes=2 * SIZE, admits_by_frequency=admits_by_frequency)
        for _ in range(4):
            fixture.serve(1)
        fixture.tree.make_room(8)
        fixture.serve(2)
        fixture.tree.make_room(8)
        assert (fixture.tier(1), fixture.tier(2)) == ((Tier.DISK, None) if admits_by_frequency else (None, Tier.DISK))
        assert fixture.tree.stats.rejected == admits_by_frequency


def test_nodes_that_a_waiting_request_will_use_are_evicted_last() -> None:
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


def test_a_removed_document_drops_its_nodes_and_their_descendants_only() -> None:
    fixture = TreeFixture(16, disk_bytes=1000)
    fixture.serve(1, 2)
    fixture.serve(3, 1)
    fixture.tree.flush()
    assert fixture.tree.forget_chunks(lambda chunk_id: chunk_id != 1) == 3
    fixture.check()
    assert (fixture.tier(3), fixture.node(1), fixture.node(3, 1)) == (Tier.DEVICE, None, None)
    assert len(fixture.memory.lower[Tier.DISK]) == 2


def test_a_running_request_survives_the_removal_of_its_document() -> None:
    fixture = TreeFixture(16)
    fixture.serve(1)
    lease = fixture.lease(1, 2)
    assert fixture.admit(lease) == 8
    fixture.tree.forget_chunks(lambda chunk_id: chunk_id != 1)
    fixture.check(lease)
    fixture.compute(lease)
    fixture.check(lease)
    assert fixture.node(1, 2) is None, "nothing is kept behind a removed document"
    other = fixture.serve(1, 2, running=[lease])
    assert other.reuse is not None and other.reuse.num_cached_tokens == SIZE
    fixture.manager.release(lease)
    fixture.check()


def test_kv_computed_behind_a_removed_document_is_not_kept() -> None:
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


def test_after_a_device_loss_the_system_prompt_is_loaded_from_its_replica() -> None:
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


def test_heat_is_the_logarithm_of_decayed_uses() -> None:
    fixture = TreeFixture(8, half_life_uses=2.0)
    fixture.serve(1)  # uses 1 (S) and 2 (the document)
    fixture.serve(1)  # uses 3 and 4
    node = fixture.node(1)
    assert node is not None
    assert 2 ** (node.heat - 4 / 2) == pytest.approx(1 + 1 / 2), "one use now, one use a half-life ago"


def test_prefix_heat_remembers_uses_across_an_eviction() -> None:
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


def test_of_equally_used_paths_the_deeper_end_is_evicted_first() -> None:
    fixture = TreeFixture(8)
    fixture.serve(2)
    fixture.serve(1, 3)  # later, so that LRU would take 2
    fixture.tree.make_room(5)
    assert (fixture.tier(1, 3), fixture.tier(1), fixture.tier(2)) == (None, Tier.DEVICE, Tier.DEVICE)
