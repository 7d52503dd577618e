"""Which tokens of reused chunks are computed again: a selector scores them, the highest scores are taken.

Each chunk brings a budget. Selectors by `ranks` spend it in the chunk; the others pool the budgets and spend them where
scores are highest. A look shows the selector how the question, over the reused KV as it is, attends to every token of
it. `question` is ours, the others are what it is compared with (docs/chunk-reuse.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import TokenSelector

# N tokens of all placed chunks, one chunk after the other


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known when tokens are chosen."""

    lengths: Sequence[int]
    """Tokens of each placed chunk, in order; together N."""
    budgets: Sequence[int]
    """Of each, how many tokens may be computed again."""
    is_open: Sequence[bool]
    """Of each, whether anything of it is worth repairing."""
    attention_2N: NDArray[np.float32] | None = None
    """From the prompt's last token, and from all of the question in the mean; None if nobody looked."""
    deviation_N: NDArray[np.float32] | None = None
    """How far the values of each token are from those that it has here, in an early layer; None if nobody probed."""
    context_N: NDArray[np.float32] | None = None
    """Attention of each token to the chunks before it, when its KV was computed; 0 where that is not known."""
    received_N: NDArray[np.float32] | None = None
    """Attention that each token received then."""


Selector = Callable[[Seen], NDArray[np.float64]]
"""Gives each of the N tokens a score."""


def question(seen: Seen) -> NDArray[np.float64]:
    """What the answer will be read from: attention of the last token, which is the one that answers, and half as much
    that of the whole question."""
    assert seen.attention_2N is not None
    last_N, mean_N = seen.attention_2N.astype(np.float64)
    scores: NDArray[np.float64] = last_N + 0.5 * mean_N
    return scores


def question_mean(seen: Seen) -> NDArray[np.float64]:
    """Attention of all of the question's tokens alike (ProphetKV, InfoFlow KV)."""
    assert seen.attention_2N is not None
    scores: NDArray[np.float64] = seen.attention_2N[1].astype(np.float64)
    return scores


def deviation(seen: Seen) -> NDArray[np.float64]:
    """Those whose values differ most from the right ones in an early layer (CacheBlend)."""
    assert seen.deviation_N is not None
    scores: NDArray[np.float64] = seen.deviation_N.astype(np.float64)
    return scores


def context(seen: Seen) -> NDArray[np.float64]:
    """The most contextualised tokens of each chunk (Cache-Craft Eq. 14)."""
    assert seen.context_N is not None
    return ranks(seen, seen.context_N)


def received(seen: Seen) -> NDArray[np.float64]:
    """The most attended tokens of each chunk when its KV was computed (H2O's heavy hitters)."""
    assert seen.received_N is not None
    return ranks(seen, seen.received_N)


def first(seen: Seen) -> NDArray[np.float64]:
    """The first tokens of each chunk (EPIC)."""
    return ranks(seen, np.zeros(sum(seen.lengths), np.float32))


def random(seen: Seen) -> NDArray[np.float64]:
    """Any, but always the same ones for the same lengths."""
    return np.random.default_rng(list(seen.lengths)).random(sum(seen.lengths))


def ranks(seen: Seen, values_N: NDArray[np.float32]) -> NDArray[np.float64]:
    """Scores that spend each chunk's budget on its own highest values, of equals on the first."""
    found = []
    ends = np.cumsum(seen.lengths)
    for end, length, budget in zip(ends, seen.lengths, seen.budgets, strict=True):
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


def select(name: TokenSelector, seen: Seen) -> NDArray[np.int64]:
    """Indices into the N tokens, ascending: as many as the open chunks' budgets say together, all in these; of equal
    scores the earlier token."""
    count = sum(budget for budget, is_open in zip(seen.budgets, seen.is_open, strict=True) if is_open)
    if count == 0:
        return np.zeros(0, np.int64)
    if count == sum(seen.lengths):
        return np.arange(count)
    scores = np.where(np.repeat(seen.is_open, seen.lengths), SELECTORS[name](seen), -np.inf)
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def in_proportion(ratio: float, lengths: Sequence[int]) -> list[int]:
    """Budgets of ceil(ratio * N) tokens together, each chunk's as near to its share as whole tokens allow."""
    ends = np.cumsum([0, *lengths])
    totals = np.minimum(np.ceil(ratio * ends - 1e-9).astype(np.int64), ends)
    budgets: list[int] = np.diff(totals).tolist()
    return budgets
