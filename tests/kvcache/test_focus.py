"""Algorithm 1 layer by layer, compared with a transcription over all layers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.kvcache.chunk_reuse.focus import FocusFinder, num_focused


def algorithm_1(layers: list[list[int]], w: int) -> tuple[set[int], int] | None:
    """F* and L*, line by line with indices from 1; None if no window agrees."""
    k = len(layers[0])
    f_all: list[set[int]] = []
    cinter = dict.fromkeys(range(1, k + 1), 0.0)
    for layer in range(1, len(layers) + 1):
        for i in cinter:
            cinter[i] += layers[layer - 1][i - 1]
        order = sorted(cinter, key=lambda i: (-cinter[i], i))
        sorted_cinter = dict(enumerate((cinter[i] for i in order), 1))
        diff = {i: sorted_cinter[i] - sorted_cinter[i + 1] for i in range(1, k)}
        i_star = k  # undefined in the paper
        if k >= 3 and sum(diff.values()) > 0:
            p = {i: diff[i] / sum(diff.values()) for i in diff}
            h = {i: -sum(p[j] * math.log(p[j]) for j in range(1, i + 1) if p[j] > 0) for i in p}
            i_star = max(range(1, k - 1), key=lambda i: (round(h[i + 1] - h[i], 9), -i))
        f_all.append(set(order[:i_star]))
        if layer >= w and all(f == f_all[-1] for f in f_all[layer - w : layer]):
            return f_all[-1], layer
    return None


recorded = st.integers(1, 6).flatmap(
    lambda k: st.lists(st.lists(st.integers(0, 20), min_size=k, max_size=k), min_size=1, max_size=8)
)


@given(recorded, st.integers(1, 4))
def test_layer_by_layer_equals_all_at_once(layers: list[list[int]], window: int) -> None:
    finder = FocusFinder(len(layers[0]), window)
    answers = [finder.observe(np.array(layer, np.float32)) for layer in layers]
    expected = algorithm_1(layers, window)
    if expected is None:
        assert set(answers) == {None}
        return
    focused, cutoff = expected
    assert finder.num_layers == cutoff
    assert answers[: cutoff - 1] == [None] * (cutoff - 1)
    assert set(answers[cutoff - 1 :]) == {frozenset(chunk - 1 for chunk in focused)}


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([3.0], 1),
        ([5.0, 1.0], 2),  # two entropies are needed
        ([2.0, 2.0, 2.0, 2.0], 4),  # nothing stands apart
        ([9.0, 5.0, 1.0], 1),  # k - 2 is the only choice
        ([1.0, 9.0, 5.0, 4.0, 3.0], 3),  # gaps 4, 1, 1, 2: the last is nearest to 1/e
        ([9.0, 7.0, 3.0, 2.0, 1.0], 1),  # gaps 2, 4, 1, 1
        ([10.0, 0.0, 0.0, 0.0], 1),  # all later gaps are equal: the first
        ([10.0, 10.0, 0.0, 0.0], 1),  # as written, the only gap has no entropy: one of two equal chunks is left out
    ],
)
def test_number_of_chunks_in_focus(scores: list[float], expected: int) -> None:
    assert num_focused(np.array(scores)) == expected


def test_a_change_restarts_the_window_and_the_first_result_is_final() -> None:
    finder = FocusFinder(3, window=2)
    assert finder.observe(np.array([3.0, 1.0, 0.0])) is None
    assert finder.observe(np.array([0.0, 9.0, 0.0])) is None, "another chunk leads"
    assert finder.observe(np.array([0.0, 1.0, 0.0])) == frozenset({1})
    assert finder.observe(np.array([99.0, 0.0, 0.0])) == frozenset({1})
    assert finder.num_layers == 3


def test_a_window_of_one_decides_at_the_first_layer() -> None:
    assert FocusFinder(4, window=1).observe(np.array([0.0, 1.0, 6.0, 0.5])) == frozenset({2})
