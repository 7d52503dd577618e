"""A node of the knowledge tree: one piece of a prompt after one exact sequence of pieces, and where its KV is."""

import math
from collections.abc import Iterator

from stillroom.core.ids import BlockId, ChunkId
from stillroom.core.kv import FULL_BITS, NO_TENANT, NodeCopy, NodeKey, NodeRecord, OwnerTag, Tier
from stillroom.kvcache.tree.chunk_scores import ContextMass

_NUM_TIERS = len(Tier)


class WindowedCount:
    """Approximate number of uses within the last `window_seconds`.

    Counts this window, and the previous one by the share that still lies within reach, as if its uses were evenly
    spread. An infinite window counts all uses.
    """

    __slots__ = ("_before", "_now", "_start", "_window")

    def __init__(self, window_seconds: float, now: float) -> None:
        self._window = window_seconds
        self._start = now
        self._before = 0.0
        self._now = 0.0

    def add(self, now: float, count: float = 1.0) -> None:
        self._roll(now)
        self._now += count

    def value(self, now: float) -> float:
        self._roll(now)
        share = 1.0 - (now - self._start) / self._window
        return self._now + self._before * share

    def _roll(self, now: float) -> None:
        if now - self._start < self._window:
            return
        is_next = now - self._start < 2 * self._window
        self._before = self._now if is_next else 0.0
        self._now = 0.0
        self._start = self._start + self._window if is_next else now


class Node:
    """Changed by the knowledge tree only."""

    __slots__ = (
        "avg_cost",
        "before",
        "bits",
        "block_ids",
        "children",
        "chunk_id",
        "content",
        "cost_alone",
        "cost_here",
        "depth",
        "disk_bytes",
        "document_path",
        "first_position",
        "frequency",
        "heat",
        "is_shared",
        "key",
        "mass",
        "num_children_in",
        "num_computed",
        "num_tokens",
        "num_users",
        "owner",
        "parent",
        "priority",
        "recency",
        "reusability",
        "detached_seen",
        "tiers",
    )

    def __init__(  # noqa: PLR0913  plain values, given once
        self,
        key: NodeKey,
        parent: "Node | None",
        *,
        content: bytes,
        before: tuple[bytes, ...] = (),
        detached_seen: frozenset[ChunkId] = frozenset(),
        document_path: tuple[ChunkId, ...] = (),
        first_position: int,
        num_tokens: int,
        chunk_id: ChunkId | None,
        owner: OwnerTag = NO_TENANT,
        bits: int = FULL_BITS,
        frequency: WindowedCount,
        cost_alone: float,
        cost_here: float,
    ) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[NodeKey, Node] = {}
        self.content = content
        """Hash of model, tenant and its tokens, independent of position."""
        self.before = before
        """Contents of the chunks before it when its KV was computed, in order, as far as is known."""
        self.detached_seen = detached_seen
        """Chunks whose text the KV of a detached node has seen, its own included; empty for a node on a path."""
        self.document_path = document_path
        """For KV in its document's context: the chunks of the document that it has seen, in order, its own last."""
        self.first_position = first_position
        self.num_tokens = num_tokens
        self.chunk_id = chunk_id
        self.owner = owner
        self.bits = bits
        """Of each number in its copies on host and disk (`NodeRecord.bits`)."""
        self.block_ids: list[BlockId] | None = None
        """Its blocks on the device, to which the tree holds one reference; None if it is not there."""
        self.tiers: tuple[Tier, ...] = ()
        """Where it has a copy, the fastest first. In the shared tier: one that waiting sequences look for."""
        self.is_shared = False
        """Whether its KV came from the shared tier, or was queued for it."""
        self.disk_bytes = 0
        """Size of the copy on disk, while there is one."""
        self.num_users = 0
        """Running sequences whose prompt begins with this path. No copy of a node in use is evicted."""
        self.num_children_in = [0] * _NUM_TIERS
        """By tier: children with a copy there."""
        self.depth: int = (0 if parent is None else parent.depth) + (chunk_id is not None)
        """Chunks on its path, itself included; pieces without a chunk do not count."""
        self.heat = -math.inf
        """log2 of its uses, where a use counts twice as much as a use that is a half-life older; see `add_use`."""
        self.mass: ContextMass | None = None
        """What its tokens attended to when it was computed; None if that was not measured."""
        self.reusability = 0.0
        """f_r: the sum of 1 / CFO over its placements (Cache-Craft 3.3)."""
        self.frequency = frequency
        self.avg_cost = cost_alone
        self.num_computed = 0
        """Requests over which `avg_cost` is the mean."""
        self.cost_alone = cost_alone
        self.cost_here = cost_here
        self.recency = 0
        self.priority = [0.0] * _NUM_TIERS
        """By tier, at its last use."""

    def is_in(self, tier: Tier) -> bool:
        """Whether a copy is in this tier."""
        return tier in self.tiers

    def copy_in(self, tier: Tier) -> NodeCopy:
        """Describe its copy in a tier."""
        bits = FULL_BITS if tier is Tier.DEVICE else self.bits
        return NodeCopy(self.key, tier, self.block_ids or (), self.first_position, self.num_tokens, bits)

    @property
    def tier(self) -> Tier | None:
        """The fastest tier with a copy; None without copies."""
        return self.tiers[0] if self.tiers else None

    @property
    def seen(self) -> set[ChunkId]:
        """The chunks whose text its KV has seen, its own included."""
        if self.detached_seen:
            return set(self.detached_seen)
        return {node.chunk_id for node in (self, *self.ancestors()) if node.chunk_id is not None}

    def ancestors(self) -> "Iterator[Node]":
        """Yield the nodes above it on its path, nearest first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    @property
    def is_used(self) -> bool:
        """Whether any request has used it; prepared KV starts without a use."""
        return self.heat > -math.inf

    def add_use(self, half_lives: float) -> None:
        """Count a use in `heat`.

        Later uses count more, by 2 ** half_lives, so heat changes only when the node is used and can be a sort key
        (LRFU, Lee et al. 2001).

        Args:
            half_lives: elapsed until now.
        """
        high, low = max(self.heat, half_lives), min(self.heat, half_lives)
        self.heat = high + math.log2(1.0 + 2.0 ** (low - high))

    def add_cost(self, seconds_per_token: float) -> None:
        """Add a request that computed it to the mean cost (RAGCache Algorithm 1, lines 10 to 12)."""
        self.num_computed += 1
        self.avg_cost += (seconds_per_token - self.avg_cost) / self.num_computed

    def to_record(self, now: float) -> NodeRecord:
        """Return what is stored with the KV on disk."""
        return NodeRecord(
            key=self.key,
            parent=self.key if self.parent is None else self.parent.key,
            first_position=self.first_position,
            num_tokens=self.num_tokens,
            chunk_id=self.chunk_id,
            avg_cost=self.avg_cost,
            frequency=self.frequency.value(now),
            content=self.content,
            notes=b"" if self.mass is None else self.mass.to_bytes(),
            owner=self.owner,
            seen=self.document_path or tuple(sorted(self.seen)),
            is_used=self.is_used,
            is_in_document=bool(self.document_path),
            bits=self.bits,
        )
