"""Selectors: which tokens of placed chunks are recomputed. A selector scores the tokens; the highest scores are taken.

Each chunk brings a budget. Selectors by `ranks` spend it within the chunk; the others pool the budgets and spend them
where scores are highest. `question` is this project's, the others are compared with it (docs/chunk-reuse.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import TokenSelector

# N tokens of all placed chunks, chunk after chunk


@dataclass(frozen=True, slots=True)
class SelectorInput:
    """Input of a token selector."""

    lengths: Sequence[int]
    """Tokens of each placed chunk, in order; N in all."""
    budgets: Sequence[int]
    """Most tokens of each chunk to recompute."""
    is_open: Sequence[bool]
    """Whether any token of each chunk may be recomputed."""
    attention_2N: NDArray[np.float32] | None = None
    """From the prompt's last token, and the mean over the question's tokens; None without a query pass."""
    deviation_N: NDArray[np.float32] | None = None
    """Distance between each token's kept and computed values in an early layer; None without a deviation pass."""
    context_N: NDArray[np.float32] | None = None
    """Attention of each token to the chunks before it when its KV was computed; 0 where that is not known."""
    received_N: NDArray[np.float32] | None = None
    """Attention that each token received when its KV was computed; 0 where that is not known."""


Selector = Callable[[SelectorInput], NDArray[np.float64]]
"""Returns a score for each of the N tokens."""


def question(given: SelectorInput) -> NDArray[np.float64]:
    """Attention of the last token, which generates the answer, plus half the mean attention of the whole question."""
    assert given.attention_2N is not None
    last_N, mean_N = given.attention_2N.astype(np.float64)
    scores: NDArray[np.float64] = last_N + 0.5 * mean_N
    return scores


def question_mean(given: SelectorInput) -> NDArray[np.float64]:
    """Mean attention of the question's tokens (ProphetKV, InfoFlow KV)."""
    assert given.attention_2N is not None
    scores: NDArray[np.float64] = given.attention_2N[1].astype(np.float64)
    return scores


def deviation(given: SelectorInput) -> NDArray[np.float64]:
    """Distance between kept and computed values in an early layer (CacheBlend)."""
    assert given.deviation_N is not None
    scores: NDArray[np.float64] = given.deviation_N.astype(np.float64)
    return scores


def context(given: SelectorInput) -> NDArray[np.float64]:
    """The most contextualised tokens of each chunk (Cache-Craft Eq. 14)."""
    assert given.context_N is not None
    return ranks(given, given.context_N)


def received(given: SelectorInput) -> NDArray[np.float64]:
    """The most attended tokens of each chunk when its KV was computed (H2O's heavy hitters)."""
    assert given.received_N is not None
    return ranks(given, given.received_N)


def first(given: SelectorInput) -> NDArray[np.float64]:
    """The first tokens of each chunk (EPIC)."""
    return ranks(given, np.zeros(sum(given.lengths), np.float32))


def random(given: SelectorInput) -> NDArray[np.float64]:
    """Random tokens, the same for the same lengths."""
    return np.random.default_rng(list(given.lengths)).random(sum(given.lengths))


def ranks(given: SelectorInput, values_N: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return scores that spend each chunk's budget on its own highest values; of equal values the first."""
    found = []
    ends = np.cumsum(given.lengths)
    for end, length, budget in zip(ends, given.lengths, given.budgets, strict=True):
        rank = np.empty(length)
        rank[np.argsort(-values_N[end - length : end], kind="stable")] = np.arange(length)
        found.append(-rank / budget if budget else np.full(length, -np.inf))
    scores: NDArray[np.float64] = np.concatenate(found)
    return scores


SELECTORS: dict[TokenSelector, Selector] = {
    "question": question,
    "question_mean": question_mean,
    "context": context,
    "received": received,
    "deviation": deviation,
    "first": first,
    "random": random,
}
assert set(SELECTORS) == set(get_args(TokenSelector))


def select(name: TokenSelector, given: SelectorInput) -> NDArray[np.int64]:
    """Return the selected indices into the N tokens, ascending: as many as the budgets of the open chunks allow.

    Only tokens of open chunks are selected; of equal scores the earlier token.
    """
    count = sum(budget for budget, is_open in zip(given.budgets, given.is_open, strict=True) if is_open)
    if count == 0:
        return np.zeros(0, np.int64)
    if count == sum(given.lengths):
        return np.arange(count)
    scores = np.where(np.repeat(given.is_open, given.lengths), SELECTORS[name](given), -np.inf)
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def in_proportion(ratio: float, lengths: Sequence[int]) -> list[int]:
    """Split ceil(ratio * N) tokens into budgets, each as near to its chunk's share as whole tokens allow."""
    ends = np.cumsum([0, *lengths])
    totals = np.minimum(np.ceil(ratio * ends - 1e-9).astype(np.int64), ends)
    budgets: list[int] = np.diff(totals).tolist()
    return budgets
