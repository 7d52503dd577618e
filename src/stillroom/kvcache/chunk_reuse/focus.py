"""Finds the chunks that a question is about from the attention of its first layers (Cache-Craft 3.2.2, Algorithm 1).

Tokens of the other chunks are not recomputed.
"""

import numpy as np
from numpy.typing import NDArray


def num_focused(scores: NDArray[np.float64]) -> int:
    """Return how many of the highest scores stand apart from the rest (Algorithm 1, lines 4 to 8).

    With indices from 1, h_(i+1) - h_i is -p log p of gap i + 1. The index i of the largest, the first of equals, is the
    number of chunks in focus: 1 to k - 2 of k >= 3 chunks. With fewer than three chunks, or if all scores are equal,
    all chunks are in focus.

    Args:
        scores: [k] cumulated attention of the question to each chunk.
    """
    gaps = -np.diff(np.sort(scores)[::-1])
    total = gaps.sum()
    if len(scores) < 3 or total <= 0:
        return len(scores)
    p = (gaps / total)[1:]
    steps = -p * np.log(p, where=p > 0, out=np.zeros_like(p))
    return int(np.argmax(steps.round(12))) + 1  # rounded: differences in the last bits do not count


class FocusFinder:
    """Runs Algorithm 1 layer by layer for one question."""

    def __init__(self, num_chunks: int, window: int) -> None:
        """
        Args:
            window: w, the number of consecutive layers that must agree; at least 1.
        """
        assert num_chunks > 0 and window > 0
        self.num_layers = 0
        """Layers observed; once there is a result, L*: recomputing can shrink from the next layer on."""
        self._window = window
        self._scores = np.zeros(num_chunks, dtype=np.float64)
        self._focused: frozenset[int] = frozenset()
        self._num_equal = 0
        """Consecutive layers with these chunks in focus."""

    def observe(self, inter_of_layer: NDArray[np.floating]) -> frozenset[int] | None:
        """Return the indices of the chunks in focus; None while the last `window` layers do not agree (lines 3 to 13).

        The first result is final: later layers are ignored.

        Args:
            inter_of_layer: [k] attention of the question's tokens to each chunk in the next layer, cumulated here
                (Eq. 15). Of equal scores the earlier chunk ranks higher.
        """
        if self._num_equal >= self._window:
            return self._focused
        self.num_layers += 1
        self._scores += inter_of_layer
        ranking = np.argsort(-self._scores, kind="stable")
        focused = frozenset(ranking[: num_focused(self._scores)].tolist())
        self._num_equal = self._num_equal + 1 if focused == self._focused else 1
        self._focused = focused
        return focused if self._num_equal >= self._window else None
