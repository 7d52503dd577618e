"""Completing a prompt with placed chunks, and choosing the copy of a chunk."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.config.settings import TokenSelector
from stillroom.core.ids import BlockId, ChunkId
from stillroom.core.kv import NodeKey, Tier
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions, Reusability, best_variant, context_overlap, reusability
from stillroom.kvcache.chunk_reuse.recompute import PlacedChunk, SelectiveRecompute
from stillroom.kvcache.tree.chunk_scores import ContextMass
from stillroom.kvcache.tree.cost_model import CostProfile, linear_profile
from stillroom.kvcache.tree.node import Node, WindowedCount
from tests.kvcache.prepared_fixture import PreparedFixture

UNLIKE = Reusability(0.0, 0.8)


def unlike(*positions: range) -> list[PlacedChunk]:
    return [PlacedChunk(one, UNLIKE) for one in positions]


@given(
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(0, 4),
    st.integers(1, 6),
    st.floats(0, 1),
    st.sampled_from(("question", "first", "random", "deviation")),
)
def test_every_token_is_exact_placed_or_computed(
    num_exact: int, chunks: list[tuple[int, int]], gap: int, tail: int, ratio: float, selector: TokenSelector
) -> None:
    placed, end = [], num_exact
    for before, length in chunks:
        placed.append(range(end + before, end + before + length))
        end = placed[-1].stop
    question, total = end + gap, end + gap + tail
    recompute = SelectiveRecompute(num_exact, unlike(*placed), question, AnywhereOptions(ratio, selector))
    known = [*range(num_exact), *(position for chunk in placed for position in chunk)]
    assert recompute.context.tolist() == known
    if recompute.needs_query_pass:
        assert recompute.num_chosen() == [0] * len(placed)
        looking = recompute.query_pass_positions(total, budget=3)
        assert looking.tolist() == list(range(max(question, total - 3), total))
        recompute.take_attention(np.random.default_rng(0).random((3, 2, len(known) + len(looking)), dtype=np.float32))
    while recompute.needs_deviation_pass:
        probed = recompute.deviation_pass_positions(total, budget=7)
        assert num_exact <= probed.start < probed.stop <= total
        recompute.take_deviations(np.random.default_rng(probed.start).random(len(probed), dtype=np.float32), total)
    assert recompute.is_planned
    computed = recompute.to_compute(total).tolist()
    num_placed = sum(map(len, placed))
    assert sum(recompute.num_chosen()) == min(num_placed, int(np.ceil(ratio * num_placed - 1e-9)))
    assert len(computed) == total - len(known) + sum(recompute.num_chosen())
    assert set(range(total)) - set(known) <= set(computed) and set(computed).isdisjoint(range(num_exact))
    for chunk, count in zip(placed, recompute.num_chosen(), strict=True):
        assert len(set(chunk) & set(computed)) == count


def test_the_query_pass_ranks_placed_tokens_only() -> None:
    recompute = SelectiveRecompute(2, unlike(range(2, 4), range(6, 8)), 8, AnywhereOptions(0.25, "question"))
    attention = np.zeros((2, 2, 8), np.float32)  # two exact tokens, four placed, two of the question
    attention[:, 0] = [[9, 9, 0.0, 0.3, 0.4, 0.3, 9, 9], [9, 9, 0.2, 0.1, 0.4, 0.3, 9, 9]]
    recompute.take_attention(attention)
    assert recompute.to_compute(10).tolist() == [4, 5, 6, 8, 9]


@pytest.mark.parametrize(("ratio", "has_choice"), [(0.0, False), (0.15, True), (1.0, False)])
def test_no_query_pass_runs_where_there_is_no_choice(ratio: float, has_choice: bool) -> None:
    def new(selector: TokenSelector, window: int = 0) -> SelectiveRecompute:
        return SelectiveRecompute(2, unlike(range(2, 12)), 12, AnywhereOptions(ratio, selector, focus_window=window))

    assert (
        new("question").needs_query_pass
        is new("question_mean").needs_query_pass
        is new("first", 2).needs_query_pass
        is has_choice
    )
    assert (
        not new("first").needs_query_pass
        and not new("random").needs_query_pass
        and not new("deviation").needs_query_pass
    )
    assert new("deviation").needs_deviation_pass is has_choice and not new("first").needs_deviation_pass
    assert new("first").is_planned and new("question").is_planned is not has_choice


def test_each_chunk_has_its_own_budget() -> None:
    """Cache-Craft's N = ceil(CFO |C|)."""
    like, half = PlacedChunk(range(10), Reusability(1.0, 0.9)), PlacedChunk(range(10, 20), Reusability(0.5, 0.6))
    unknown = PlacedChunk(range(20, 30), Reusability(0.0, None))
    for alpha, counts in ((1.0, [0, 3, 8]), (0.5, [0, 2, 4]), (2.0, [0, 6, 10]), (0.0, [0, 0, 0])):
        recompute = SelectiveRecompute(0, [like, half, unknown], 30, AnywhereOptions(0.15, "first", alpha))
        assert recompute.num_chosen() == counts, alpha


def test_the_deviation_pass_ranks_placed_tokens_only() -> None:
    recompute = SelectiveRecompute(1, unlike(range(1, 4), range(6, 8)), 8, AnywhereOptions(0.4, "deviation"))
    assert list(recompute.deviation_pass_positions(9, 5)) == [1, 2, 3, 4, 5]
    recompute.take_deviations(np.array([0, 3, 1, 9, 9], np.float32), 9)
    assert recompute.needs_deviation_pass and list(recompute.deviation_pass_positions(9, 5)) == [6, 7, 8]
    recompute.take_deviations(np.array([2, 0, 9], np.float32), 9)
    assert recompute.is_planned and recompute.to_compute(9).tolist() == [2, 4, 5, 6, 8]


def test_chunks_out_of_focus_are_not_recomputed() -> None:
    """Four chunks of five tokens; the question attends to the last, in every layer."""
    placed = [range(start, start + 5) for start in (0, 5, 10, 15)]
    for selector in ("first", "question"):
        options = AnywhereOptions(0.4, selector, focus_window=2)
        recompute = SelectiveRecompute(0, unlike(*placed), 20, options)
        attention = np.repeat(np.array([0.05, 0.1, 0.02, 1.1], np.float32), 5)
        recompute.take_attention(np.tile(np.append(attention, [9.0, 9.0]).astype(np.float32), (3, 2, 1)))
        assert recompute.num_chosen() == [0, 0, 0, 2] and recompute.is_focused() == [False, False, False, True]
    assert SelectiveRecompute(0, unlike(*placed), 20, AnywhereOptions(0.0, "first")).is_focused() == [None] * 4


def test_overlap_counts_common_chunks_and_their_order() -> None:
    a, b, c, d = b"a", b"b", b"c", b"d"
    assert context_overlap([], []) == 1.0 and context_overlap([], [a]) == 0.0 and context_overlap([a], []) == 0.0
    assert context_overlap([a, b], [a, b]) == context_overlap([a, b], [d, a, c, b]) == 1.0
    assert context_overlap([a, b], [b, a]) == 0.0, "every pair is reversed"
    assert context_overlap([a, b, c, d], [a, c]) == 0.5
    assert context_overlap([a, a], [a, a]) == 1.0


def variant(before: tuple[bytes, ...], tier: Tier, first_position: int) -> Node:
    one = Node(
        NodeKey(b""),
        None,
        content=b"c",
        before=before,
        first_position=first_position,
        num_tokens=4,
        chunk_id=ChunkId(1),
        frequency=WindowedCount(1.0, 0.0),
        cost_alone=1.0,
        cost_here=1.0,
    )
    one.tiers = (tier,)
    if tier is Tier.DEVICE:
        one.block_ids = [BlockId(0)]
    return one


def test_the_copy_of_the_most_similar_context_wins_then_the_nearest() -> None:
    alone, like = variant((), Tier.DEVICE, 8), variant((b"a",), Tier.DISK, 8)
    assert best_variant([alone, like], [b"a"], 8) is like
    assert best_variant([alone, like], [], 8) is alone
    host, far = variant((b"a",), Tier.HOST, 8), variant((b"a",), Tier.HOST, 99)
    assert best_variant([like, far, host], [b"a"], 10) is host
    assert best_variant([], [], 0) is None


def test_the_copy_with_the_lowest_overhead_wins() -> None:
    """One copy attended much to a chunk that is present again, the other mostly to an absent chunk."""
    like, other = (variant((b"a", b"b"), Tier.DEVICE, 8) for _ in range(2))
    like.mass = ContextMass(4, (b"a", b"b"), (4, 4), np.array([3.0, 0.5], np.float32), 1.0)
    other.mass = ContextMass(4, (b"a", b"b"), (4, 4), np.array([0.5, 3.0], np.float32), 1.0)
    assert reusability(like, [b"a"]).overlap == pytest.approx(6 / 7)
    assert best_variant([other, like], [b"a"], 8) is like
    assert best_variant([other, like], [b"b"], 8) is other
    alone = variant((), Tier.DEVICE, 8)
    alone.mass = ContextMass(4, (), (), np.zeros(0, np.float32), 1.0)
    assert reusability(alone, [b"c"]) == Reusability(0.0, 0.5)
    assert best_variant([other, like, alone], [b"c"], 8) is alone, "its KV is independent of other chunks"


@pytest.mark.parametrize(("num_kept", "num_placed"), [(1, 0), (2, 2)])
def test_chunks_save_together_what_reading_the_weights_hides_of_each(num_kept: int, num_placed: int) -> None:
    """A step takes one second a token and at least 4 s, as on a GPU, where a chunk of 4 tokens alone saves 1 s.

    Behind the system message 10 or 14 tokens are computed; placing one chunk saves 3 s, two save 6, and the query pass
    takes 4.
    """
    counts = tuple(range(1, 33))
    seconds = tuple(max(4.0, float(count)) for count in counts)
    profile = CostProfile((0, 32), counts, (seconds, seconds), {})
    fixture = PreparedFixture(anywhere=AnywhereOptions(0.25, "question"), profile=profile)
    kept = [1, 2][:num_kept]
    fixture.ask([7, *kept])
    asked = fixture.lease([8, *kept])
    fixture.admit(asked)
    assert len(asked.placements) == num_placed
    fixture.manager.release(asked)


@pytest.mark.parametrize(
    ("step_seconds", "selector", "num_kept", "num_placed"),
    [
        (0.0, "question", 1, 1),  # saves 3 s, and the query pass takes 2
        (1.5, "question", 1, 0),  # saves 3 s, and the query pass takes 3.5
        (1.5, "question", 2, 2),  # saves 6 s
        (1.5, "first", 1, 1),  # needs no query pass
    ],
)
def test_chunks_are_placed_if_they_save_more_than_the_query_pass_takes(
    step_seconds: float, selector: TokenSelector, num_kept: int, num_placed: int
) -> None:
    """Chunks of 4 tokens, a question of 2, one second a token; a quarter of placed tokens is recomputed."""
    fixture = PreparedFixture(anywhere=AnywhereOptions(0.25, selector))
    kept = [1, 2][:num_kept]
    fixture.ask([7, *kept])
    fixture.tree.profile = linear_profile(step_seconds, 1.0, 0.0)
    asked = fixture.lease([8, *kept])
    fixture.admit(asked)
    assert len(asked.placements) == num_placed
    fixture.manager.release(asked)
