"""Fusion rules that `stillroom bench retrieval` compares: Stillroom's rules and baselines.

A rule maps `Candidates` to a ranking of chunks, so all rules rank the same candidates.
"""

from collections.abc import Callable, Mapping

import numpy as np

from stillroom.core.ids import ChunkId
from stillroom.retrieval.fusion import convex, minmax, rrf
from stillroom.retrieval.hybrid import Candidates
from stillroom.retrieval.ranking import Ranking, ranked

Rule = Callable[[Candidates], Ranking]


def weighted(dense: Mapping[ChunkId, float], sparse: Mapping[ChunkId, float], alpha: float) -> Ranking:
    """Rank by alpha * dense + (1 - alpha) * sparse; a missing score counts 0."""
    ids = {*dense, *sparse}
    return ranked((i, alpha * dense.get(i, 0.0) + (1 - alpha) * sparse.get(i, 0.0)) for i in ids)


def scaled(side: Ranking) -> dict[ChunkId, float]:
    """Return min-max scaled scores of one side's candidates (llmds 3.3.1); all 1 if they are equal."""
    if not side:
        return {}
    values = [score for _, score in side]
    low, width = min(values), max(values) - min(values)
    return {i: (score - low) / width if width else 1.0 for i, score in side}


def standardised(side: Ranking) -> dict[ChunkId, float]:
    """Return z-scores of one side's candidates, shifted so that the lowest is 0, the score of missing chunks."""
    if not side:
        return {}
    values = np.array([score for _, score in side])
    spread = float(values.std()) or 1.0
    return {i: (score - float(values.min())) / spread for i, score in side}


def distribution_based(side: Ranking) -> dict[ChunkId, float]:
    """Scale scores so that mean - 3 std is 0 and mean + 3 std is 1 (distribution-based score fusion)."""
    if not side:
        return {}
    values = np.array([score for _, score in side])
    spread = 6 * float(values.std())
    low = float(values.mean()) - spread / 2
    return {i: min(1.0, max(0.0, (score - low) / spread)) if spread else 0.5 for i, score in side}


def learned(alpha: float) -> Rule:
    """Return the linear rule with a weight chosen on training queries."""
    return lambda c: weighted(scaled(c.dense), scaled(c.sparse), alpha)


def weighted_convex(alpha: float) -> Rule:
    """Return Stillroom's default rule with another weight."""
    return lambda c: convex(c.cosines, c.bm25, alpha)


ALPHAS = tuple(round(0.05 * step, 2) for step in range(6, 20))
"""Candidate weights of the learned linear rule: 0.3 to 0.95."""

CONVEX_WEIGHTS = (0.7, 0.75, 0.8, 0.85, 0.9)
"""Candidate weights of the dense side for Stillroom's rule."""

OURS = "convex (complete scores; default)"

RULES: dict[str, Rule] = {
    "BM25 only": lambda c: c.sparse,
    "dense only": lambda c: c.dense,
    "naive sum": lambda c: weighted(dict(c.dense), dict(c.sparse), 0.5),
    "min-max, weight 0.5": lambda c: weighted(scaled(c.dense), scaled(c.sparse), 0.5),
    "NASF (llmds 3.3)": lambda c: minmax(c.dense, c.sparse, c.num_query_tokens),
    "RRF": lambda c: rrf((c.dense, c.sparse)),
    "z-score": lambda c: weighted(standardised(c.dense), standardised(c.sparse), 0.5),
    "distribution-based": lambda c: weighted(distribution_based(c.dense), distribution_based(c.sparse), 0.5),
    OURS: lambda c: convex(c.cosines, c.bm25),
}
