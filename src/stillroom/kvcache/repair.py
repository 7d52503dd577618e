"""How a prompt is completed whose chunks were placed: a look, then one pass over what is missing or to be repaired.

Positions [0, num_exact) have the KV of a full prefill. Behind them stand placed chunks, which have KV of another
context, chunks without KV, and the question. The look runs the question over what there is; the pass computes, in order
of position, the chunks without KV, the tokens of placed chunks that were chosen, and the question (Cache-Craft 3.2.1,
3.4.3). Nothing computed here is exact but with a ratio of 1.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stillroom.kvcache.placement import AnywhereOptions
from stillroom.kvcache.token_selection import Seen, needs_look, select


class Repair:
    """Of one sequence, from its admission to the end of its prompt."""

    def __init__(
        self,
        num_exact: int,
        placed: Sequence[range],
        question_start: int,
        options: AnywhereOptions,
        context_N: NDArray[np.float32] | None = None,
    ) -> None:
        """
        Args:
            placed: positions of the placed chunks, ascending; at least one.
            question_start: of the prompt's last segment.
            context_N: as in `Seen`.
        """
        assert placed and num_exact <= placed[0].start and placed[-1].stop <= question_start
        self._num_exact = num_exact
        self._lengths = [len(chunk) for chunk in placed]
        self._placed = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in placed])
        self._question_start = question_start
        self._options = options
        self._context_N = context_N
        self._chosen: NDArray[np.int64] | None = None
        if not needs_look(options.selector, options.recompute_ratio):
            self._choose(None)

    @property
    def needs_look(self) -> bool:
        return self._chosen is None

    @property
    def context(self) -> NDArray[np.int64]:
        """Positions that have KV before the look, ascending."""
        return np.concatenate([np.arange(self._num_exact), self._placed])

    def looks_from(self, num_tokens: int, budget: int) -> NDArray[np.int64]:
        """Positions of the tokens that look: the question, or as much of its end as the budget allows.

        Args:
            num_tokens: of prompt and answer so far; all of it behind the chunks looks.
        """
        return np.arange(max(self._question_start, num_tokens - budget), num_tokens)

    def see(self, attention_2K: NDArray[np.float32]) -> None:
        """The result of the look, over its context and itself."""
        first = self._num_exact
        self._choose(attention_2K[:, first : first + len(self._placed)])

    def to_compute(self, num_tokens: int) -> NDArray[np.int64]:
        """Positions of the pass, ascending. After the look."""
        assert self._chosen is not None
        is_computed = np.ones(num_tokens, dtype=bool)
        is_computed[: self._num_exact] = False
        is_computed[self._placed] = False
        is_computed[self._placed[self._chosen]] = True
        return np.flatnonzero(is_computed)

    def num_chosen(self) -> list[int]:
        """Of each placed chunk, how many tokens are computed again; zeros before the look."""
        ends = np.cumsum(self._lengths)
        chosen = np.zeros(0, np.int64) if self._chosen is None else self._chosen
        counts: list[int] = np.diff(np.searchsorted(chosen, [0, *ends])).tolist()
        return counts

    def _choose(self, attention_2N: NDArray[np.float32] | None) -> None:
        options = self._options
        self._chosen = select(
            options.selector, options.recompute_ratio, Seen(self._lengths, attention_2N, self._context_N)
        )
