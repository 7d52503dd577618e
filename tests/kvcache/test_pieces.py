"""Keys of pieces: equal exactly for equal tokens after equal tokens."""

from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.ids import ChunkId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.kvcache.tree.pieces import PrefixKeys

KEYS = PrefixKeys(b"model", tail_tokens=4)
Segments = list[list[int]]
segments = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=4)


def prompt(parts: Segments) -> SegmentedPrompt:
    kinds = [SegmentKind.SYSTEM, *[SegmentKind.CHUNK] * len(parts)][: len(parts)]
    return SegmentedPrompt(
        tuple(Segment(kind, tuple(part), ChunkId(i)) for i, (kind, part) in enumerate(zip(kinds, parts, strict=True)))
    )


def cuts(parts: Segments) -> list[list[int]]:
    """The pieces' tokens by the rule in words: whole segments, then the last one in fours, never its last token."""
    found = [list(part) for part in parts[:-1]]
    rest = list(parts[-1])
    while len(rest) > 4:
        found.append(rest[:4])
        rest = rest[4:]
    return found


@given(segments)
def test_pieces_are_whole_segments_and_the_last_one_in_fours(parts: Segments) -> None:
    pieces = KEYS.pieces(prompt(parts))
    tokens = prompt(parts).token_ids
    assert [list(tokens[piece.start : piece.end]) for piece in pieces] == cuts(parts)
    assert all(before.key == piece.parent for before, piece in zip(pieces, pieces[1:], strict=False))
    assert not pieces or pieces[0].parent == KEYS.root()
    assert not pieces or pieces[-1].end < len(tokens)


@given(segments, segments)
def test_two_pieces_have_equal_keys_exactly_if_all_cuts_up_to_them_agree(one: Segments, other: Segments) -> None:
    first, second = KEYS.pieces(prompt(one)), KEYS.pieces(prompt(other))
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        assert (left.key == right.key) == (cuts(one)[: index + 1] == cuts(other)[: index + 1])
        assert (left.content == right.content) == (cuts(one)[index] == cuts(other)[index])


def test_model_and_tenant_are_part_of_every_key() -> None:
    names = {
        keys.pieces(prompt([[1, 2], [3]]), salt)[0].key
        for keys in (KEYS, PrefixKeys(b"other", tail_tokens=4))
        for salt in ("", "tenant")
    }
    assert len(names) == 4


def test_fingerprint_and_salt_of_a_root_cannot_be_confused() -> None:
    assert PrefixKeys(b"a", 4).root("bc") != PrefixKeys(b"ab", 4).root("c")
