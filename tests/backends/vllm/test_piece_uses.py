"""Which pieces the vLLM connector stores, and when."""

from stillroom.backends.vllm.piece_uses import PieceUses
from tests.kvstore.nodes import key


def test_piece_is_due_once() -> None:
    uses = PieceUses(3)
    assert [uses.use(key(1)) for _ in range(6)] == [False, False, True, False, False, False]
    assert PieceUses(1).use(key(1))


def test_piece_that_the_tier_holds_is_not_due_until_it_is_lost() -> None:
    uses = PieceUses(2)
    uses.found([key(1)])
    assert not uses.use(key(1)) and not uses.use(key(1))
    uses.lost([key(1), key(2)])
    assert uses.use(key(1)), "it has been used often"
    assert not uses.use(key(2)), "it was not known"


def test_least_recently_used_piece_is_forgotten() -> None:
    uses = PieceUses(2, max_pieces=2)
    assert not uses.use(key(1)) and not uses.use(key(2))
    assert uses.use(key(1))
    uses.use(key(3))  # in place of 2
    assert not uses.use(key(2)), "its first use was forgotten"
