"""Rankings: lists of (chunk id, score), best first, equal scores ordered by chunk id.

So a ranking depends on the corpus, not on the order in which documents were added.
"""

from collections.abc import Callable, Iterable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from stillroom.core.ids import ChunkId

Ranking = list[tuple[ChunkId, float]]


def ranked(scored: Iterable[tuple[ChunkId, float]]) -> Ranking:
    """Sort by score, then by chunk id."""
    return sorted(scored, key=lambda pair: (-pair[1], pair[0]))


def ranked_arrays(ids: NDArray[np.int64], scores: NDArray[np.float32]) -> Ranking:
    """`ranked` for arrays of ids [n] and scores [n]; three times faster than on pairs."""
    ids, scores = first_arrays(ids, scores, len(ids))
    # a cast: n calls of ChunkId would cost as much as the sort
    return cast(Ranking, list(zip(ids.tolist(), scores.tolist(), strict=True)))


def first_arrays(
    ids: NDArray[np.int64], scores: NDArray[np.float32], num: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the best `num` of ids [n] and scores [n], best first, ties by id."""
    order = np.lexsort((ids, -scores))[:num]
    return ids[order], scores[order]


def best_of(ids: NDArray[np.int64], scores: NDArray[np.float32], num: int) -> Ranking:
    """Rank the best `num` of unordered ids [n] and scores [n] without sorting all of them."""
    if 0 < num < len(scores):
        is_near = scores >= np.partition(scores, len(scores) - num)[len(scores) - num]
        ids, scores = ids[is_near], scores[is_near]
    return ranked_arrays(ids, scores)[:num]


def with_ties(
    fetch: Callable[[int], tuple[NDArray[np.int64], NDArray[np.float32]]], num: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Fetch the best `num` ids [n] and scores [n], and all others whose score equals that of the last.

    Args:
        fetch: n -> the n best, ties in any order; fewer if there are no more.
    """
    num_asked = num + 1
    ids, scores = fetch(num_asked)
    while len(ids) == num_asked and scores[-1] == scores[num - 1]:
        num_asked *= 2
        ids, scores = fetch(num_asked)
    return ids, scores


def sorted_arrays(ids: NDArray[np.int64], scores: NDArray[np.float32]) -> Ranking:
    """`ranked_arrays` for arrays that are already sorted but for ties."""
    values = scores.tolist()
    if len(set(values)) < len(values):
        return ranked_arrays(ids, scores)
    return list(zip(cast(list[ChunkId], ids.tolist()), values, strict=True))


def top_k(fetch: Callable[[int], Ranking], k: int, num_total: int) -> Ranking:
    """Return the k best of `fetch`, ties by chunk id.

    If the k-th and the next score are equal, more results are fetched until all members of the tie are known.

    Args:
        fetch: n -> the n best, ties in any order.
        num_total: most results that `fetch` can give.
    """
    num_asked = min(k + 1, num_total)
    while num_asked > 0:
        found = ranked(fetch(num_asked))
        if num_asked >= num_total or len(found) <= k or found[-1][1] < found[k - 1][1]:
            return found[:k]
        num_asked = min(2 * num_asked, num_total)
    return []
