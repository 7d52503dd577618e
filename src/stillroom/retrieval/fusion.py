"""Fusion rules: pure functions that merge a dense and a sparse ranking. Ties are broken by chunk id."""

from collections.abc import Iterable, Mapping, Sequence

from stillroom.core.ids import ChunkId
from stillroom.retrieval.ranking import Ranking, ranked

_LONG_QUERY = 10
_SHORT_QUERY = 5


def rrf(rankings: Sequence[Iterable[tuple[ChunkId, float]]], rank_constant: int = 60) -> Ranking:
    """Reciprocal rank fusion (Cormack, Clarke and Buettcher 2009): the sum over rankings of 1 / (constant + rank).

    Ranks count from 1. Scores only order each ranking, so their scales need not agree.
    """
    fused: dict[ChunkId, float] = {}
    for ranking in rankings:
        for rank, (chunk_id, _) in enumerate(ranked(ranking), start=1):
            fused[chunk_id] = fused.get(chunk_id, 0.0) + 1.0 / (rank_constant + rank)
    return ranked(fused.items())


def minmax(
    dense: Iterable[tuple[ChunkId, float]], sparse: Iterable[tuple[ChunkId, float]], num_query_tokens: int
) -> Ranking:
    """Normalised adaptive score fusion (llmds 3.3): alpha * dense + (1 - alpha) * sparse, each scaled to [0, 1].

    From the paper: min-max scaling over each candidate set (3.3.1) and alpha by query length (3.3.2). Added: if all
    scores of a side are equal, where the paper divides by zero, each scales to 1; a chunk that a side did not find gets
    0 from that side.
    """
    alpha = dense_weight(num_query_tokens)
    fused: dict[ChunkId, float] = {}
    for weight, side in ((alpha, dense), (1.0 - alpha, sparse)):
        for chunk_id, score in _scaled(list(side)):
            fused[chunk_id] = fused.get(chunk_id, 0.0) + weight * score
    return ranked(fused.items())


CONVEX_DENSE_WEIGHT = 0.8
"""alpha of `convex`; chosen by the measurements of docs/retrieval-quality.md."""


def convex(
    dense: Mapping[ChunkId, float], sparse: Mapping[ChunkId, float], alpha: float = CONVEX_DENSE_WEIGHT
) -> Ranking:
    """alpha * dense + (1 - alpha) * sparse over complete scores, each scaled from the least possible to the best found.

    Unlike in `minmax`, every candidate has its true score from both sides, also from a side that did not find it. The
    least possible score is -1 for a cosine and 0 for BM25 (theoretical min-max, Bruch, Gai and Ingber 2023).

    Args:
        dense: cosine of each candidate.
        sparse: BM25 score of each candidate; same keys as `dense`.
    """
    assert dense.keys() == sparse.keys(), "scores are not complete"
    if not dense:
        return []
    best_dense = max(dense.values()) + 1.0
    best_sparse = max(sparse.values())
    return ranked(
        (
            chunk_id,
            alpha * (cosine + 1.0) / (best_dense or 1.0) + (1.0 - alpha) * sparse[chunk_id] / (best_sparse or 1.0),
        )
        for chunk_id, cosine in dense.items()
    )


def dense_weight(num_query_tokens: int) -> float:
    """Return alpha of llmds 3.3.2: long queries favour dense, short queries sparse."""
    if num_query_tokens > _LONG_QUERY:
        return 0.7
    return 0.5 if num_query_tokens >= _SHORT_QUERY else 0.3


def _scaled(side: list[tuple[ChunkId, float]]) -> Ranking:
    if not side:
        return []
    lowest = min(score for _, score in side)
    width = max(score for _, score in side) - lowest
    if width == 0.0:
        return [(chunk_id, 1.0) for chunk_id, _ in side]
    return [(chunk_id, (score - lowest) / width) for chunk_id, score in side]
