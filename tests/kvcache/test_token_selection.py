"""Selectors and their budgets."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stillroom.config.settings import TokenSelector
from stillroom.kvcache.chunk_reuse.selection import SELECTORS, SelectorInput, in_proportion, select

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def given_for(lengths: list[int], budgets: list[int], seed: int = 0) -> SelectorInput:
    known = np.random.default_rng(seed).random((5, sum(lengths)), dtype=np.float32)
    return SelectorInput(lengths, budgets, [True] * len(lengths), known[:2], known[2], known[3], known[4])


@given(LENGTHS, st.floats(0, 1))
def test_budgets_are_in_proportion(lengths: list[int], ratio: float) -> None:
    budgets = in_proportion(ratio, lengths)
    assert sum(budgets) == min(sum(lengths), int(np.ceil(ratio * sum(lengths) - 1e-9)))
    assert all(0 <= budget <= length for budget, length in zip(budgets, lengths, strict=True))
    assert all(abs(budget - ratio * length) < 1 + 1e-6 for budget, length in zip(budgets, lengths, strict=True))


@given(st.sampled_from(sorted(SELECTORS)), st.data(), LENGTHS)
def test_selectors_choose_as_many_tokens_as_the_budgets_allow(
    name: TokenSelector, data: st.DataObject, lengths: list[int]
) -> None:
    budgets = [data.draw(st.integers(0, length)) for length in lengths]
    chosen = select(name, given_for(lengths, budgets))
    assert len(chosen) == sum(budgets)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert all(0 <= index < sum(lengths) for index in chosen)
    if name in ("context", "received", "first"):
        ends = np.cumsum([0, *lengths])
        assert np.diff(np.searchsorted(chosen, ends)).tolist() == budgets


def test_nothing_is_chosen_in_a_closed_chunk() -> None:
    attention = np.array([[0.9, 0.9, 0.1, 0.2]] * 2, np.float32)
    for name in ("question", "first"):
        chosen = select(name, SelectorInput([2, 2], [1, 1], [False, True], attention))
        assert chosen.tolist() == [3 if name == "question" else 2]
    assert select("question", SelectorInput([2, 2], [0, 1], [True, True], attention)).tolist() == [0], (
        "budgets are pooled"
    )


@given(LENGTHS, st.floats(0.05, 0.95))
def test_selected_tokens_score_at_least_as_high_as_the_rest(lengths: list[int], ratio: float) -> None:
    given_ = given_for(lengths, in_proportion(ratio, lengths))
    for name, selector in SELECTORS.items():
        scores, chosen = selector(given_), select(name, given_)
        rest = np.setdiff1d(np.arange(sum(lengths)), chosen)
        assert len(rest) == 0 or scores[chosen].min() >= scores[rest].max()


def test_attention_of_the_last_token_counts_twice() -> None:
    attention = np.array([[0.1, 0.0, 0.3], [0.0, 0.5, 0.0]], np.float32)
    assert select("question", SelectorInput([3], [1], [True], attention)).tolist() == [2]
    assert select("question", SelectorInput([3], [2], [True], attention)).tolist() == [1, 2]
    assert select("question_mean", SelectorInput([3], [1], [True], attention)).tolist() == [1]


def test_context_selects_in_proportion_from_every_chunk() -> None:
    """Equation 14 within each chunk; of equal tokens the earlier."""
    paid = np.array([0.9, 0.8, 0.7, 0.6, 0.0, 0.1, 0.0, 0.3, 0.0, 0.0, 0.0, 0.2], np.float32)
    chosen = select("context", SelectorInput([4, 8], [2, 4], [True, True], context_N=paid)).tolist()
    assert chosen == [0, 1, 4, 5, 7, 11]


def test_first_selects_in_proportion_from_every_chunk() -> None:
    assert select("first", SelectorInput([4, 8], [2, 4], [True, True])).tolist() == [0, 1, 4, 5, 6, 7]
