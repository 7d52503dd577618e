"""Relevance metrics per query, by a pytrec_eval-compatible library: nDCG@10, Recall@5/10/100, MRR@10.

The unit is the document, as in the judgements. Numbers per query come back in the order of the queries, so that arms
can be tested in pairs.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

METRICS = ("ndcg_at_10", "recall_at_5", "recall_at_10", "recall_at_100", "mrr_at_10")

_NAMES = {
    "ndcg_cut_10": "ndcg_at_10",
    "recall_5": "recall_at_5",
    "recall_10": "recall_at_10",
    "recall_100": "recall_at_100",
}

Qrels = Mapping[str, Mapping[str, int]]
"""Query id -> document id -> grade; 0 is judged and not relevant."""


def evaluate(qrels: Qrels, run: Mapping[str, Sequence[str]]) -> dict[str, NDArray[np.float64]]:
    """Every metric, one value per query of the run that has a relevant document, in the run's order.

    Args:
        run: query id -> distinct document ids, best first.
    """
    import pytrec_eval

    judged = [query for query in run if any(grade > 0 for grade in qrels.get(query, {}).values())]
    # The evaluator orders by score, and ties by id: a score per rank keeps our order.
    scored = {query: {doc: float(-rank) for rank, doc in enumerate(run[query])} for query in judged}
    evaluator = pytrec_eval.RelevanceEvaluator(
        {query: dict(qrels[query]) for query in judged}, {"ndcg_cut.10", "recall.5,10,100"}
    )
    found = evaluator.evaluate({query: scored[query] for query in judged})
    values = {
        ours: np.array([found.get(query, {}).get(theirs, 0.0) for query in judged]) for theirs, ours in _NAMES.items()
    }
    values["mrr_at_10"] = np.array([_reciprocal_rank(qrels[query], run[query][:10]) for query in judged])
    return values


def _reciprocal_rank(grades: Mapping[str, int], documents: Sequence[str]) -> float:
    """1 / rank of the first relevant one; trec_eval's own has no cutoff."""
    for rank, document in enumerate(documents, start=1):
        if grades.get(document, 0) > 0:
            return 1.0 / rank
    return 0.0
