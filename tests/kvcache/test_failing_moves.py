"""A move that raises, as on a device without memory, leaves blocks and nodes consistent."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from stillroom.core.ids import BlockId
from stillroom.core.kv import FULL_BITS, NodeCopy, NodeKey, Tier
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from tests.kvcache.prefix_memory import PrefixMemory
from tests.kvcache.tree_fixture import SIZE, TreeFixture


class Narrow(PrefixMemory):
    """A memory whose moves raise for lack of memory."""

    moves: tuple[str, ...] = ()

    def offload(self, copy: NodeCopy) -> bool:
        self._refuse("offload")
        return super().offload(copy)

    def load(self, key: NodeKey, source: Tier, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        self._refuse("load")
        return super().load(key, source, block_ids, num_tokens)

    def place(self, copy: NodeCopy, block_ids: Sequence[BlockId], first_position: int) -> bool:
        self._refuse("place")
        return super().place(copy, block_ids, first_position)

    def prefetch(self, key: NodeKey, num_tokens: int, bits: int = FULL_BITS) -> bool:
        if self.expected:
            self._refuse("second expect")
        return super().prefetch(key, num_tokens, bits)

    def _refuse(self, move: str) -> None:
        if move in self.moves:
            raise MemoryError(move)


def narrow() -> tuple[TreeFixture, Narrow]:
    fixture = TreeFixture(8, host_bytes=20 * SIZE, disk_bytes=20 * SIZE)
    fixture.memory = memory = Narrow(SIZE)
    fixture.open()
    return fixture, memory


@pytest.mark.parametrize("move", ["offload", "load"])
def test_a_request_whose_move_fails_holds_nothing(move: str) -> None:
    fixture, memory = narrow()
    fixture.serve(1, 2)
    if move == "load":
        assert fixture.tree.make_room(8)
    memory.moves = (move,)
    lease = fixture.lease(1, 2) if move == "load" else fixture.lease(3, 4, 5, 6, 7)
    with pytest.raises(MemoryError):
        fixture.admit(lease)
    fixture.check(lease)
    assert not lease.table.block_ids and all(node.num_users == 0 for node in fixture.tree)
    memory.moves = ()
    fixture.serve(1, 2)
    fixture.manager.lose_device()
    fixture.check()


def test_a_request_whose_placement_fails_holds_nothing() -> None:
    fixture, memory = narrow()
    assert fixture.manager.reuse is not None
    fixture.manager.reuse = replace(fixture.manager.reuse, always_loads=True, anywhere=AnywhereOptions(0.1, "first"))
    fixture.serve(1, 2)
    memory.moves = ("place",)
    lease = fixture.lease(2, 1)
    with pytest.raises(MemoryError):
        fixture.admit(lease)
    fixture.check(lease)
    assert not lease.table.block_ids and all(node.num_users == 0 for node in fixture.tree)
    assert fixture.tree.make_room(8)


@pytest.mark.parametrize("is_placed", [False, True])
def test_a_request_whose_prefetch_fails_holds_nothing(is_placed: bool) -> None:
    fixture = TreeFixture(8, disk_bytes=20 * SIZE)
    fixture.memory = memory = Narrow(SIZE)
    fixture.open()
    assert fixture.manager.reuse is not None
    fixture.manager.reuse = replace(fixture.manager.reuse, always_loads=True, anywhere=AnywhereOptions(0.1, "first"))
    fixture.serve(1, 2)
    while fixture.tree.store_next():
        pass
    assert fixture.tree.make_room(8)
    lease = fixture.lease(2, 1) if is_placed else fixture.lease(1, 2)
    memory.moves = ("second expect",)
    with pytest.raises(MemoryError):
        fixture.manager.protect(lease)
    fixture.manager.release(lease)
    with pytest.raises(MemoryError):
        fixture.admit(lease)
    fixture.check(lease)
    assert not +memory.expected and all(node.num_users == 0 for node in fixture.tree)
