"""Completes a prompt whose chunks were placed: a query pass, then one pass over missing tokens and those to recompute.

Positions [0, num_exact) have the KV of a full prefill. Behind them stand placed chunks with KV of another context,
chunks without KV, and the question. The query pass runs the question over the KV that is present and reports what it
attends to. The last pass computes, in order of position, the chunks without KV, the chosen tokens of placed chunks, and
the question (Cache-Craft 3.2.1, 3.4.3). CacheBlend's selector uses a deviation pass in place of the query pass: the
first layers of everything behind the exact prefix. What is computed here is exact only with a ratio of 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stillroom.errors import NonFiniteError
from stillroom.kvcache.chunk_reuse.focus import FocusFinder
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions, Reusability
from stillroom.kvcache.chunk_reuse.selection import SelectorInput, in_proportion, select
from stillroom.kvcache.tree.chunk_scores import num_to_recompute


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """A placed chunk of one prompt."""

    positions: range
    reusability: Reusability
    context: NDArray[np.float32] | None = None
    """Per token, as in `SelectorInput`; None: not known."""
    received: NDArray[np.float32] | None = None


class SelectiveRecompute:
    """State of one sequence from its admission to the end of its prompt."""

    def __init__(
        self, num_exact: int, chunks: Sequence[PlacedChunk], question_start: int, options: AnywhereOptions
    ) -> None:
        """
        Args:
            chunks: in order; at least one.
            question_start: position of the prompt's last segment.
        """
        assert chunks and num_exact <= chunks[0].positions.start and chunks[-1].positions.stop <= question_start
        self._num_exact = num_exact
        self._chunks = chunks
        self._placed = np.concatenate([np.arange(chunk.positions.start, chunk.positions.stop) for chunk in chunks])
        self._question_start = question_start
        self._options = options
        self._budgets = _budgets(chunks, options)
        self._focused: frozenset[int] | None = None
        self._chosen: NDArray[np.int64] | None = None
        self._deviations: list[NDArray[np.float32]] = []
        is_choice = 0 < sum(self._budgets) < len(self._placed)
        self.needs_deviation_pass = is_choice and options.selector == "deviation"
        """Whether the deviation pass is not complete."""
        self._uses_query_pass = is_choice and options.looks_from_question
        self._attention: NDArray[np.float32] | None = None
        self._choose_if_known()

    @property
    def needs_query_pass(self) -> bool:
        """Whether the query pass must run; after the deviation pass, if there is one."""
        return self._uses_query_pass and self._attention is None and not self.needs_deviation_pass

    @property
    def is_planned(self) -> bool:
        """Whether the tokens to recompute are chosen."""
        return self._chosen is not None

    @property
    def context(self) -> NDArray[np.int64]:
        """Positions that have KV before the query pass, ascending."""
        return np.concatenate([np.arange(self._num_exact), self._placed])

    def deviation_pass_positions(self, num_tokens: int, budget: int) -> range:
        """Return the positions of the next piece of the deviation pass."""
        start = self._num_exact + sum(map(len, self._deviations))
        return range(start, min(start + budget, num_tokens))

    def take_deviations(self, deviation: NDArray[np.float32], num_tokens: int) -> None:
        """Take the result of a piece of the deviation pass.

        Args:
            deviation: one value for each position of the piece.
            num_tokens: of prompt and answer so far.

        Raises:
            NonFiniteError: values of placed tokens, kept or computed, hold NaN or an infinity.
        """
        self._deviations.append(deviation)
        self.needs_deviation_pass = self._num_exact + sum(map(len, self._deviations)) < num_tokens
        self._choose_if_known()

    def query_pass_positions(self, num_tokens: int, budget: int) -> NDArray[np.int64]:
        """Return the positions of the query pass: the question, or as much of its end as the budget allows.

        Args:
            num_tokens: of prompt and answer so far; the answer counts as part of the question.
        """
        return np.arange(max(self._question_start, num_tokens - budget), num_tokens)

    def take_attention(self, attention_L2K: NDArray[np.float32]) -> None:
        """Take the result of the query pass.

        Args:
            attention_L2K: by layer, from the last token and the mean of all tokens, to the K tokens of context and
                question.
        """
        seen_L2N = attention_L2K[:, :, self._num_exact : self._num_exact + len(self._placed)]
        self._attention = seen_L2N.mean(axis=0)
        if self._options.focus_window:
            self._focused = _focus(seen_L2N[:, 1], self._lengths, self._options.focus_window)
        self._choose_if_known()

    def to_compute(self, num_tokens: int) -> NDArray[np.int64]:
        """Return the positions of the last pass, ascending. Precondition: `is_planned`."""
        assert self._chosen is not None
        is_computed = np.ones(num_tokens, dtype=bool)
        is_computed[: self._num_exact] = False
        is_computed[self._placed] = False
        is_computed[self._placed[self._chosen]] = True
        return np.flatnonzero(is_computed)

    def num_chosen(self) -> list[int]:
        """Return how many tokens of each placed chunk are recomputed; zeros until they are chosen."""
        ends = np.cumsum(self._lengths)
        chosen = np.zeros(0, np.int64) if self._chosen is None else self._chosen
        counts: list[int] = np.diff(np.searchsorted(chosen, [0, *ends])).tolist()
        return counts

    def is_focused(self) -> list[bool | None]:
        """Return for each placed chunk whether the question attends to it; None if that was not measured."""
        if self._focused is None:
            return [None] * len(self._chunks)
        return [index in self._focused for index in range(len(self._chunks))]

    @property
    def _lengths(self) -> list[int]:
        return [len(chunk.positions) for chunk in self._chunks]

    def _choose_if_known(self) -> None:
        if self.needs_deviation_pass or self.needs_query_pass:
            return
        if not any(self._budgets):
            self._chosen = np.zeros(0, np.int64)
            return
        lengths = self._lengths
        deviation_N = None
        if self._deviations:
            deviation_N = np.concatenate(self._deviations)[self._placed - self._num_exact]
            if not np.isfinite(deviation_N).all():
                raise NonFiniteError
        given = SelectorInput(
            lengths,
            self._budgets,
            [is_focused is not False for is_focused in self.is_focused()],
            self._attention,
            deviation_N,
            _per_token([chunk.context for chunk in self._chunks], lengths),
            _per_token([chunk.received for chunk in self._chunks], lengths),
        )
        self._chosen = select(self._options.selector, given)


def _budgets(chunks: Sequence[PlacedChunk], options: AnywhereOptions) -> list[int]:
    """Return how many tokens of each chunk are recomputed if the question attends to it (Cache-Craft 3.2.1)."""
    lengths = [len(chunk.positions) for chunk in chunks]
    if options.alpha is None:
        return in_proportion(options.recompute_ratio, lengths)
    shares = (options.share(chunk.reusability) for chunk in chunks)
    return [num_to_recompute(share, length) for share, length in zip(shares, lengths, strict=True)]


def _focus(attention_LN: NDArray[np.float32], lengths: Sequence[int], window: int) -> frozenset[int]:
    """Run Cache-Craft Algorithm 1 over the layers of a query pass; all chunks where no `window` layers agree."""
    finder = FocusFinder(len(lengths), window)
    starts = np.cumsum([0, *lengths[:-1]])
    for attention_N in attention_LN:
        focused = finder.observe(np.add.reduceat(attention_N, starts))
        if focused is not None:
            return focused
    return frozenset(range(len(lengths)))


def _per_token(known: Sequence[NDArray[np.float32] | None], lengths: Sequence[int]) -> NDArray[np.float32]:
    """Concatenate the values of all chunks; 0 where they are not known."""
    pairs = zip(known, lengths, strict=True)
    return np.concatenate([np.zeros(length, np.float32) if values is None else values for values, length in pairs])
