"""How a prompt with placed chunks is completed, and which copy of a chunk is placed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stillroom.config.settings import TokenSelector
from stillroom.core.ids import BlockId, ChunkId
from stillroom.core.kv import NodeKey, Tier
from stillroom.kvcache.node import Node, WindowedCount
from stillroom.kvcache.placement import AnywhereOptions, best_variant, context_overlap
from stillroom.kvcache.repair import Repair


@given(
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(0, 4),
    st.integers(1, 6),
    st.floats(0, 1),
    st.sampled_from(("question", "first", "random")),
)
def test_every_token_is_exact_placed_or_computed(
    num_exact: int, chunks: list[tuple[int, int]], gap: int, tail: int, ratio: float, selector: TokenSelector
) -> None:
    placed, end = [], num_exact
    for before, length in chunks:
        placed.append(range(end + before, end + before + length))
        end = placed[-1].stop
    question, total = end + gap, end + gap + tail
    repair = Repair(num_exact, placed, question, AnywhereOptions(ratio, selector))
    known = [*range(num_exact), *(position for chunk in placed for position in chunk)]
    assert repair.context.tolist() == known
    if repair.needs_look:
        assert repair.num_chosen() == [0] * len(placed)
        looking = repair.looks_from(total, budget=3)
        assert looking.tolist() == list(range(max(question, total - 3), total))
        repair.see(np.random.default_rng(0).random((2, len(known) + len(looking)), dtype=np.float32))
    computed = repair.to_compute(total).tolist()
    num_placed = sum(map(len, placed))
    assert sum(repair.num_chosen()) == min(num_placed, int(np.ceil(ratio * num_placed - 1e-9)))
    assert len(computed) == total - len(known) + sum(repair.num_chosen())
    assert set(range(total)) - set(known) <= set(computed) and set(computed).isdisjoint(range(num_exact))
    for chunk, count in zip(placed, repair.num_chosen(), strict=True):
        assert len(set(chunk) & set(computed)) == count


def test_the_look_decides_by_the_placed_tokens_alone() -> None:
    repair = Repair(2, [range(2, 4), range(6, 8)], 8, AnywhereOptions(0.25, "question"))
    attention = np.zeros((2, 8), np.float32)  # two exact tokens, four placed ones, two that look
    attention[0] = [9, 9, 0.1, 0.2, 0.4, 0.3, 9, 9]
    repair.see(attention)
    assert repair.to_compute(10).tolist() == [4, 5, 6, 8, 9]


def test_overlap_counts_common_chunks_and_their_order() -> None:
    a, b, c, d = b"a", b"b", b"c", b"d"
    assert context_overlap([], []) == 1.0 and context_overlap([], [a]) == 0.0 and context_overlap([a], []) == 0.0
    assert context_overlap([a, b], [a, b]) == context_overlap([a, b], [d, a, c, b]) == 1.0
    assert context_overlap([a, b], [b, a]) == 0.0, "every pair is turned round"
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
    if tier is Tier.DEVICE:
        one.block_ids = [BlockId(0)]
    else:
        one.is_lower[tier] = True
    return one


def test_the_most_similar_context_wins_then_the_nearest_copy() -> None:
    alone, like = variant((), Tier.DEVICE, 8), variant((b"a",), Tier.DISK, 8)
    assert best_variant([alone, like], [b"a"], 8) is like
    assert best_variant([alone, like], [], 8) is alone
    host, far = variant((b"a",), Tier.HOST, 8), variant((b"a",), Tier.HOST, 99)
    assert best_variant([like, far, host], [b"a"], 10) is host
    assert best_variant([], [], 0) is None
