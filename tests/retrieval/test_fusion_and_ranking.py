"""Fusion against worked examples, and independence of the order of the input."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.ids import ChunkId
from stillroom.retrieval.fusion import convex, dense_weight, minmax, rrf
from stillroom.retrieval.ranking import Ranking, ranked, top_k

A, B, C, D = (ChunkId(number) for number in (1, 2, 3, 4))
SCORES = st.sampled_from([0.0, 0.1, 0.5, 1.0, 7.25, -3.0])
RANKINGS = st.dictionaries(st.integers(1, 12).map(ChunkId), SCORES, max_size=8).map(lambda found: list(found.items()))


def test_rrf_by_hand() -> None:
    fused = rrf([[(A, 9.0), (B, 8.0), (C, 7.0)], [(C, 0.9), (A, 0.5)]])
    assert fused == [(A, 1 / 61 + 1 / 62), (C, 1 / 63 + 1 / 61), (B, 1 / 62)]


def test_a_smaller_rank_constant_favours_the_first_ranks() -> None:
    first, both = [(A, 2.0), (B, 1.0)], [(C, 3.0), (D, 2.0), (B, 1.0)]
    assert rrf([first, both], 60)[0][0] == B
    assert rrf([first, both], 0)[0][0] == A


def test_minmax_by_hand() -> None:
    # 4 tokens: alpha = 0.3; dense scaled: A 1, B 0.5, C 0; sparse scaled: C 1, B 0
    fused = minmax([(A, 0.9), (B, 0.6), (C, 0.3)], [(C, 12.0), (B, 2.0)], num_query_tokens=4)
    assert [chunk_id for chunk_id, _ in fused] == [C, A, B]
    assert [score for _, score in fused] == pytest.approx([0.7, 0.3, 0.15])


def test_the_weight_follows_the_papers_three_classes() -> None:
    assert [dense_weight(number) for number in (1, 4, 5, 10, 11)] == [0.3, 0.3, 0.5, 0.5, 0.7]


def test_equal_scores_do_not_divide_by_zero() -> None:
    assert minmax([(B, 0.4), (A, 0.4)], [(B, 3.0)], 7) == [(B, 1.0), (A, 0.5)]
    assert minmax([], [], 7) == []


def test_convex_by_hand() -> None:
    fused = convex({A: 1.0, B: 0.0}, {A: 0.0, B: 4.0}, alpha=0.6)
    assert [chunk_id for chunk_id, _ in fused] == [B, A]
    assert dict(fused) == pytest.approx({B: 0.3 + 0.4, A: 0.6})
    assert convex({}, {}) == []


def test_ties_go_to_the_smaller_chunk_id() -> None:
    assert [chunk_id for chunk_id, _ in rrf([[(D, 1.0)], [(B, 5.0)]])] == [B, D]


@given(RANKINGS, RANKINGS, st.integers(1, 20), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(
    dense: Ranking, sparse: Ranking, num_tokens: int, shuffler: random.Random
) -> None:
    other_dense, other_sparse = dense[:], sparse[:]
    shuffler.shuffle(other_dense)
    shuffler.shuffle(other_sparse)
    assert rrf([dense, sparse]) == rrf([other_dense, other_sparse])
    assert minmax(dense, sparse, num_tokens) == minmax(other_dense, other_sparse, num_tokens)


@given(RANKINGS, RANKINGS, st.integers(1, 20))
def test_fusion_keeps_every_chunk_and_bounds_its_score(dense: Ranking, sparse: Ranking, num_tokens: int) -> None:
    everything = {chunk_id for chunk_id, _ in dense + sparse}
    for fused in (rrf([dense, sparse]), minmax(dense, sparse, num_tokens)):
        assert {chunk_id for chunk_id, _ in fused} == everything
        assert fused == ranked(fused)
        assert all(0.0 <= score <= 1.0 for _, score in fused)


@given(RANKINGS, st.integers(1, 10), st.randoms(use_true_random=False))
def test_top_k_sees_ties_whole(scored: Ranking, k: int, shuffler: random.Random) -> None:
    shuffled = scored[:]
    shuffler.shuffle(shuffled)
    by_score = sorted(shuffled, key=lambda pair: -pair[1])
    assert top_k(lambda n: by_score[:n], k, len(by_score)) == ranked(scored)[:k]
