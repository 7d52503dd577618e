"""Tests the questions of `stillroom bench first-questions`."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stillroom.errors import UsageError
from stillroom_bench.loads.zipf_questions import (
    MIN_DOCUMENTS,
    ZipfQuestions,
    documents_for,
    expected_first_share,
    zipf_shares,
)


@given(
    num_questions=st.integers(6, 60),
    first_share=st.floats(0.1, 0.6),
    exponent=st.floats(0.0, 1.2),
    seed=st.integers(0, 5),
)
@example(num_questions=30, first_share=0.109375, exponent=0.0, seed=1)
@settings(max_examples=15, deadline=None)
def test_share_of_first_questions_is_reached(
    num_questions: int, first_share: float, exponent: float, seed: int
) -> None:
    num_documents = documents_for(num_questions, first_share, exponent)
    asked = ZipfQuestions(num_documents, exponent, 4, 5, "fixed", seed).draw(num_questions, first_share)
    num_first = sum(one.is_first for one in asked)
    assert num_first == len({one.topic for one in asked})
    if num_documents > MIN_DOCUMENTS:
        assert abs(num_first - round(first_share * num_questions)) <= 1, "the nearest of the draws"


@given(num_questions=st.integers(6, 200), first_share=st.floats(0.1, 0.6), exponent=st.floats(0.0, 1.0))
@settings(max_examples=30, deadline=None)
def test_number_of_documents_is_the_smallest_that_reaches_the_share(
    num_questions: int, first_share: float, exponent: float
) -> None:
    found = documents_for(num_questions, first_share, exponent)
    assert expected_first_share(found, num_questions, exponent) >= first_share
    if found > MIN_DOCUMENTS:
        assert expected_first_share(found - 1, num_questions, exponent) < first_share


def test_share_out_of_reach_is_refused() -> None:
    with pytest.raises(UsageError, match="lower the exponent"):
        documents_for(1000, 0.9, 2.0)


@given(document_chunks=st.integers(1, 6), num_chunks=st.integers(2, 9), seed=st.integers(0, 99), fixed=st.booleans())
@settings(max_examples=25, deadline=None)
def test_search_returns_distinct_chunks_best_from_the_topic(
    document_chunks: int, num_chunks: int, seed: int, fixed: bool
) -> None:
    num_chunks = min(num_chunks, 3 * document_chunks)
    load = ZipfQuestions(7, 1.0, document_chunks, num_chunks, "fixed" if fixed else "drawn", seed)
    for one in load.draw_earlier(5):
        documents = Counter(chunk // document_chunks for chunk in one.chunks)
        assert len(set(one.chunks)) == num_chunks and set(one.chunks) <= set(range(7 * document_chunks))
        assert one.chunks[0] // document_chunks == one.topic and len(documents) <= 3
        assert documents[one.topic] == min(-(-num_chunks // 2), document_chunks)


def test_fixed_searches_repeat_and_drawn_ones_do_not() -> None:
    for companions, are_equal in (("fixed", True), ("drawn", False)):
        load = ZipfQuestions(3, 1.0, 8, 5, companions, 0)  # type: ignore[arg-type]
        by_topic: dict[int, set[tuple[int, ...]]] = {}
        for one in load.draw(30, 0.1):
            by_topic.setdefault(one.topic, set()).add(one.chunks)
        assert all((len(found) == 1) == are_equal for found in by_topic.values())


def test_questions_follow_the_law_in_both_draws() -> None:
    load = ZipfQuestions(50, 1.1, 2, 3, "fixed", 3)
    counts = Counter(one.topic for one in load.draw_earlier(1000))
    assert sorted(counts.values())[-1] / 1000 == pytest.approx(zipf_shares(50, 1.1)[0], abs=0.05)
    favourite = counts.most_common(1)[0][0]
    assert Counter(one.topic for one in load.draw(60, 1 / 3)).most_common(1)[0][0] == favourite
    assert [one.topic for one in load.draw(60, 1 / 3)] != [one.topic for one in load.draw_earlier(60)]


def test_number_of_a_document_does_not_tell_its_popularity() -> None:
    favourites = {
        Counter(one.topic for one in ZipfQuestions(20, 2.0, 1, 2, "fixed", seed).draw_earlier(50)).most_common(1)[0][0]
        for seed in range(10)
    }
    assert len(favourites) > 4 and np.ptp(list(favourites)) > 5
