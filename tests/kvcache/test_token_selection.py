"""Selectors, and how many tokens they may have."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.config.settings import TokenSelector
from stillroom.kvcache.chunk_scores import most_contextualised
from stillroom.kvcache.token_selection import SELECTORS, Seen, needs_look, select

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def seen(lengths: list[int], seed: int = 0) -> Seen:
    attention = np.random.default_rng(seed).random((3, sum(lengths)), dtype=np.float32)
    return Seen(lengths, attention[:2], attention[2])


@given(st.sampled_from(sorted(SELECTORS)), LENGTHS, st.floats(0, 1))
def test_as_many_as_the_ratio_pays_for(name: TokenSelector, lengths: list[int], ratio: float) -> None:
    chosen = select(name, ratio, seen(lengths))
    total = sum(lengths)
    assert len(chosen) == min(total, int(np.ceil(ratio * total - 1e-9)))
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert all(0 <= index < total for index in chosen)


@given(LENGTHS, st.floats(0.05, 0.95))
def test_what_is_chosen_scores_at_least_as_high_as_what_is_not(lengths: list[int], ratio: float) -> None:
    given_ = seen(lengths)
    for name, selector in SELECTORS.items():
        scores, chosen = selector(given_), select(name, ratio, given_)
        rest = np.setdiff1d(np.arange(sum(lengths)), chosen)
        assert len(rest) == 0 or scores[chosen].min() >= scores[rest].max()


def test_the_last_token_counts_twice_what_the_question_does() -> None:
    attention = np.array([[0.1, 0.0, 0.3], [0.0, 0.5, 0.0]], np.float32)
    assert select("question", 1 / 3, Seen([3], attention)).tolist() == [2]
    assert select("question", 2 / 3, Seen([3], attention)).tolist() == [1, 2]
    assert select("question_mean", 1 / 3, Seen([3], attention)).tolist() == [1]


def test_the_most_contextualised_come_from_every_chunk_alike() -> None:
    """Equation 14 for each chunk by itself; of equals the earlier ones."""
    paid = np.array([0.9, 0.8, 0.7, 0.6, 0.0, 0.1, 0.0, 0.3, 0.0, 0.0, 0.0, 0.2], np.float32)
    chosen = select("context", 0.5, Seen([4, 8], None, paid)).tolist()
    assert chosen == [0, 1, *(4 + most_contextualised(paid[4:], 4)).tolist()] == [0, 1, 4, 5, 7, 11]


def test_first_tokens_come_from_every_chunk_alike() -> None:
    assert select("first", 0.5, Seen([4, 8], None)).tolist() == [0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize(("ratio", "looks"), [(0.0, False), (0.15, True), (1.0, False)])
def test_nobody_looks_where_nothing_is_to_be_chosen(ratio: float, looks: bool) -> None:
    assert needs_look("question", ratio) is looks
    assert needs_look("question_mean", ratio) is looks
    assert not needs_look("first", ratio) and not needs_look("random", ratio)
