"""Which chunks a question is about, seen from the attention of its first layers. Cache-Craft 3.2.2, Algorithm 1.

Tokens of the other chunks need no recomputing in the layers that follow.
"""

import numpy as np
from numpy.typing import NDArray


def num_focused(scores: NDArray[np.float64]) -> int:
    """How many of the highest scores stand apart from the rest (Algorithm 1, lines 4 to 8).

    As written, with indices from 1: h_(i+1) - h_i is -p log p of gap i + 1, and the i of the largest, of equals the
    first, is how many chunks are in focus; so from three chunks on it is 1 to k - 2 of them. With fewer there are no
    two entropies to compare, and where all scores are equal there is no gap: then all are in focus, none is given up.

    Args:
        scores: [k] cumulated attention of the question to each chunk.
    """
    gaps = -np.diff(np.sort(scores)[::-1])
    total = gaps.sum()
    if len(scores) < 3 or total <= 0:
        return len(scores)
    p = (gaps / total)[1:]
    steps = -p * np.log(p, where=p > 0, out=np.zeros_like(p))
    return int(np.argmax(steps.round(12))) + 1  # rounded: what is equal but for its last bits is equal


class FocusFinder:
    """Algorithm 1 as layers are computed, for one question."""

    def __init__(self, num_chunks: int, window: int) -> None:
        """
        Args:
            window: w, so many layers in a row must agree; at least 1.
        """
        assert num_chunks > 0 and window > 0
        self.num_layers = 0
        """Layers observed; once there is an answer, L*: recomputing may be cut down from the next layer on."""
        self._window = window
        self._scores = np.zeros(num_chunks, dtype=np.float64)
        self._focused: frozenset[int] = frozenset()
        self._num_equal = 0
        """Layers in a row with these in focus, the last one included."""

    def observe(self, inter_of_layer: NDArray[np.floating]) -> frozenset[int] | None:
        """Indices of the chunks in focus, or None while the last `window` layers do not agree (lines 3 to 13).

        The first answer is final: later layers are not looked at.

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
