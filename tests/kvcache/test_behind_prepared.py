"""KV that prompts compute behind prepared copies: kept for prompts that begin alike, and for no others."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.ids import ChunkId
from stillroom.core.kv import Tier
from stillroom.core.reuse import Reason
from tests.kvcache.prepared_fixture import ANYWHERE, LENGTH_OF_QUESTION, SIZE, Path, PreparedFixture

DOCUMENT = (1, 2, 3)


@pytest.fixture
def prepared() -> PreparedFixture:
    fixture = PreparedFixture(options={"host_bytes": 1000, "disk_bytes": 1000, "unused_disk_bytes": 1000})
    fixture.prepare(DOCUMENT)
    return fixture


def test_a_prompt_that_returns_computes_nothing_but_its_question(prepared: PreparedFixture) -> None:
    first = prepared.ask((2, 9, 1, 8), DOCUMENT)
    assert first.num_computed == 2 * SIZE + LENGTH_OF_QUESTION
    again = prepared.ask((2, 9, 1, 8), DOCUMENT)
    assert again.num_computed == LENGTH_OF_QUESTION
    assert again.copies == {2: (1, 2), 9: (), 1: (1,), 8: ()}
    kinds = [Reason.PREPARED, Reason.ANYWHERE, Reason.PREPARED, Reason.ANYWHERE]
    assert again.reasons[1:5] == kinds, "computed behind a copy is not prepared"


@pytest.mark.parametrize("chunks", [(1, 9, 8), (9, 2, 8), (2, 8, 9), (3, 9)])
def test_behind_anything_else_it_is_computed(prepared: PreparedFixture, chunks: Path) -> None:
    prepared.ask((2, 9, 8), DOCUMENT)
    assert () not in prepared.ask(chunks, DOCUMENT).copies.values()


def test_chunks_before_the_first_prepared_copy_are_an_exact_path(prepared: PreparedFixture) -> None:
    assert prepared.ask((9, 2, 8), DOCUMENT).copies == {2: (1, 2)}
    again = prepared.ask((9, 2, 8), DOCUMENT)
    assert again.num_exact == 1 and again.copies == {2: (1, 2), 8: ()}
    assert prepared.ask((9, 2, 8), DOCUMENT, system=1).copies == {}, "another system message"


def test_another_copy_before_it_is_another_context(prepared: PreparedFixture) -> None:
    prepared.ask((3, 9), DOCUMENT)
    prepared.prepare((2, 3))
    assert prepared.ask((3, 9), (2, 3)).copies == {3: (2, 3)}
    assert prepared.ask((3, 9), DOCUMENT).copies == {3: DOCUMENT, 9: ()}


def test_a_copy_in_its_document_is_preferred(prepared: PreparedFixture) -> None:
    prepared.ask((2, 9), DOCUMENT)
    prepared.prepare((9,))
    before = {ChunkId(2): (ChunkId(1),), ChunkId(9): ()}
    assert prepared.ask((2, 9), before=before).copies == {2: (1, 2), 9: (9,)}


def test_removing_a_chunk_that_a_copy_before_it_has_seen_drops_it(prepared: PreparedFixture) -> None:
    prepared.ask((2, 9), DOCUMENT)
    (kept,) = [node for node in prepared.tree if node.chunk_id == 9]
    assert kept.seen == {1, 2, 9}
    prepared.forget((1,))
    assert kept not in set(prepared.tree)


def test_it_returns_after_a_restart(prepared: PreparedFixture) -> None:
    prepared.ask((2, 9, 8), DOCUMENT)
    prepared.tree.flush()
    prepared.restart()
    assert prepared.ask((2, 9, 8), DOCUMENT).num_computed == LENGTH_OF_QUESTION


def test_it_is_loaded_from_the_host(prepared: PreparedFixture) -> None:
    prepared.options["unused_host_bytes"] = 1000
    prepared.ask((2, 9), DOCUMENT)
    prepared.tree.make_room(prepared.num_blocks)
    assert {node.tier for node in prepared.tree if node.chunk_id == 9} == {Tier.HOST}
    assert prepared.ask((2, 9), DOCUMENT).copies[9] == ()


def test_a_filter_that_forbids_what_it_has_seen_computes_it(prepared: PreparedFixture) -> None:
    prepared.ask((3, 9), DOCUMENT)
    answered = prepared.ask((3, 9), DOCUMENT, may_see=lambda chunk_ids: ChunkId(1) not in chunk_ids)
    assert answered.copies == {}


def test_the_mode_anywhere_does_not_take_it(prepared: PreparedFixture) -> None:
    prepared.ask((2, 9), DOCUMENT)
    prepared.manager.allow_anywhere(ANYWHERE)
    assert 9 not in prepared.ask((8, 9)).copies


ASKED = st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True)


@given(st.lists(st.one_of(ASKED, st.sampled_from([(1,), (1, 2), (1, 2, 3), (4,)])), max_size=12))
def test_it_is_found_exactly_by_prompts_that_begin_alike(steps: list[Sequence[int]]) -> None:
    """Lists ask; tuples prepare the beginnings of the documents (1, 2, 3) and (4, 5, 6)."""
    fixture = PreparedFixture()
    documents = {1: (1, 2, 3), 4: (4, 5, 6)}
    paths: set[Path] = set()
    exact: set[tuple[int, ...]] = set()
    kept: set[tuple[Any, ...]] = set()
    for chunks in steps:
        if isinstance(chunks, tuple):
            fixture.prepare(chunks)
            paths |= {chunks[:end] for end in range(1, len(chunks) + 1)}
            continue
        own = {one: document[: document.index(one) + 1] for document in documents.values() for one in document}
        before = {ChunkId(one): tuple(map(ChunkId, own[one][:-1])) for one in chunks}
        expected: dict[int, Path] = {}
        begun: tuple[Any, ...] = ()
        num_exact = max((end for end in range(len(chunks) + 1) if tuple(chunks[:end]) in exact), default=0)
        for at, one in enumerate(chunks):
            path = own[one] if own[one] in paths and at >= num_exact else None
            is_behind = any(name is not None for _, name in begun)
            begun = (*begun, (one, path))
            if path is not None:
                expected[one] = path
            elif is_behind and begun in kept:
                expected[one] = ()
            elif is_behind:
                kept.add(begun)
            else:
                exact.add(tuple(chunks[: at + 1]))
        assert fixture.ask(chunks, before=before).copies == expected
