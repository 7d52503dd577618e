"""A move that raises, as a device without memory does, leaves every block and every node accounted for."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from stillroom.core.ids import BlockId
from stillroom.core.kv import NodeCopy, NodeKey, Tier
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from tests.kvcache.kitchen import SIZE, TreeFixture
from tests.kvcache.prefix_memory import PrefixMemory


class Narrow(PrefixMemory):
    """A memory with no room for what a move needs."""

    moves: tuple[str, ...] = ()

    def offload(self, key: NodeKey, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        self._refuse("offload")
        return super().offload(key, block_ids, num_tokens)

    def load(self, key: NodeKey, source: Tier, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        self._refuse("load")
        return super().load(key, source, block_ids, num_tokens)

    def place(self, copy: NodeCopy, block_ids: Sequence[BlockId], first_position: int) -> bool:
        self._refuse("place")
        return super().place(copy, block_ids, first_position)

    def prefetch(self, key: NodeKey, num_tokens: int) -> bool:
        if self.expected:
            self._refuse("second expect")
        return super().prefetch(key, num_tokens)

    def _refuse(self, move: str) -> None:
        if move in self.moves:
            raise MemoryError(move)


def narrow() -> tuple[TreeFixture, Narrow]:
    kitchen = TreeFixture(8, host_bytes=20 * SIZE, disk_bytes=20 * SIZE)
    kitchen.memory = memory = Narrow(SIZE)
    kitchen.open()
    return kitchen, memory


@pytest.mark.parametrize("move", ["offload", "load"])
def test_a_request_whose_move_fails_holds_nothing(move: str) -> None:
    kitchen, memory = narrow()
    kitchen.serve(1, 2)
    if move == "load":
        assert kitchen.tree.make_room(8)
    memory.moves = (move,)
    lease = kitchen.lease(1, 2) if move == "load" else kitchen.lease(3, 4, 5, 6, 7)
    with pytest.raises(MemoryError):
        kitchen.admit(lease)
    kitchen.check(lease)
    assert not lease.table.block_ids and all(node.num_users == 0 for node in kitchen.tree)
    memory.moves = ()
    kitchen.serve(1, 2)
    kitchen.manager.lose_device()
    kitchen.check()


def test_a_request_whose_placement_fails_holds_nothing() -> None:
    kitchen, memory = narrow()
    assert kitchen.manager.reuse is not None
    kitchen.manager.reuse = replace(kitchen.manager.reuse, always_loads=True, anywhere=AnywhereOptions(0.1, "first"))
    kitchen.serve(1, 2)
    memory.moves = ("place",)
    lease = kitchen.lease(2, 1)
    with pytest.raises(MemoryError):
        kitchen.admit(lease)
    kitchen.check(lease)
    assert not lease.table.block_ids and all(node.num_users == 0 for node in kitchen.tree)
    assert kitchen.tree.make_room(8)


@pytest.mark.parametrize("is_placed", [False, True])
def test_a_request_for_which_reading_ahead_fails_holds_nothing(is_placed: bool) -> None:
    kitchen = TreeFixture(8, disk_bytes=20 * SIZE)
    kitchen.memory = memory = Narrow(SIZE)
    kitchen.open()
    assert kitchen.manager.reuse is not None
    kitchen.manager.reuse = replace(kitchen.manager.reuse, always_loads=True, anywhere=AnywhereOptions(0.1, "first"))
    kitchen.serve(1, 2)
    while kitchen.tree.store_next():
        pass
    assert kitchen.tree.make_room(8)
    lease = kitchen.lease(2, 1) if is_placed else kitchen.lease(1, 2)
    memory.moves = ("second expect",)
    with pytest.raises(MemoryError):
        kitchen.manager.protect(lease)
    kitchen.manager.release(lease)
    with pytest.raises(MemoryError):
        kitchen.admit(lease)
    kitchen.check(lease)
    assert not +memory.expected and all(node.num_users == 0 for node in kitchen.tree)
