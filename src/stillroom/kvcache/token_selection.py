"""Which tokens of reused chunks are computed again: a selector scores them, the highest scores are taken.

A look shows the selector how the question, over the reused KV as it is, attends to every token of it. `question` is
ours, the others are what it is compared with (docs/chunk-reuse.md).
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
    attention_2N: NDArray[np.float32] | None
    """From the prompt's last token, and from all of the question in the mean; None if nobody looked."""
    context_N: NDArray[np.float32] | None = None
    """Attention of each token to the chunks before it, when its KV was computed; 0 where that is not known."""


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


def context(seen: Seen) -> NDArray[np.float64]:
    """The most contextualised tokens of each chunk (Cache-Craft Eq. 14), in proportion to its length."""
    assert seen.context_N is not None
    ends = np.cumsum(seen.lengths)
    ranks = []
    for end, length in zip(ends, seen.lengths, strict=True):
        order = np.argsort(-seen.context_N[end - length : end], kind="stable")
        rank = np.empty(length)
        rank[order] = -np.arange(length) / length
        ranks.append(rank)
    scores: NDArray[np.float64] = np.concatenate(ranks)
    return scores


def first(seen: Seen) -> NDArray[np.float64]:
    """The first tokens of each chunk, as many of each in proportion to its length (EPIC)."""
    scores: NDArray[np.float64] = np.concatenate([-np.arange(length) / length for length in seen.lengths])
    return scores


def random(seen: Seen) -> NDArray[np.float64]:
    """Any, but always the same ones for the same lengths."""
    return np.random.default_rng(list(seen.lengths)).random(sum(seen.lengths))


SELECTORS: dict[TokenSelector, Selector] = {
    "question": question,
    "question_mean": question_mean,
    "context": context,
    "first": first,
    "random": random,
}
assert set(SELECTORS) == set(get_args(TokenSelector))


def needs_look(name: TokenSelector, ratio: float) -> bool:
    """Whether the selector has to know what the question attends to."""
    return name in ("question", "question_mean") and 0.0 < ratio < 1.0


def select(name: TokenSelector, ratio: float, seen: Seen) -> NDArray[np.int64]:
    """Indices into the N tokens, ascending: ceil(ratio * N) of them; of equal scores the earlier token."""
    num_tokens = sum(seen.lengths)
    count = min(int(np.ceil(ratio * num_tokens - 1e-9)), num_tokens)
    if count == 0:
        return np.zeros(0, np.int64)
    if count == num_tokens:
        return np.arange(num_tokens)
    return np.sort(np.argsort(-SELECTORS[name](seen), kind="stable")[:count])
