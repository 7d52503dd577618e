"""Nodes whose KV is in the tier that several processes share, and which nodes this process copies there.

What the tier holds is not known but asked for each waiting sequence. A node is in `Tier.NETWORK` while a sequence that
found it there waits, so the tree never believes what the tier has evicted meanwhile. A node is copied to the tier at
its second use: most pieces of prompts are never used again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from stillroom.core.kv import FULL_BITS, OWN_TIERS, NodeKey, SharedKV, Tier
from stillroom.kvcache.tree.demotion import Demoter
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.node_index import NodeIndex
from stillroom.kvcache.tree.pieces import Piece
from stillroom.kvcache.tree.tier_state import TierState


class SharedNodes:
    """Not thread-safe: only the engine thread calls it."""

    def __init__(
        self, kv: SharedKV, nodes: NodeIndex, tiers: TierState, demoter: Demoter, now: Callable[[], float]
    ) -> None:
        """
        Args:
            now: seconds, never decreasing; for frequencies.
        """
        self.kv = kv
        self._nodes = nodes
        self._tiers = tiers
        self._demoter = demoter
        self._now = now
        self._num_waiting: Counter[NodeKey] = Counter()

    def attach(self, pieces: Sequence[Piece]) -> list[Node]:
        """Add nodes for consecutive pieces of a waiting sequence that the tier holds; each needs one `detach`.

        Returns:
            The nodes, up to the first piece whose KV this process has, or whose beginning of the prompt was evicted.
        """
        found: list[Node] = []
        for piece in pieces:
            node = self._nodes.get(piece.key)
            if node is None and (piece.start == 0 or self._nodes.get(piece.parent) is not None):
                node = self._nodes.attach(
                    piece.key,
                    piece.parent,
                    content=piece.content,
                    first_position=piece.start,
                    num_tokens=piece.num_tokens,
                    chunk_id=piece.chunk_id,
                    owner=piece.owner,
                )
                self._tiers.add_copy(node, Tier.NETWORK)
            if node is None or node.tier is not Tier.NETWORK:
                break
            self._num_waiting[piece.key] += 1
            found.append(node)
        return found

    def detach(self, keys: Iterable[NodeKey]) -> None:
        """Undo one `attach` of these nodes, the last of the prompt first. A node without another copy is dropped."""
        for key in keys:
            self._num_waiting[key] -= 1
            if self._num_waiting[key]:
                continue
            del self._num_waiting[key]
            node = self._nodes.get(key)
            if node is None or not node.is_in(Tier.NETWORK):
                continue
            if node.tier is Tier.NETWORK:
                self._demoter.drop(node)
            else:
                self._tiers.remove_copy(node, Tier.NETWORK)

    def is_usable(self, node: Node) -> bool:
        """Whether a node can be loaded without waiting for the tier."""
        return node.tier is not Tier.NETWORK or self.kv.is_fetched(node.key)

    def count_load(self, node: Node) -> None:
        """Record that a node's KV came from the tier."""
        node.is_shared = True
        self._nodes.unstored[node.key] = None

    def count_reuse(self, node: Node) -> None:
        """Record a use of a node that was used before: it is copied to the tier, from disk at once, else in an idle
        moment. Nodes without parent stay here: no other process would ask for their keys."""
        if node.is_shared or node.detached_seen or node.bits != FULL_BITS:
            return
        if node.is_in(Tier.DISK):
            self._share(node)
        else:
            self._nodes.unshared[node.key] = None

    def share_next(self) -> bool:
        """Queue one node for the tier; False if there is none."""
        while self._nodes.unshared:
            node = self._nodes.get(self._nodes.unshared.popitem(last=False)[0])
            if node is not None and not node.is_shared and node.tier is not Tier.NETWORK:
                self._share(node)
                return True
        return False

    def _share(self, node: Node) -> None:
        source = max(tier for tier in OWN_TIERS if node.is_in(tier))
        node.is_shared = self.kv.share(node.to_record(self._now()), source, node.block_ids or ())
