"""Relevance metrics per query with pytrec_eval: nDCG@10, Recall@5/10/100, MRR@10.

The unit is the document, as in the judgements. Values are in the order of the queries, for paired tests.
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
    """Compute every metric for the queries of a run that have a relevant document.

    Args:
        run: query id -> distinct document ids, best first.

    Returns:
        Metric -> one value per query, in the order of the run.
    """
    import pytrec_eval

    judged = [query for query in run if any(grade > 0 for grade in qrels.get(query, {}).values())]
    # The evaluator sorts by score, then id; distinct scores keep the order of the run.
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
    """Return 1 / rank of the first relevant document; trec_eval's metric has no cutoff."""
    for rank, document in enumerate(documents, start=1):
        if grades.get(document, 0) > 0:
            return 1.0 / rank
    return 0.0
