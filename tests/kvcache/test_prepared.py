"""KV of chunks in the context of their own document: which copies a prompt places, and which it keeps."""

from itertools import permutations

import pytest

from stillroom.core.ids import ChunkId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.reuse import Reason
from stillroom.errors import NonFiniteError, PreparedFullError
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from tests.kvcache.prefix_memory import prefix_hash
from tests.kvcache.prepared_fixture import (
    ANYWHERE,
    LENGTH_OF_QUESTION,
    PREPARED,
    QUESTION,
    SIZE,
    SYSTEM,
    Path,
    PreparedFixture,
    prefixes,
)


@pytest.mark.parametrize("chunks", list(permutations((1, 2, 3, 4))))
def test_a_prompt_in_any_order_places_the_copies_with_the_longest_context(chunks: Path) -> None:
    fixture = PreparedFixture()
    fixture.prepare((2, 3))
    fixture.prepare((1, 2, 3))
    fixture.prepare((3, 4), num_known=1)
    assert fixture.copies() == [(1,), (1, 2), (1, 2, 3), (2,), (2, 3), (3, 4)], "3 alone is known, so it is not kept"
    answered = fixture.ask(chunks, (1, 2, 3, 4))
    assert answered.copies == {1: (1,), 2: (1, 2), 3: (1, 2, 3), 4: (3, 4)}
    assert answered.reasons == [Reason.HIT, *[Reason.PREPARED] * 4, Reason.TAIL]
    assert answered.num_computed == LENGTH_OF_QUESTION and answered.num_exact == 0


def test_chunks_of_an_exact_prefix_are_not_placed() -> None:
    fixture = PreparedFixture()
    fixture.ask((2, 1), (1, 2, 3))
    fixture.prepare((1, 2, 3))
    answered = fixture.ask((2, 1, 3), (1, 2, 3))
    assert answered.num_exact == 2 and answered.copies == {3: (1, 2, 3)}
    assert answered.reasons == [*[Reason.HIT] * 3, Reason.PREPARED, Reason.TAIL]


def test_a_chunk_without_a_copy_is_computed_between_placed_ones() -> None:
    fixture = PreparedFixture()
    fixture.prepare((1, 2))
    answered = fixture.ask((2, 9, 1), (1, 2))
    assert answered.copies == {2: (1, 2), 1: (1,)} and answered.num_computed == SIZE + LENGTH_OF_QUESTION


def test_a_chunk_of_equal_text_in_another_place_does_not_take_the_copy() -> None:
    fixture = PreparedFixture()
    fixture.prepare((1, 2, 101))
    assert fixture.ask((101,), (1, 2, 101)).copies == {101: (1, 2, 101)}
    assert fixture.ask((201,), (201, 2)).copies == {}


def test_each_order_of_a_document_has_its_own_copy() -> None:
    fixture = PreparedFixture()
    fixture.prepare((3, 1, 2))
    fixture.prepare((1, 3, 2))
    assert fixture.ask((2,), (1, 3, 2)).copies == {2: (1, 3, 2)}
    assert fixture.ask((2,), (3, 1, 2)).copies == {2: (3, 1, 2)}


# Not placing


@pytest.fixture
def prepared() -> PreparedFixture:
    fixture = PreparedFixture()
    fixture.prepare((1, 2, 3))
    return fixture


def test_copies_behind_an_inserted_chunk_are_not_placed(prepared: PreparedFixture) -> None:
    assert prepared.ask((3, 2, 1), (1, 7, 2, 3)).copies == {1: (1,)}


def test_copies_from_a_window_that_begins_behind_the_inserted_chunk_are_placed(prepared: PreparedFixture) -> None:
    prepared.prepare((2, 3))
    assert prepared.ask((3, 2), (1, 7, 2, 3)).copies == {2: (2,), 3: (2, 3)}


def test_without_the_chunks_before_it_a_chunk_takes_only_a_copy_that_has_seen_none(prepared: PreparedFixture) -> None:
    assert prepared.ask((3, 2, 1)).copies == {1: (1,)}


def test_copies_behind_another_system_message_are_not_placed(prepared: PreparedFixture) -> None:
    assert prepared.ask((3, 2, 1), (1, 2, 3), system=1).copies == {}
    prepared.prepare((1, 2, 3), system=1)
    assert prepared.ask((2, 3), (1, 2, 3), system=1).copies == {2: (1, 2), 3: (1, 2, 3)}


def test_a_tenant_takes_no_copy_of_another(prepared: PreparedFixture) -> None:
    assert prepared.ask((3, 2, 1), (1, 2, 3), salt="other").copies == {}
    assert prepared.ask((3, 2, 1), (1, 2, 3)).copies == {1: (1,), 2: (1, 2), 3: (1, 2, 3)}


@pytest.mark.parametrize(
    ("chunks", "allowed", "copies"),
    [
        ((3,), {1, 2, 3}, {3: (1, 2, 3)}),
        ((3,), {2, 3}, {}),
        ((3,), {1, 2}, {3: (1, 2, 3)}),  # a request may see its own prompt
        ((3, 2, 1), set(), {1: (1,), 2: (1, 2), 3: (1, 2, 3)}),
        ((2, 3), {2, 3}, {}),
    ],
)
def test_a_copy_that_has_seen_a_forbidden_chunk_is_not_placed(
    prepared: PreparedFixture, chunks: Path, allowed: set[int], copies: dict[int, Path]
) -> None:
    answered = prepared.ask(chunks, (1, 2, 3), may_see=lambda ids: set(ids) <= allowed)
    assert answered.copies == copies


def test_a_shorter_context_is_placed_where_the_longest_is_forbidden(prepared: PreparedFixture) -> None:
    prepared.prepare((2, 3))
    assert prepared.ask((3,), (1, 2, 3), may_see=lambda ids: 1 not in ids).copies == {3: (2, 3)}


def test_a_request_that_may_not_place_computes_everything(prepared: PreparedFixture) -> None:
    answered = prepared.ask((3, 2), (1, 2, 3), may_place=False)
    assert answered.copies == {} and answered.num_computed == 2 * SIZE + LENGTH_OF_QUESTION
    assert prepared.copy(1, 2, 3).is_used is False


def test_prepared_copies_are_placed_in_no_other_mode(prepared: PreparedFixture) -> None:
    for options in (ANYWHERE, None):
        prepared.manager.allow_anywhere(options)
        assert prepared.ask((3, 2), (1, 2, 3), system=1).copies == {}
        assert prepared.ask((2, 1), (1, 2, 3)).copies == {}


def test_kv_of_questions_is_not_placed_in_this_mode() -> None:
    fixture = PreparedFixture(ANYWHERE)
    fixture.ask((1, 2))
    fixture.ask((2, 3))
    assert any(node.detached_seen for node in fixture.tree), "3 is kept behind a placed 2"
    fixture.manager.allow_anywhere(PREPARED)
    assert fixture.ask((4, 3, 2, 1), (1, 2, 3)).copies == {}


# Interrupted preparing


@pytest.mark.parametrize("anywhere", [PREPARED, ANYWHERE, None])
@pytest.mark.parametrize("num_tokens", range(0, 4 * SIZE + LENGTH_OF_QUESTION, 3))
def test_an_interrupted_prompt_goes_on_behind_the_chunks_that_it_has_kept(
    anywhere: AnywhereOptions | None, num_tokens: int
) -> None:
    fixture, window = PreparedFixture(anywhere), (1, 2, 3)
    assert not fixture.is_prepared(window)
    assert fixture.prepare(window, num_tokens=num_tokens) == num_tokens
    num_kept = num_tokens // SIZE * SIZE
    assert fixture.is_prepared(window) == (num_kept == 4 * SIZE)
    assert fixture.prepare(window) == 4 * SIZE + LENGTH_OF_QUESTION - num_kept
    assert fixture.is_prepared(window) and len(fixture.tree) == 4
    assert fixture.copies() == (prefixes(*window) if anywhere is PREPARED else [])


def test_an_interrupted_prompt_goes_on_with_chunks_from_lower_tiers() -> None:
    fixture = PreparedFixture(options={"host_bytes": 100, "unused_host_bytes": 100})
    fixture.prepare((1, 2, 3), num_tokens=3 * SIZE)
    assert fixture.tree.make_room(fixture.num_blocks)
    assert {node.tier for node in fixture.tree} == {Tier.HOST}
    assert fixture.prepare((1, 2, 3)) == SIZE + LENGTH_OF_QUESTION
    assert fixture.is_prepared((1, 2, 3)) and fixture.copy(1, 2).tier is Tier.DEVICE


def test_an_interrupted_window_with_known_chunks_computes_no_complete_chunk_twice() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 100, "unused_disk_bytes": 100})
    fixture.prepare((1, 2))
    assert fixture.prepare((2, 3, 4), num_known=1, num_tokens=3 * SIZE + 1) == 2 * SIZE + 1
    assert fixture.copies() == [(1,), (1, 2), (2,), (2, 3)] and not fixture.is_prepared((2, 3, 4), num_known=1)
    while fixture.manager.store_next():
        fixture.check()
    assert not fixture.copy(2).is_in(Tier.DISK) and fixture.tree.stats.prepared == 3, "it serves this window only"
    assert fixture.prepare((2, 3, 4), num_known=1) == SIZE + LENGTH_OF_QUESTION
    assert fixture.copies() == [(1,), (1, 2), (2, 3), (2, 3, 4)] and fixture.is_prepared((2, 3, 4), num_known=1)


def test_known_chunk_without_another_copy_stays() -> None:
    fixture = PreparedFixture()
    fixture.prepare((2, 3), num_known=1)
    assert fixture.copies() == [(2,), (2, 3)]
    fixture.prepare((1, 2), system=1)
    fixture.prepare((2, 4), num_known=1)
    assert fixture.copies() == [(1,), (1, 2), (2,), (2, 3), (2, 4)], "under another system message it has seen more"


@pytest.mark.parametrize("anywhere", [PREPARED, None])
def test_chunks_of_a_running_prompt_are_not_evicted(anywhere: AnywhereOptions | None) -> None:
    fixture = PreparedFixture(anywhere, num_blocks=8)
    lease = fixture.preparing((1, 2, 3))
    fixture.compute(lease, fixture.admit(lease), 3 * SIZE)
    assert fixture.tree.num_idle_blocks == 0 and not fixture.tree.make_room(4)
    fixture.manager.release(lease)
    fixture.check()
    assert fixture.tree.num_idle_blocks == 3 and fixture.tree.make_room(8)


def test_only_chunks_that_a_prompt_prepares_count_for_is_prepared(prepared: PreparedFixture) -> None:
    assert prepared.is_prepared((1, 2, 3)) and prepared.is_prepared((1, 2, 3), num_known=2)
    assert not prepared.is_prepared((2, 3)) and not prepared.is_prepared((1, 3))
    assert not prepared.is_prepared((1, 2, 3), system=1) and not prepared.is_prepared((1, 2, 3), salt="other")


def test_kv_that_is_not_finite_is_not_kept() -> None:
    fixture = PreparedFixture()
    fixture.memory.poisoned.add(prefix_hash([SYSTEM] * SIZE + [1] * SIZE + [2] * SIZE))
    lease = fixture.preparing((1, 2, 3))
    with pytest.raises(NonFiniteError):
        fixture.compute(lease, fixture.admit(lease), lease.prompt.num_tokens)
    fixture.manager.release(lease)
    fixture.check()
    assert fixture.copies() == [(1,)]


# Forgetting


def test_removing_a_chunk_drops_every_copy_that_has_seen_it_from_every_tier() -> None:
    fixture = PreparedFixture(options={"host_bytes": 100, "disk_bytes": 100, "unused_host_bytes": 100})
    fixture.prepare((1, 2, 3))
    fixture.prepare((3, 4), num_known=1)
    assert fixture.tree.make_room(fixture.num_blocks)
    fixture.prepare((5, 2))
    assert fixture.forget([2]) == 3
    assert fixture.copies() == [(1,), (3, 4), (5,)] and fixture.exact() is not None
    assert set(fixture.memory.lower[Tier.HOST]) == {node.key for node in fixture.tree if node.is_in(Tier.HOST)}


def test_removing_a_chunk_leaves_the_copies_of_other_tenants(prepared: PreparedFixture) -> None:
    prepared.prepare((1, 2), salt="other")
    assert prepared.forget([1]) == 3
    assert prepared.ask((2,), (1, 2), salt="other").copies == {2: (1, 2)}


@pytest.mark.parametrize("anywhere", [PREPARED, None])
@pytest.mark.parametrize("removed", [1, 2, 3, 4])
@pytest.mark.parametrize("num_done", [1, 2, 3, 4])
def test_a_running_prompt_keeps_nothing_behind_a_removed_chunk(
    anywhere: AnywhereOptions | None, removed: int, num_done: int
) -> None:
    fixture, window = PreparedFixture(anywhere), (1, 2, 3, 4)
    lease = fixture.preparing(window)
    fixture.admit(lease)
    fixture.compute(lease, 0, num_done * SIZE + 1)
    fixture.forget([removed], lease)
    fixture.compute(lease, num_done * SIZE + 1, lease.prompt.num_tokens)
    fixture.manager.release(lease)
    fixture.check()
    kept = sorted(node.seen for node in fixture.tree if node.chunk_id is not None)
    assert sorted(map(sorted, kept)) == [list(path) for path in prefixes(*window[: removed - 1])]


def test_a_resumed_prompt_keeps_nothing_behind_a_chunk_that_is_removed_while_it_runs() -> None:
    fixture = PreparedFixture()
    fixture.prepare((1, 2, 3, 4), num_tokens=4 * SIZE)
    lease = fixture.preparing((1, 2, 3, 4))
    num_cached = fixture.admit(lease)
    assert num_cached == 4 * SIZE
    assert fixture.forget([2], lease) == 2
    fixture.compute(lease, num_cached, lease.prompt.num_tokens)
    fixture.manager.release(lease)
    fixture.check()
    assert fixture.copies() == [(1,)]


def test_removing_a_tenant_drops_its_copies_and_keeps_nothing_of_a_running_prompt() -> None:
    fixture = PreparedFixture()
    lease = fixture.preparing((1, 2, 3))
    fixture.admit(lease)
    fixture.compute(lease, 0, 2 * SIZE)
    assert fixture.manager.forget_owner(lease.pieces[0].owner, [lease]) == 2
    fixture.compute(lease, 2 * SIZE, lease.prompt.num_tokens)
    fixture.manager.release(lease)
    fixture.check()
    assert len(fixture.tree) == 0


def test_preparing_takes_nothing_from_copies_of_other_contexts(prepared: PreparedFixture) -> None:
    assert prepared.prepare((2, 3)) == 2 * SIZE + LENGTH_OF_QUESTION
    assert prepared.prepare((1, 2, 4)) == SIZE + LENGTH_OF_QUESTION, "(1, 2) is kept in this context"


def test_a_chunk_at_the_beginning_of_a_prompt_without_system_message_is_restored_in_its_context() -> None:
    fixture = PreparedFixture(options={"disk_bytes": 100, "unused_disk_bytes": 100})
    chunks = [Segment(SegmentKind.CHUNK, (one,) * SIZE, ChunkId(one)) for one in (1, 2)]
    prompt = SegmentedPrompt((*chunks, Segment(SegmentKind.QUESTION, (QUESTION,) * LENGTH_OF_QUESTION)))
    lease = fixture.manager.new_lease(prompt, 14, prepares=frozenset(map(ChunkId, (1, 2))))
    fixture.admit(lease)
    fixture.compute(lease, 0, prompt.num_tokens)
    fixture.manager.release(lease)
    fixture.tree.flush()
    fixture.restart()
    assert fixture.copies() == [(1,), (1, 2)]


def test_a_long_end_of_a_preparing_prompt_is_not_kept() -> None:
    fixture = PreparedFixture()
    chunk = Segment(SegmentKind.CHUNK, (1,) * SIZE, ChunkId(1))
    system, end = Segment(SegmentKind.SYSTEM, (SYSTEM,) * SIZE), Segment(SegmentKind.QUESTION, (QUESTION,) * 3 * SIZE)
    lease = fixture.manager.new_lease(SegmentedPrompt((system, chunk, end)), 6 * SIZE, prepares=frozenset({ChunkId(1)}))
    fixture.admit(lease)
    fixture.compute(lease, 0, 5 * SIZE)
    fixture.manager.release(lease)
    assert len(fixture.tree) == 2 and fixture.copies() == [(1,)]


@pytest.mark.parametrize("anywhere", [PREPARED, None])
def test_a_window_is_refused_where_the_budget_has_no_room_for_what_is_missing(anywhere: AnywhereOptions | None) -> None:
    fixture = PreparedFixture(anywhere, options={"disk_bytes": 100, "unused_disk_bytes": 2 * SIZE})
    fixture.prepare((1, 2))
    fixture.tree.flush()
    assert not fixture.manager.has_to_prepare(fixture.preparing((1, 2))), "all of it is kept"
    with pytest.raises(PreparedFullError):
        fixture.manager.has_to_prepare(fixture.preparing((3,)))
    fixture.ask((1,), (1, 2))
    assert fixture.manager.has_to_prepare(fixture.preparing((3,))), "the first use freed room"
