"""The nodes of the knowledge tree by key and by content, their parents and children, and which were dropped lately."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stillroom.core.ids import ChunkId
from stillroom.core.kv import FULL_BITS, NodeKey, OwnerTag
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvcache.tree.node import Node, WindowedCount
from stillroom.kvcache.tree.provenance import Context

_NUM_REMEMBERED = 65_536
"""Dropped nodes that are remembered, about 300 bytes each: to report `evicted` and not `never seen`, and for heat."""


@dataclass(frozen=True, slots=True)
class _Dropped:
    """Memory of a node without copies."""

    has_failed: bool
    """Its record was damaged."""
    heat: float
    content: bytes


class NodeIndex:
    """Nodes that have a copy in some tier. Moves no KV."""

    def __init__(self, profile: CostProfile, window_seconds: float, now: Callable[[], float]) -> None:
        """
        Args:
            window_seconds: of each node's frequency.
            now: seconds, never decreasing.
        """
        self._profile = profile
        self._window_seconds = window_seconds
        self._now = now
        self._nodes: dict[NodeKey, Node] = {}
        self._by_content: dict[bytes, dict[NodeKey, Node]] = {}
        self._dropped: OrderedDict[NodeKey, _Dropped] = OrderedDict()  # oldest first
        self._dropped_detached: dict[bytes, NodeKey] = {}
        """By content, the detached node that was dropped last: its key names a context that no prompt needs to have."""
        self.unstored: OrderedDict[NodeKey, None] = OrderedDict()
        """Keys of nodes that may not be on disk yet, oldest first."""
        self.unshared: OrderedDict[NodeKey, None] = OrderedDict()
        """Keys of nodes that shall be copied to the shared tier, oldest first."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __contains__(self, node: Node) -> bool:
        return self._nodes.get(node.key) is node

    def get(self, key: NodeKey) -> Node | None:
        return self._nodes.get(key)

    def variants(self, content: bytes) -> list[Node]:
        """All nodes with the same tokens, model and tenant, whatever stood before them."""
        return list(self._by_content.get(content, {}).values())

    def was_dropped(self, key: NodeKey) -> bool:
        """Whether a node of this key was dropped lately."""
        return key in self._dropped

    def has_failed(self, key: NodeKey) -> bool:
        """Whether a node of this key was dropped lately because its copy was damaged."""
        dropped = self._dropped.get(key)
        return dropped is not None and dropped.has_failed

    def has_failed_detached(self, content: bytes) -> bool:
        """Whether, of the detached nodes of this content, the one that was dropped last had a damaged copy."""
        key = self._dropped_detached.get(content)
        return key is not None and self.has_failed(key)

    def attach(  # noqa: PLR0913  plain values, given once
        self,
        key: NodeKey,
        parent_key: NodeKey,
        *,
        content: bytes,
        first_position: int,
        num_tokens: int,
        chunk_id: ChunkId | None,
        owner: OwnerTag,
        context: Context | None = None,
        bits: int = FULL_BITS,
    ) -> Node:
        """Add a node without copies under its parent.

        Args:
            parent_key: key of no node for the first piece of a prompt.
            context: of a detached node, which has no parent because its KV is not exactly that of any path.
            bits: of each number on host and disk.
        """
        parent = self._nodes.get(parent_key) if context is None else None
        assert context is not None or (parent is None) == (first_position == 0)
        if context is not None:
            before = context.before
        else:
            before = parent.before if parent is not None else ()
            before += () if parent is None or parent.chunk_id is None else (parent.content,)
        node = Node(
            key,
            parent,
            content=content,
            before=before,
            detached_seen=frozenset() if context is None else context.seen,
            document_path=() if context is None else context.document_path,
            first_position=first_position,
            num_tokens=num_tokens,
            chunk_id=chunk_id,
            owner=owner,
            bits=bits,
            frequency=WindowedCount(self._window_seconds, self._now()),
            cost_alone=self._profile.prefill_seconds(0, num_tokens) / num_tokens,
            cost_here=self._cost_here(first_position, num_tokens),
        )
        self._nodes[key] = node
        if parent is not None:
            parent.children[key] = node
        self._by_content.setdefault(content, {})[key] = node
        if key in self._dropped:
            node.heat = self._forget(key).heat
        return node

    def remove(self, node: Node, *, has_failed: bool, was_kept: bool = True) -> None:
        """Remove a node that has neither copies nor children, and remember that it was dropped.

        Args:
            was_kept: False: its KV was only in the shared tier; then only its uses are remembered.
        """
        del self._nodes[node.key]
        if node.parent is not None:
            del node.parent.children[node.key]
        variants = self._by_content[node.content]
        del variants[node.key]
        if not variants:
            del self._by_content[node.content]
        self.unstored.pop(node.key, None)
        self.unshared.pop(node.key, None)
        if not was_kept and not node.is_used:
            return
        self._dropped[node.key] = _Dropped(has_failed, node.heat, node.content)
        if node.detached_seen:
            self._dropped_detached[node.content] = node.key
        if len(self._dropped) > _NUM_REMEMBERED:
            self._forget(next(iter(self._dropped)))

    def _forget(self, key: NodeKey) -> _Dropped:
        """Forget that a node was dropped; return what is known of it."""
        dropped = self._dropped.pop(key)
        if self._dropped_detached.get(dropped.content) == key:
            del self._dropped_detached[dropped.content]
        return dropped

    def check_integrity(self) -> None:
        """Check the links of parents and children, and that both maps hold the same nodes."""
        for node in self:
            parent = node.parent
            assert parent is None or (parent in self and parent.children[node.key] is node)
            assert not node.detached_seen or (
                parent is None and not node.children and node.chunk_id in node.detached_seen
            )
        by_content = [node for variants in self._by_content.values() for node in variants.values()]
        assert len(by_content) == len(self) and all(node in self for node in by_content)
        assert self._dropped.keys() >= set(self._dropped_detached.values())

    def _cost_here(self, first_position: int, num_tokens: int) -> float:
        """Seconds per token that a prefill takes longer with these tokens, measured with one more token behind them.

        The difference leaves out a step's fixed time.
        """
        with_kv = self._profile.prefill_seconds(first_position + num_tokens, 1)
        return max(self._profile.prefill_seconds(first_position, num_tokens + 1) - with_kv, 1e-12) / num_tokens
