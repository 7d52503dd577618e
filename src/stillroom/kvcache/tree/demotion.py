"""Moves the KV of evicted nodes down: from the device to the host, from the host to disk, from disk out of the tree.

A path may have thousands of nodes, as many as a prompt has pieces, so nothing here recurses along it.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, takewhile

from stillroom.core.count_min import CountMinSketch
from stillroom.core.kv import KVMover, Tier
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.stats import KVCacheStats
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.node_index import NodeIndex
from stillroom.kvcache.tree.tier_state import TierState
from stillroom.kvcache.tree.tree_options import TreeOptions


class Demoter:
    """Moves nodes from device to host to disk, and drops them. Not thread-safe: only the engine thread calls it."""

    def __init__(  # noqa: PLR0913  the parts of one tree
        self,
        nodes: NodeIndex,
        tiers: TierState,
        pool: BlockPool,
        mover: KVMover,
        options: TreeOptions,
        stats: KVCacheStats,
        now: Callable[[], float],
    ) -> None:
        self._nodes = nodes
        self._tiers = tiers
        self._pool = pool
        self._mover = mover
        self._options = options
        self._stats = stats
        self._now = now
        self._popularity = CountMinSketch(halve_every=100_000)

    def count_use(self, node: Node) -> None:
        """Count a use of a node for admission to the disk."""
        if self._options.admits_by_frequency:
            self._popularity.add(node.key)

    # Device

    def make_room(self, num_blocks: int) -> bool:
        """Evict from the device until this many blocks are free (RAGCache Algorithm 1, EVICT_IN_GPU).

        Returns:
            False, and nothing is evicted, if free and idle blocks together are too few.
        """
        if self._pool.num_free + self._tiers.num_idle_blocks < num_blocks:
            return False
        while self._pool.num_free < num_blocks:
            self._leave_device(self._pop_victim(Tier.DEVICE))
        return True

    def drop_device(self) -> None:
        """Remove all device copies. Precondition: no node is in use."""
        nodes = list(self._nodes)
        for node in nodes:
            assert node.num_users == 0
            if node.block_ids is not None:
                self._tiers.remove_device_copy(node)
        for node in nodes:
            if node.parent is None:
                self._settle_below(node)

    def copy_to_host(self, node: Node) -> bool:
        """Copy a node from the device to the host, if it is not there; False if there is no room."""
        if node.is_in(Tier.HOST):
            return True
        assert node.block_ids is not None
        if not self._make_host_room(node):
            return False
        if not self._mover.offload(replace(node.copy_in(Tier.DEVICE), bits=node.bits)):
            return False
        self._stats.offloads += 1
        self._tiers.add_copy(node, Tier.HOST)
        return True

    def _leave_device(self, node: Node) -> None:
        """Keep a copy on the host, else on disk; else drop the node and its subtree."""
        if not (self.copy_to_host(node) or node.is_in(Tier.DISK) or self.copy_to_disk(node)):
            self.drop(node)
            return
        self._tiers.remove_device_copy(node)
        if not node.is_in(Tier.HOST):
            self._settle_below(node)

    def _settle_below(self, node: Node) -> None:
        """Restore the order of tiers below a node that lost its device copy and may have lost its host copy.

        No descendant may stay in a faster tier than its parent, and a node without copies of its own is dropped.
        """
        left = [node]
        while left:
            node = left.pop()
            if node.tier in (None, Tier.NETWORK):
                self.drop(node)
                continue
            if node.tier is Tier.DISK:
                for child in node.children.values():
                    if child.is_in(Tier.HOST):
                        self._drop_copy(child, Tier.HOST)
            left += reversed(node.children.values())

    # Host

    def _make_host_room(self, node: Node) -> bool:
        size = self._tiers.size(node, Tier.HOST)
        if not self._tiers.may_hold(node, Tier.HOST):
            return False
        while not self._tiers.has_space(Tier.HOST, size):
            if not self._tiers.has_victim(Tier.HOST):
                return False
            self._leave_host(self._pop_victim(Tier.HOST))
        return True

    def _leave_host(self, node: Node) -> None:
        if not (node.is_in(Tier.DISK) or self.copy_to_disk(node)) and node.block_ids is None:
            self.drop(node)
            return
        self._drop_copy(node, Tier.HOST)

    # Disk

    def copy_to_disk(self, node: Node) -> bool:
        """Copy a node to disk, after its ancestors.

        Returns:
            False if the disk is full of nodes that are asked for more often, or cannot be written.
        """
        missing = self._missing_on_disk(node)
        if missing and (self._options.is_disk_read_only or not self._tiers.capacity(Tier.DISK)):
            return False
        try:
            for ancestor in reversed(missing):
                self._tiers.shield(ancestor.parent)  # a parent is not evicted to make room for its own child
                if not self._copy_one_to_disk(ancestor):
                    return False
        finally:
            self._tiers.shield(None)
        return True

    def fits_on_disk(self, node: Node) -> bool:
        """Whether a node and its ancestors that are not on disk fit there without an eviction."""
        return self._tiers.has_space(
            Tier.DISK, sum(self._tiers.size(ancestor, Tier.DISK) for ancestor in self._missing_on_disk(node))
        )

    def shrink_disk(self) -> None:
        """Evict from disk until its copies fit into its capacity."""
        while not self._tiers.has_space(Tier.DISK, 0):
            self._leave_disk(self._pop_victim(Tier.DISK))

    def _missing_on_disk(self, node: Node) -> list[Node]:
        """The node and its ancestors up to the first that is on disk, from the bottom."""
        return list(takewhile(lambda above: not above.is_in(Tier.DISK), chain((node,), node.ancestors())))

    def _copy_one_to_disk(self, node: Node) -> bool:
        source = Tier.DEVICE if node.block_ids is not None else Tier.HOST
        if not self._make_disk_room(node):
            return False
        if not self._mover.store(node.to_record(self._now()), source, node.block_ids or ()):
            return False
        self._stats.stores += 1
        self._tiers.add_copy(node, Tier.DISK)
        return True

    def _make_disk_room(self, node: Node) -> bool:
        size = self._tiers.size(node, Tier.DISK)
        if not self._tiers.may_hold(node, Tier.DISK):
            return False
        while not self._tiers.has_space(Tier.DISK, size):
            if not self._tiers.has_victim(Tier.DISK):
                return False
            if self._is_less_popular(node, self._tiers.next_victim(Tier.DISK)):
                self._stats.rejected += 1
                return False
            self._leave_disk(self._pop_victim(Tier.DISK))
        return True

    def _is_less_popular(self, node: Node, victim: Node) -> bool:
        """Whether admission by frequency refuses to displace the victim with the node."""
        popularity = self._popularity
        return self._options.admits_by_frequency and popularity.estimate(node.key) < popularity.estimate(victim.key)

    def _leave_disk(self, node: Node) -> None:
        if node.tier is Tier.DISK:  # a record in the shared tier is looked up again when a prompt needs it
            self.drop(node)
        else:
            self._drop_copy(node, Tier.DISK)

    # All tiers

    def drop(self, node: Node, *, has_failed: bool = False) -> None:
        """Drop a node and its subtree from every tier.

        Args:
            has_failed: remember that the node's copy was damaged.
        """
        found, left = [], [node]
        while left:
            found.append(left.pop())
            left += found[-1].children.values()
        for dropped in reversed(found):
            was_kept = dropped.tier is not Tier.NETWORK or has_failed
            if dropped.block_ids is not None:
                self._tiers.remove_device_copy(dropped)
            for tier in (Tier.HOST, Tier.DISK):
                if dropped.is_in(tier):
                    self._drop_copy(dropped, tier)
            if dropped.is_in(Tier.NETWORK):
                self._tiers.remove_copy(dropped, Tier.NETWORK)
            self._nodes.remove(dropped, has_failed=has_failed and dropped is node, was_kept=was_kept)
            self._stats.lost += was_kept

    def _drop_copy(self, node: Node, tier: Tier) -> None:
        self._tiers.remove_copy(node, tier)
        self._mover.drop(node.key, tier)

    def _pop_victim(self, tier: Tier) -> Node:
        node = self._tiers.next_victim(tier)
        if not node.is_used and tier is self._tiers.prepared_tier:
            self._stats.displaced_bytes += self._tiers.size(node, tier)
        self._tiers.advance_clock(node, tier)
        self._stats.evictions[tier] += 1
        return node
