"""Two rankings to one. Pure functions; the order of the input does not matter, ties are broken by chunk id."""

from collections.abc import Iterable, Sequence

from stillroom.core.ids import ChunkId
from stillroom.retrieval.ranking import Ranking, ranked

_LONG_QUERY = 10
_SHORT_QUERY = 5


def rrf(rankings: Sequence[Iterable[tuple[ChunkId, float]]], rank_constant: int = 60) -> Ranking:
    """Reciprocal rank fusion (Cormack, Clarke and Buettcher 2009): the sum over rankings of 1 / (constant + rank).

    Ranks count from 1. Scores serve only to order each ranking, so their scales need not agree.
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

    The paper's: the min-max scaling over each candidate set (3.3.1) and alpha by query length (3.3.2). Ours: where all
    scores of a side are equal, the paper divides by zero; they all count 1, being all the best. A chunk that one side
    did not find, of which the paper says nothing, gets 0 from that side.
    """
    alpha = dense_weight(num_query_tokens)
    fused: dict[ChunkId, float] = {}
    for weight, side in ((alpha, dense), (1.0 - alpha, sparse)):
        for chunk_id, score in _scaled(list(side)):
            fused[chunk_id] = fused.get(chunk_id, 0.0) + weight * score
    return ranked(fused.items())


def dense_weight(num_query_tokens: int) -> float:
    """alpha of llmds 3.3.2: long queries favour dense, short ones sparse."""
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
