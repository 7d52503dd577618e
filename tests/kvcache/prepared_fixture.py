"""`PreparedFixture`: a manager that prepares documents and answers from them, over a simulated memory.

In the simulated memory each slot holds the hash of all tokens that its KV has seen. So a placed slot tells the exact
context of its copy, and each placement is compared with a hash of the system message and the copy's path.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from stillroom.core.clock import VirtualClock
from stillroom.core.ids import ChunkId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.reuse import Reason
from stillroom.errors import PreparedFullError
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.lease_admission import Reuse
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.cost_model import CostProfile, linear_profile
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import PrefixKeys
from stillroom.kvcache.tree.tree_options import TreeOptions
from tests.kvcache.prefix_memory import PrefixMemory, prefix_hash, step

SIZE = 4
"""Tokens per block, per chunk and per system message; one byte each."""
SYSTEM, QUESTION, LENGTH_OF_QUESTION = 200, 300, 2
PREPARED = AnywhereOptions(0.0, "first", only_prepared=True)
ANYWHERE = AnywhereOptions(0.0, "first")

Path = tuple[int, ...]


def text_of(chunk: int) -> int:
    """Return the token of a chunk's text; chunks 100 apart have equal texts."""
    return chunk % 100


@dataclass(frozen=True)
class Answered:
    """Where the KV of an admitted question came from."""

    num_exact: int
    """Chunks of the exact prefix."""
    copies: dict[int, Path]
    """Document path of the copy of each placed chunk."""
    reasons: list[Reason]
    """Of each segment."""
    num_computed: int
    """Tokens."""


@dataclass
class PreparedFixture:
    """A manager over a simulated memory, which can restart."""

    anywhere: AnywhereOptions | None = PREPARED
    num_blocks: int = 256
    profile: CostProfile = field(default_factory=lambda: linear_profile(0.0, 1.0, 0.0))
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = PrefixMemory(SIZE)
        self.open()

    def open(self) -> None:
        self.pool = BlockPool(self.num_blocks, SIZE)
        options = TreeOptions(replicates_system=False, **self.options)
        self.tree = KnowledgeTree(self.pool, self.memory, self.profile, options, VirtualClock().monotonic)
        keys = PrefixKeys(b"m", tail_tokens=SIZE)
        self.manager = KVCacheManager(self.pool, Reuse(self.tree, keys, anywhere=self.anywhere))

    def restart(self) -> None:
        """Stop and start again, with what is on disk."""
        on_disk = self.memory.lower[Tier.DISK]
        self.memory.slots.clear()
        self.memory.lower[Tier.HOST].clear()
        self.open()
        orphans = self.tree.restore([record for key, record in self.memory.records.items() if key in on_disk])
        assert orphans == []
        self.check()

    def check(self, *running: Lease) -> None:
        self.manager.check_integrity(running)

    def lease(self, chunks: Sequence[int], *, system: int = 0, **arguments: Any) -> Lease:
        segments = [Segment(SegmentKind.SYSTEM, (SYSTEM + system,) * SIZE)]
        segments += [Segment(SegmentKind.CHUNK, (text_of(one),) * SIZE, ChunkId(one)) for one in chunks]
        segments.append(Segment(SegmentKind.QUESTION, (QUESTION,) * LENGTH_OF_QUESTION))
        prompt = SegmentedPrompt(tuple(segments))
        return self.manager.new_lease(prompt, prompt.num_tokens + 4, **arguments)

    def admit(self, lease: Lease) -> int:
        num_cached = self.manager.try_admit(lease, [len(segment.token_ids) for segment in lease.prompt.segments])
        assert num_cached is not None
        self.check(lease)
        return num_cached

    # Preparing

    def preparing(self, window: Sequence[int], num_known: int = 0, **arguments: Any) -> Lease:
        return self.lease(window, prepares=frozenset(map(ChunkId, window[num_known:])), **arguments)

    def compute(self, lease: Lease, first: int, end: int) -> None:
        """Compute tokens behind an exact context, and keep what is complete after each."""
        slots, tokens = lease.table.slots.tolist(), lease.prompt.token_ids
        for position in range(first, end):
            before = prefix_hash(tokens[:position])
            assert position == 0 or self.memory.slots[slots[position - 1]] == before, "KV of another context"
            self.memory.slots[slots[position]] = step(before, tokens[position])
            self.manager.commit(lease, position + 1)
            self.check(lease)

    def prepare(
        self, window: Sequence[int], num_known: int = 0, *, num_tokens: int | None = None, **arguments: Any
    ) -> int:
        """Prepare a window, as far as its first `num_tokens` tokens; return how many tokens were computed."""
        lease = self.preparing(window, num_known, **arguments)
        num_cached = self.admit(lease)
        assert not lease.placements
        end = max(num_cached, lease.prompt.num_tokens if num_tokens is None else num_tokens)
        self.compute(lease, num_cached, end)
        self.manager.release(lease)
        self.check()
        return end - num_cached

    # Asking

    def ask(self, chunks: Sequence[int], document: Sequence[int] = (), **arguments: Any) -> Answered:
        """Answer a question from chunks, of which those in `document` stand there now in this order."""
        if document:
            places = {chunk: document.index(chunk) for chunk in chunks if chunk in document}
            ids = tuple(map(ChunkId, document))
            arguments["before"] = {ChunkId(chunk): ids[:place] for chunk, place in places.items()}
        lease = self.lease(chunks, **arguments)
        num_cached = self.admit(lease)
        slots, tokens = lease.table.slots.tolist(), lease.prompt.token_ids
        assert [self.memory.slots[slot] for slot in slots[:num_cached]] == _history(tokens[:num_cached])
        copies: dict[int, Path] = {}
        for placement in lease.placements:
            piece, path = lease.pieces[placement.piece_index], placement.node.document_path
            seen = [tokens[0]] * SIZE + [text_of(one) for one in path for _ in range(SIZE)]
            held = [self.memory.slots[slot] for slot in slots[piece.start : piece.end]]
            if path:
                assert held == [b"placed" + value for value in _history(seen)[-SIZE:]], "KV of another context"
            assert piece.chunk_id is not None
            copies[piece.chunk_id] = path
        num_computed = self._end(lease, num_cached)
        reasons = [segment.reason for segment in lease.reuse.segments] if lease.reuse else []
        return Answered(max(0, num_cached // SIZE - 1), copies, reasons, num_computed)

    def _end(self, lease: Lease, num_cached: int) -> int:
        """Compute the rest of a question, keep what may be kept, and release it; return the tokens computed."""
        slots, tokens = lease.table.slots.tolist(), lease.prompt.token_ids
        todo: Sequence[int] = range(num_cached, len(tokens))
        if lease.recompute is not None:
            todo = lease.recompute.to_compute(len(tokens)).tolist()
        for position in todo:
            before = self.memory.slots[slots[position - 1]] if position else b""
            self.memory.slots[slots[position]] = step(before, tokens[position])
        if lease.recompute is not None:
            self.manager.end_recompute(lease)
        self.manager.commit(lease, len(tokens))
        self.check(lease)
        self.manager.release(lease)
        self.check()
        return len(todo)

    # Looking

    def copies(self) -> list[Path]:
        """Return the document paths of all kept copies."""
        return sorted(node.document_path for node in self.tree if node.document_path)

    def copy(self, *path: int) -> Node:
        (node,) = [node for node in self.tree if node.document_path == path]
        return node

    def is_prepared(self, window: Sequence[int], num_known: int = 0, **arguments: Any) -> bool:
        try:
            return not self.manager.has_to_prepare(self.preparing(window, num_known, **arguments))
        except PreparedFullError:
            return False

    def exact(self, *chunks: int, system: int = 0) -> Node | None:
        return self.tree.get(self.lease(chunks, system=system).pieces[-1].key)

    def used(self, tier: Tier) -> set[bytes]:
        return {node.key for node in self.tree if node.is_used and node.is_in(tier)}

    def forget(self, removed: Collection[int], *running: Lease) -> int:
        gone = set(map(ChunkId, removed))
        num_dropped = self.manager.forget_chunks(lambda chunk_ids: chunk_ids - gone, running)
        self.check(*running)
        return num_dropped


def _history(tokens: Sequence[int]) -> list[bytes]:
    found, history = [], b""
    for token in tokens:
        history = step(history, token)
        found.append(history)
    return found


def prefixes(*window: int) -> list[Path]:
    return [window[: end + 1] for end in range(len(window))]
