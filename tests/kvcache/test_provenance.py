"""Provenance of kept KV, compared with a memory whose slots record the texts that their KV has seen."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stillroom.core.ids import BlockId, ChunkId
from stillroom.core.kv import FULL_BITS, NodeCopy, NodeKey, NodeRecord, Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.lease_admission import Reuse
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import PrefixKeys
from stillroom.kvcache.tree.provenance import MAX_SEEN
from stillroom.kvcache.tree.tree_options import TreeOptions
from tests.examples import most_examples
from tests.fakes import ManualClock

SIZE = 4
"""Tokens per block, and per document."""
QUESTION, SYSTEM, TURN = 90, 100, 200
"""Tokens; documents have smaller tokens, and each text has its own token."""
DOCUMENTS = range(1, 8)

Seen = frozenset[int]


def text_of(document: int) -> int:
    """Return the text of a document; the last has the text of the first."""
    return 1 if document == DOCUMENTS[-1] else document


class SeenMemory:
    """Implements `KVMover`: a slot holds the texts that its KV has seen."""

    def __init__(self) -> None:
        self.slots: dict[int, Seen] = {}
        self.lower: dict[Tier, dict[NodeKey, list[Seen]]] = {Tier.HOST: {}, Tier.DISK: {}}
        self.records: dict[NodeKey, NodeRecord] = {}

    def of(self, block_ids: Sequence[BlockId], num_tokens: int) -> list[int]:
        return [block * SIZE + offset for block in block_ids for offset in range(SIZE)][:num_tokens]

    def prefetch(self, key: NodeKey, num_tokens: int, bits: int = FULL_BITS) -> bool:
        return False

    def cancel_prefetch(self, key: NodeKey) -> None:
        raise AssertionError("nothing is read ahead")

    def offload(self, copy: NodeCopy) -> bool:
        self.lower[Tier.HOST][copy.key] = [self.slots[slot] for slot in self.of(copy.block_ids, copy.num_tokens)]
        return True

    def load(self, key: NodeKey, source: Tier, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        self.slots.update(zip(self.of(block_ids, num_tokens), self.lower[source][key], strict=True))
        return True

    def place(self, copy: NodeCopy, block_ids: Sequence[BlockId], first_position: int) -> bool:
        if copy.tier is Tier.DEVICE:
            held = [self.slots[slot] for slot in self.of(copy.block_ids, copy.num_tokens)]
        else:
            held = self.lower[copy.tier][copy.key]
        self.slots.update(zip(self.of(block_ids, copy.num_tokens), held, strict=True))
        return True

    def store(self, record: NodeRecord, source: Tier, block_ids: Sequence[BlockId]) -> bool:
        self.records[record.key] = record
        if source is Tier.DEVICE:
            self.lower[Tier.DISK][record.key] = [self.slots[slot] for slot in self.of(block_ids, record.num_tokens)]
        else:
            self.lower[Tier.DISK][record.key] = self.lower[Tier.HOST][record.key]
        return True

    def is_finite(self, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        return True

    def mark_used(self, key: NodeKey) -> None:
        pass

    def has(self, key: NodeKey, tier: Tier) -> bool:
        return key in self.lower[tier]

    def drop(self, key: NodeKey, tier: Tier) -> None:
        del self.lower[tier][key]

    def held(self, node: Node) -> list[Seen]:
        """Return what each copy of a node has seen."""
        found = [one for tier in self.lower.values() for one in tier.get(node.key, ())]
        return found + [self.slots[slot] for slot in self.of(node.block_ids or (), node.num_tokens)]


@dataclass
class Reader:
    """A manager over such a memory, and the existing documents."""

    ratio: float
    alive: set[int] = field(default_factory=lambda: set(DOCUMENTS))
    under_way: list[Lease] = field(default_factory=list)
    num_placed: int = 0

    def __post_init__(self) -> None:
        self.memory = SeenMemory()
        self.open()

    def open(self) -> None:
        self.pool = BlockPool(20, SIZE)
        options = TreeOptions(host_bytes=8 * SIZE, disk_bytes=20 * SIZE, replicates_system=False)
        clock = ManualClock()
        self.tree = KnowledgeTree(self.pool, self.memory, linear_profile(0.0, 1.0, 0.0), options, clock.monotonic)
        anywhere = AnywhereOptions(self.ratio, "random")
        self.manager = KVCacheManager(self.pool, Reuse(self.tree, PrefixKeys(b"m", SIZE), True, anywhere))

    def restart(self) -> None:
        while self.under_way:
            self.end(0)
        self.tree.flush()
        on_disk = self.memory.lower[Tier.DISK]
        self.memory.slots.clear()
        self.memory.lower[Tier.HOST].clear()
        self.open()
        for key in self.tree.restore([one for key, one in self.memory.records.items() if key in on_disk]):
            self.memory.drop(key, Tier.DISK)

    def begin(self, documents: Sequence[int], system: int, turn_at: int | None, allowed: set[int] | None) -> None:
        """Admit a request with a filter, and check every slot that it need not compute."""
        segments = [Segment(SegmentKind.CHUNK, (text_of(one),) * SIZE, ChunkId(one)) for one in documents]
        if turn_at is not None and turn_at <= len(segments):
            segments.insert(turn_at, Segment(SegmentKind.TURN, (TURN,) * SIZE))
        segments.insert(0, Segment(SegmentKind.SYSTEM, (SYSTEM + system,) * SIZE))
        prompt = SegmentedPrompt((*segments, Segment(SegmentKind.QUESTION, (QUESTION, QUESTION))))
        may_see = None if allowed is None else (lambda ids: set(ids) <= {ChunkId(one) for one in allowed})
        lease = self.manager.new_lease(prompt, prompt.num_tokens + 4, may_see=may_see)
        assert self.manager.num_reusable(lease, prompt.num_tokens) < prompt.num_tokens
        num_cached = self.manager.try_admit(lease, [len(segment.token_ids) for segment in segments] + [2])
        if num_cached is None:
            return
        own, others = set(prompt.token_ids), self.alive if allowed is None else self.alive & allowed
        exact = [self.memory.slots[slot] for slot in lease.table.slots[:num_cached].tolist()]
        placed = [self.memory.slots[slot] for slot in self._placed_slots(lease)]
        assert all(seen <= own for seen in exact), "an exact prefix has seen more than the prompt"
        assert all(seen <= own | {text_of(one) for one in others} for seen in placed)
        self.num_placed += len(lease.placements)
        self.under_way.append(lease)

    def end(self, index: int) -> None:
        """Compute the rest of a running prompt, and release it."""
        lease = self.under_way.pop(index)
        tokens, slots = lease.prompt.token_ids, lease.table.slots.tolist()
        todo: Sequence[int] = range(sum(node.num_tokens for node in lease.nodes), len(tokens))
        if lease.recompute is not None:
            assert lease.recompute.is_planned
            todo = lease.recompute.to_compute(len(tokens)).tolist()
        for position in todo:
            before = [self.memory.slots[slot] for slot in slots[:position]]
            self.memory.slots[slots[position]] = frozenset({tokens[position]}.union(*before))
        if lease.recompute is not None:
            self.manager.end_recompute(lease)
        self.manager.commit(lease, len(tokens))
        self.manager.release(lease)

    def remove(self, document: int) -> None:
        self.alive.discard(document)
        existing = {ChunkId(one) for one in self.alive}
        self.manager.forget_chunks(lambda chunk_ids: chunk_ids & existing, self.under_way)

    def check(self) -> None:
        self.manager.check_integrity(self.under_way)
        texts = {text_of(document) for document in self.alive}
        for node in self.tree:
            assert node.seen <= self.alive, "it names a removed document"
            named = {text_of(chunk_id) for chunk_id in node.seen}
            for seen in self.memory.held(node):
                documents = {token for token in seen if token < QUESTION}
                assert documents <= named, "it has seen a document that it does not name"
                assert documents <= texts, "it has seen a removed document"
        kept = {node.key for node in self.tree}
        assert all(key in kept for tier in self.memory.lower.values() for key in tier), "a copy outlives its node"

    def _placed_slots(self, lease: Lease) -> list[int]:
        pieces = [lease.pieces[placement.piece_index] for placement in lease.placements]
        return [slot for piece in pieces for slot in lease.table.slots[piece.start : piece.end].tolist()]


documents = st.sampled_from(DOCUMENTS)
asks = st.tuples(
    st.just("ask"),
    st.lists(documents, min_size=1, max_size=4, unique=True),
    st.integers(0, 1),
    st.none() | st.integers(0, 3),
    st.none() | st.sets(documents, min_size=2),
)
ends = st.tuples(st.just("end"), st.integers(0, 9))
changes = st.tuples(st.sampled_from(["remove", "add"]), documents)
restarts = st.tuples(st.just("restart"))


def run(ratio: float, steps: Sequence[tuple[Any, ...]]) -> Reader:
    reader = Reader(ratio)
    for name, *rest in steps:
        if name == "ask":
            chosen, system, turn_at, allowed = rest
            found = [one for one in chosen if one in reader.alive and (allowed is None or one in allowed)]
            reader.begin(found, system, turn_at, allowed)
        elif name == "end" and reader.under_way:
            reader.end(rest[0] % len(reader.under_way))
        elif name == "remove":
            reader.remove(rest[0])
        elif name == "add":
            reader.alive.add(rest[0])
        elif name == "restart":
            reader.restart()
        reader.check()
    while reader.under_way:
        reader.end(0)
        reader.check()
    return reader


def ask(*documents: int, system: int = 0, turn_at: int | None = None, allowed: set[int] | None = None) -> list[Any]:
    return [("ask", list(documents), system, turn_at, allowed), ("end", 0)]


BEHIND = [*ask(1, 2), *ask(2, 3)]
"""2 is placed from behind 1, and 3 is computed behind it."""


@given(st.sampled_from([0.0, 0.4]), st.lists(asks | asks | ends | ends | changes | restarts, max_size=40))
@example(0.0, [*BEHIND, ("ask", [3, 5], 0, None, None), ("remove", 1), ("end", 0)])
@example(0.0, [*ask(1, 2, turn_at=1), *ask(2, 4, turn_at=2), *ask(5, 4)])
@settings(max_examples=most_examples(150), deadline=None)
def test_no_request_uses_kv_that_has_seen_removed_or_forbidden_documents(
    ratio: float, steps: list[tuple[Any, ...]]
) -> None:
    run(ratio, steps)


@pytest.mark.parametrize(
    ("steps", "num_placed"),
    [
        (ask(4, 3), 1),
        ([("restart",), *ask(4, 3)], 1),
        ([("remove", 1), *ask(4, 3)], 0),
        ([("restart",), ("remove", 1), *ask(4, 3)], 0),
        (ask(4, 3, allowed={3, 4}), 0),
        (ask(4, 3, allowed={2, 3, 4}), 0),
        (ask(4, 3, allowed={1, 2, 3, 4}), 1),
        ([("restart",), *ask(4, 3, allowed={2, 3, 4})], 0),
        (ask(4, 3, 1, 2, allowed={1, 2, 3, 4}), 3),
        (ask(4, 3, system=1), 0),
    ],
)
def test_a_copy_is_placed_only_where_all_it_has_seen_is_allowed(steps: list[Any], num_placed: int) -> None:
    assert run(0.0, [*BEHIND, *steps]).num_placed == 1 + num_placed


def test_a_request_without_a_usable_copy_keeps_its_own() -> None:
    steps = [*BEHIND, *ask(4, 5), *ask(5, 3, allowed={3, 4, 5}), *ask(6, 3, allowed={3, 4, 5, 6})]
    reader = run(0.0, steps)
    seen = sorted(sorted(node.seen) for node in reader.tree if node.chunk_id == 3)
    assert seen == [[1, 2, 3], [3, 4, 5]], "two copies of 3, each with its own provenance"
    assert reader.num_placed == 3, "the last request places the second copy"


@pytest.mark.parametrize(("turn_at", "num_placed"), [(1, 1), (None, 0), (2, 1)])
def test_a_copy_that_has_seen_a_turn_is_placed_only_behind_that_turn(turn_at: int | None, num_placed: int) -> None:
    reader = run(0.0, [*ask(1, 2, turn_at=1), *ask(3, 2, 4, turn_at=turn_at)])
    assert reader.num_placed == num_placed
    detached = [node.chunk_id for node in reader.tree if node.detached_seen]
    assert not detached, "no detached node is kept behind a turn, or behind KV that has seen a turn"


def test_kv_that_has_seen_too_many_chunks_is_not_kept() -> None:
    """Each copy is placed before the next is computed, so that each has seen all before it."""
    reader, last = Reader(0.0), MAX_SEEN + 20
    reader.alive = set(range(1000, 1000 + last + 2))
    most = []
    for one, other in pairwise(range(1000, 1000 + last)):
        reader.begin([one, other], 0, None, None)
        reader.end(0)
        most.append(max(len(node.seen) for node in reader.tree))
    assert max(most) == MAX_SEEN
