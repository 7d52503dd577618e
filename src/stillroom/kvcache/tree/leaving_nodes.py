"""How nodes of the knowledge tree leave a tier: the device for the host, the host for the disk, the disk for good.

A path is as deep as a prompt has pieces, thousands maybe, so nothing here goes along it by recursion.
"""

from stillroom.core.kv import NodeRecord, Tier
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.tiered_nodes import TieredNodes


class LeavingNodes(TieredNodes):
    """Not thread-safe: the engine's loop is its only caller."""

    def _pop_victim(self, tier: Tier) -> Node:
        key, _ = self._leaves[tier].peek()
        node = self._nodes[key]
        self._clocks[tier] = max(self._clocks[tier], node.priority[tier])
        self.stats.evictions[tier] += 1
        return node

    def _leave_device(self, node: Node) -> None:
        """To the host, unless a copy is there; else to disk; else the node is gone, with what hangs from it."""
        if not (node.is_lower[Tier.HOST] or self._offload(node) or node.is_lower[Tier.DISK] or self._store(node)):
            self._forget(node)
            return
        self._take_from_device(node)
        if not node.is_lower[Tier.HOST]:
            self._sink(node)

    def _sink(self, node: Node) -> None:
        """A node that is not on the device may have lost its copy on the host: nothing below it may be faster than it
        is now."""
        left = [node]
        while left:
            node = left.pop()
            if node.tier is None:
                self._forget(node)
                continue
            if node.tier is Tier.DISK:
                for child in node.children.values():
                    if child.is_lower[Tier.HOST]:
                        self._remove_copy(child, Tier.HOST)
            left += reversed(node.children.values())

    def _offload(self, node: Node) -> bool:
        if node.is_lower[Tier.HOST]:
            return True
        assert node.block_ids is not None
        if not self._has_host_room(node):
            return False
        if not self.mover.offload(node.key, node.block_ids, node.num_tokens):
            return False
        self.stats.offloads += 1
        self._add_copy(node, Tier.HOST)
        return True

    def _has_host_room(self, node: Node) -> bool:
        size, capacity, leaves = self._size(node, Tier.HOST), self._capacity[Tier.HOST], self._leaves[Tier.HOST]
        if size > capacity:
            return False
        while self._used[Tier.HOST] + size > capacity:
            if not leaves:
                return False
            self._leave_host(self._pop_victim(Tier.HOST))
        return True

    def _leave_host(self, node: Node) -> None:
        if not (node.is_lower[Tier.DISK] or self._store(node)) and node.block_ids is None:
            self._forget(node)
            return
        self._remove_copy(node, Tier.HOST)

    def _store(self, node: Node) -> bool:
        """A copy on disk, after those above it; False if the disk is full of what is asked for more often, or cannot be
        written."""
        missing = self._missing_on_disk(node)
        if missing and (self.options.is_disk_read_only or not self._capacity[Tier.DISK]):
            return False
        try:
            for one in reversed(missing):
                self._shield(one.parent)  # so that it does not make room for its own child
                if not self._store_alone(one):
                    return False
        finally:
            self._shield(None)
        return True

    def _missing_on_disk(self, node: Node) -> list[Node]:
        """It and those above it that are not there, from the bottom."""
        missing, one = [], node
        while not one.is_lower[Tier.DISK]:
            missing.append(one)
            if one.parent is None:
                break
            one = one.parent
        return missing

    def _store_alone(self, node: Node) -> bool:
        source = Tier.DEVICE if node.block_ids is not None else Tier.HOST
        if not self._has_disk_room(node) or not self.mover.store(self._record(node), source, node.block_ids or ()):
            return False
        self.stats.stores += 1
        self._add_copy(node, Tier.DISK)
        return True

    def _has_disk_room(self, node: Node) -> bool:
        size, capacity, leaves = self._size(node, Tier.DISK), self._capacity[Tier.DISK], self._leaves[Tier.DISK]
        if size > capacity:
            return False
        while self._used[Tier.DISK] + size > capacity:
            if not leaves:
                return False
            if self._is_less_popular(node, self._nodes[leaves.peek()[0]]):
                self.stats.rejected += 1
                return False
            self._leave_disk(self._pop_victim(Tier.DISK))
        return True

    def _fits_on_disk(self, node: Node) -> bool:
        """Whether there is room for it and those above it that are not there."""
        size = sum(self._size(one, Tier.DISK) for one in self._missing_on_disk(node))
        return self._used[Tier.DISK] + size <= self._capacity[Tier.DISK]

    def _is_less_popular(self, node: Node, victim: Node) -> bool:
        """Admission: what is seldom asked for does not displace what is asked for more often."""
        popularity = self._popularity
        return self.options.admits_by_frequency and popularity.estimate(node.key) < popularity.estimate(victim.key)

    def _leave_disk(self, node: Node) -> None:
        if node.tier is Tier.DISK:
            self._forget(node)
        else:
            self._remove_copy(node, Tier.DISK)

    def _record(self, node: Node) -> NodeRecord:
        return NodeRecord(
            key=node.key,
            parent=node.key if node.parent is None else node.parent.key,
            first_position=node.first_position,
            num_tokens=node.num_tokens,
            chunk_id=node.chunk_id,
            avg_cost=node.avg_cost,
            frequency=node.frequency.value(self._now()),
            content=node.content,
            notes=b"" if node.mass is None else node.mass.to_bytes(),
            owner=node.owner,
            seen=tuple(sorted(node.seen)),
        )
