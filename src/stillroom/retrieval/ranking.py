"""Lists of scored chunk ids, best first: a higher score is better, and equal scores stand in the order of chunk id.

So a ranking is a function of the corpus, not of the order in which its documents came.
"""

from collections.abc import Callable, Iterable

from stillroom.core.ids import ChunkId

Ranking = list[tuple[ChunkId, float]]


def ranked(scored: Iterable[tuple[ChunkId, float]]) -> Ranking:
    """Sort by score, then by chunk id."""
    return sorted(scored, key=lambda pair: (-pair[1], pair[0]))


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
