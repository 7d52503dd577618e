"""Names of prompts that are sent elsewhere: equal exactly as far as the prompts are."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.backends.conversation import Exchange, History, Turn
from stillroom.backends.prompt_names import RAW_PIECE, Part, parts_of_question, parts_of_raw, request_of
from stillroom.core.document import Chunk, ScoredChunk
from stillroom.core.ids import ChunkId, DocumentId

PARTS = st.lists(st.builds(Part, st.sampled_from(["", "a", "b", "ab", "\ud800"]), st.booleans()), max_size=6)


def num_common(first: Sequence[object], second: Sequence[object]) -> int:
    return next((place for place, (one, two) in enumerate(zip(first, second, strict=False)) if one != two), 10**6)


@settings(max_examples=40)
@given(PARTS, PARTS)
def test_names_are_equal_as_far_as_the_texts_are(first: list[Part], second: list[Part]) -> None:
    named = [[piece.key for piece in request_of(parts, "t").pieces] for parts in (first, second)]
    texts = [[part.text for part in parts] for parts in (first, second)]

    assert num_common(*named) == num_common(*texts)
    contents = {piece.content for parts in (first, second) for piece in request_of(parts, "t").pieces}
    assert len(contents) == len({text for parts in texts for text in parts})


def test_tenants_share_no_names() -> None:
    parts = [Part("system"), Part("document", is_chunk=True)]
    one, other = (request_of(parts, salt).pieces for salt in ("one", "other"))
    assert not {name for piece in one for name in (piece.key, piece.content)} & {
        name for piece in other for name in (piece.key, piece.content)
    }


def chunks_of(*numbers: int) -> list[Chunk]:
    return [Chunk(ChunkId(one), DocumentId(str(one)), 0, f"text {one}") for one in numbers]


def test_follow_up_begins_with_the_names_of_the_turn_before() -> None:
    before = request_of(parts_of_question(chunks_of(2, 1), "why?", History(system="Be brief.")), "")
    turn = Turn(Exchange("why?", "because"), tuple(ScoredChunk(one, 1.0) for one in chunks_of(2, 1)))
    after = request_of(parts_of_question(chunks_of(1, 3), "and?", History((turn,), system="Be brief.")), "")

    assert after.pieces[: len(before.pieces)] == before.pieces
    assert [piece.is_chunk for piece in after.pieces] == [False, True, True, False, False, True, False]
    assert len(before.chunks) == 2 and len(after.chunks) == 3


@pytest.mark.parametrize("prompt", ["abcd" * 700, tuple(range(700))])
def test_raw_prompts_are_cut_into_equal_pieces(prompt: str | tuple[int, ...]) -> None:
    parts = parts_of_raw(prompt)
    assert len(parts) == len(prompt) // (RAW_PIECE if isinstance(prompt, str) else RAW_PIECE // 4) == 2
    changed = parts_of_raw(prompt[:-1] if isinstance(prompt, str) else (*prompt[:300], 0, *prompt[301:]))
    assert num_common(parts, changed) == (10**6 if isinstance(prompt, str) else 1)
