"""Lists of scored chunk ids, best first: a higher score is better, and equal scores stand in the order of chunk id.

So a ranking is a function of the corpus, not of the order in which its documents came.
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
    """The same for ids [n] and scores [n]; three times faster for what comes as arrays."""
    ids, scores = first_arrays(ids, scores, len(ids))
    # the same values in other clothes: a list of n calls of ChunkId would cost as much as the sort
    return cast(Ranking, list(zip(ids.tolist(), scores.tolist(), strict=True)))


def first_arrays(
    ids: NDArray[np.int64], scores: NDArray[np.float32], num: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The first `num` of ids [n] and scores [n], best first, ties by id."""
    order = np.lexsort((ids, -scores))[:num]
    return ids[order], scores[order]


def best_of(ids: NDArray[np.int64], scores: NDArray[np.float32], num: int) -> Ranking:
    """The first `num` of ids [n] and scores [n] in any order; without sorting all of them."""
    if 0 < num < len(scores):
        is_near = scores >= np.partition(scores, len(scores) - num)[len(scores) - num]
        ids, scores = ids[is_near], scores[is_near]
    return ranked_arrays(ids, scores)[:num]


def with_ties(
    fetch: Callable[[int], tuple[NDArray[np.int64], NDArray[np.float32]]], num: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids [n] and scores [n] that hold the first `num` and all whose score equals the last one's.

    Args:
        fetch: gives the n best, best first with ties in any order; fewer where there are no more.
    """
    num_asked = num + 1
    ids, scores = fetch(num_asked)
    while len(ids) == num_asked and scores[-1] == scores[num - 1]:
        num_asked *= 2
        ids, scores = fetch(num_asked)
    return ids, scores


def sorted_arrays(ids: NDArray[np.int64], scores: NDArray[np.float32]) -> Ranking:
    """The same for what is already best first, with ties in any order."""
    values = scores.tolist()
    if len(set(values)) < len(values):
        return ranked_arrays(ids, scores)
    return list(zip(cast(list[ChunkId], ids.tolist()), values, strict=True))


def top_k(fetch: Callable[[int], Ranking], k: int, num_total: int) -> Ranking:
    """The first k of what `fetch(n)` (the n best, ties in any order) would give if it broke ties by chunk id.

    Where the k-th and the next score are equal, more are fetched until the tie is seen whole.
    """
    num_asked = min(k + 1, num_total)
    while num_asked > 0:
        found = ranked(fetch(num_asked))
        if num_asked >= num_total or len(found) <= k or found[-1][1] < found[k - 1][1]:
            return found[:k]
        num_asked = min(2 * num_asked, num_total)
    return []
