"""`stillroom bench retrieval`: every fusion rule on every data set, with significance tests (llmds Tables 6 and 9).

Candidates are searched once per query and fused by all rules. Four rows have learned parameters, never learned from
the queries they are tested on: "learned linear" by five-fold cross-validation within each set, with one weight and with
one for each kind of query (llmds Hypothesis 1); Stillroom's rule by five-fold cross-validation with one weight for all
sets; and Stillroom's rule with the weight that is best on all other sets, which tests whether the weight transfers to
other kinds of documents.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from stillroom.answer_quality.beir import read_judged_queries
from stillroom.config.settings import StillroomConfig
from stillroom.core.ids import ChunkId
from stillroom.errors import UsageError
from stillroom.retrieval.hybrid import Candidates
from stillroom.retrieval.ranking import Ranking
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.statistics import Interval, holm, paired_tests, ratio_of_means, wilson
from stillroom_bench.loads.beir_knowledge_base import open_knowledge_base
from stillroom_bench.quality.fusion_arms import ALPHAS, CONVEX_WEIGHTS, OURS, RULES, Rule, learned, weighted_convex
from stillroom_bench.quality.ir_metrics import METRICS, Qrels, evaluate
from stillroom_bench.quality.quality_options import RetrievalOptions

NUM_CANDIDATES = 100
NUM_FOLDS = 5
LEARNED = "learned linear (5-fold)"
BY_KIND = "learned linear by kind of query (5-fold)"
HELD_OUT = "convex, weight from other queries"
TRANSFERRED = "convex, weight from other sets"
_MAIN, _RECALL = "ndcg_at_10", "recall_at_10"
_DENSE = "dense only"
_SEARCHES = (_DENSE, "BM25 only", OURS)
"""Searches whose most found documents are compared."""
_NASF, _EQUAL = "NASF (llmds 3.3)", "min-max, weight 0.5"

Values = dict[str, NDArray[np.float64]]
"""Metric -> one value per query."""

Grid = dict[float, Values]
"""Weight of `CONVEX_WEIGHTS` -> values of Stillroom's rule."""


@dataclass(frozen=True, slots=True)
class _Dataset:
    """A data set with the candidates of its queries."""

    name: str
    qrels: Qrels
    candidates: dict[str, Candidates]
    """Query id -> candidates, for queries with a relevant document."""
    names_entity: NDArray[np.bool_]
    """Whether each of these queries names an entity."""
    records: dict[ChunkId, str]

    def run(self, rule: Rule) -> dict[str, list[str]]:
        return {query: self._documents(rule(found)) for query, found in self.candidates.items()}

    def measure(self, rule: Rule) -> Values:
        return evaluate(self.qrels, self.run(rule))

    def _documents(self, ranking: Ranking) -> list[str]:
        """Return the first 100 distinct documents of a ranking of chunks."""
        return list(dict.fromkeys(self.records[chunk_id] for chunk_id, _ in ranking if chunk_id in self.records))[:100]


def run_quality(
    options: RetrievalOptions,
    work_dir: Path,
    config: StillroomConfig,
    on_step: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Measure all rules on all sets.

    Raises:
        UsageError: a folder is not a data set, or two have the same name.
        DocumentError: a line of a data set cannot be read.
    """
    datasets, split, seed = options.datasets, options.split, options.seed
    if len({path.resolve().name for path in datasets}) < len(datasets):
        raise UsageError("two data sets have the same name, which identifies them in the report; rename one")
    environment = record_environment()
    loaded = []
    for path in datasets:
        on_step(f"{path.name}: indexing (cached in {work_dir}) and searching")
        loaded.append(_search(path, work_dir, config, split))
    on_step("fusing and testing")
    values = {dataset.name: {name: dataset.measure(rule) for name, rule in RULES.items()} for dataset in loaded}
    notes = []
    for dataset in loaded:
        one_kind = np.zeros(len(dataset.candidates), dtype=bool)
        values[dataset.name][LEARNED] = _cross_validated(dataset, one_kind, seed)
        values[dataset.name][BY_KIND] = _cross_validated(dataset, dataset.names_entity, seed)
        notes.append(f"{dataset.name}: {dataset.names_entity.mean():.0%} of the queries name an entity")
    on_step("choosing parameters on other queries and other sets")
    grids = {d.name: {weight: d.measure(weighted_convex(weight)) for weight in CONVEX_WEIGHTS} for d in loaded}
    for name, held_out in _held_out(grids, seed).items():
        values[name][HELD_OUT] = held_out
    if len(loaded) > 1:
        chosen = _transferred(grids)
        for name, best in chosen.items():
            values[name][TRANSFERRED] = grids[name][best]
        notes.append(f"weight from other sets: {', '.join(f'{k} {v}' for k, v in chosen.items())}")
    tables = {f"{metric} per set": _table(values, metric) for metric in METRICS}
    tables["paired t-tests of nDCG@10 per set, ours against every rule, Holm-corrected within each set"] = _tests(
        values
    )
    tables["nDCG@10: the pairs of llmds Tables 6 and 9"] = pairs_of_llmds(values)
    tables["recall@10: weights by kind of query (llmds Hypothesis 1)"] = weights_by_kind(values)
    firsts = {d.name: {name: first_documents(d.run(RULES[name])) for name in _SEARCHES} for d in loaded}
    tables["First documents among the 3 % that are found most (RAGCache Figure 6)"] = popularity_rows(firsts)
    if len(loaded) > 1:
        tables["mean of the sets: nDCG@10 differences, stratified z-test, Holm-corrected"] = _stratified(values)
    parameters = {"datasets": [d.name for d in loaded], "split": split, "num_candidates": NUM_CANDIDATES, "seed": seed}
    return BenchResult(
        "stillroom bench retrieval",
        environment,
        parameters,
        _samples(values),
        notes=notes,
        tables=tables,
        sample_of="question",
    )


def _search(path: Path, work_dir: Path, config: StillroomConfig, split: str) -> _Dataset:
    queries, qrels = read_judged_queries(path, split)
    with open_knowledge_base(path, work_dir, config) as kb:
        found = {query: kb.candidates(text, NUM_CANDIDATES) for query, text in queries.items()}
        ids = sorted({chunk_id for candidates in found.values() for chunk_id in candidates.cosines})
        names = np.array([names_entity(text) for text in queries.values()])
        return _Dataset(path.name, qrels, found, names, kb.record_ids(ids))


def names_entity(query: str) -> bool:
    """Return whether a query names an entity: a later word that begins with a capital, a number, or words in quotes.

    Rules in place of the recogniser that llmds Hypothesis 1 plans.
    """
    later = query.split()[1:]
    return any(word[0].isupper() and word != "I" for word in later) or bool(_NUMBER_OR_QUOTE.search(query))


_NUMBER_OR_QUOTE = re.compile(r"\d|\"[^\"]+\"")


def _cross_validated(dataset: _Dataset, kinds: NDArray[np.bool_], seed: int) -> Values:
    """Evaluate each query with the weight that is best for its kind on the other folds."""
    by_alpha = {alpha: dataset.measure(learned(alpha)) for alpha in ALPHAS}
    count = len(dataset.candidates)
    folds = np.random.default_rng(seed).permutation(count) % NUM_FOLDS
    chosen = {metric: np.zeros(count) for metric in METRICS}
    for fold in range(NUM_FOLDS):
        for kind in (False, True):
            inside, outside = (folds == fold) & (kinds == kind), (folds != fold) & (kinds == kind)
            best = max(ALPHAS, key=lambda alpha: by_alpha[alpha][_MAIN][outside].sum())
            for metric in METRICS:
                chosen[metric][inside] = by_alpha[best][metric][inside]
    return chosen


def _held_out(grids: dict[str, Grid], seed: int) -> dict[str, Values]:
    """Evaluate each query with the weight that has the best mean over all sets on the other folds."""
    rng = np.random.default_rng(seed)
    folds = {name: rng.permutation(_num_queries(grid)) % NUM_FOLDS for name, grid in grids.items()}
    held_out = {name: {metric: np.zeros(_num_queries(grid)) for metric in METRICS} for name, grid in grids.items()}
    for fold in range(NUM_FOLDS):
        best = _best({name: folds[name] != fold for name in grids}, grids)
        for name, grid in grids.items():
            inside = folds[name] == fold
            for metric in METRICS:
                held_out[name][metric][inside] = grid[best][metric][inside]
    return held_out


def _transferred(grids: dict[str, Grid]) -> dict[str, float]:
    """Return for each set the weight with the best mean nDCG@10 over the other sets."""
    return {
        held: _best({name: np.full(_num_queries(grid), name != held) for name, grid in grids.items()}, grids)
        for held in grids
    }


def _best(chosen: dict[str, NDArray[np.bool_]], grids: dict[str, Grid]) -> float:
    """Return the weight with the best mean over sets of the mean over the chosen queries."""

    def score(parameters: float) -> float:
        return sum(float(grids[n][parameters][_MAIN][rows].mean()) for n, rows in chosen.items() if rows.any())

    return max(CONVEX_WEIGHTS, key=score)


def _num_queries(grid: Grid) -> int:
    return len(grid[CONVEX_WEIGHTS[0]][_MAIN])


def _table(values: dict[str, dict[str, Values]], metric: str) -> list[dict[str, Any]]:
    """Return a row per rule with a column per set and their mean."""
    names = list(next(iter(values.values())))
    table = []
    for name in names:
        means = {dataset: float(rules[name][metric].mean()) for dataset, rules in values.items()}
        table.append({"rule": name, **means, "mean": float(np.mean(list(means.values())))})
    return table


def _tests(values: dict[str, dict[str, Values]]) -> list[dict[str, Any]]:
    rows = []
    for dataset, rules in values.items():
        pairs = {
            f"{OURS} - {other}": (rules[OURS][_MAIN].tolist(), rules[other][_MAIN].tolist())
            for other in rules
            if other != OURS
        }
        for name, test in paired_tests(pairs).items():
            rows.append(
                {
                    "set": dataset,
                    "difference": name,
                    "nDCG@10": f"{test.mean_difference:+.4f}",
                    "adjusted p": f"{test.adjusted_p:.2g}",
                    "significant": "yes" if test.is_significant else "no",
                }
            )
    return rows


def _stratified(values: dict[str, dict[str, Values]]) -> list[dict[str, Any]]:
    """Test rules for a difference of the mean over sets. All sets weigh the same; their queries give the variance."""
    found = []
    names = list(next(iter(values.values())))
    tested = (OURS, HELD_OUT, TRANSFERRED)
    for ours in tested:
        for other in names:
            if other in tested:
                continue
            mean, error = _mean_gap(values, ours, other)
            found.append((f"{ours} - {other}", mean, float(2 * stats.norm.sf(abs(mean) / error)) if error else 1.0))
    adjusted = holm([p for _, _, p in found])
    return [
        {
            "difference": name,
            "mean nDCG@10": f"{mean:+.4f}",
            "adjusted p": f"{p:.2g}",
            "significant": "yes" if p < 0.05 else "no",
        }
        for (name, mean, _), p in zip(found, adjusted, strict=True)
    ]


def _mean_gap(
    values: dict[str, dict[str, Values]], first: str, second: str, metric: str = _MAIN
) -> tuple[float, float]:
    """Return the difference of two rules, mean over the sets, and its standard error; NaN for a set of one question."""
    gaps = [rules[first][metric] - rules[second][metric] for rules in values.values()]
    variances = [gap.var(ddof=1) / gap.size if gap.size > 1 else np.nan for gap in gaps]
    error = float(np.sqrt(sum(variances))) / len(gaps)
    return float(np.mean([gap.mean() for gap in gaps])), error


def pairs_of_llmds(values: dict[str, dict[str, Values]]) -> list[dict[str, Any]]:
    """Return the differences in nDCG@10 that llmds claims (Tables 6 and 9), with 95 % intervals over the questions."""
    claims = (("naive sum", "+7 points"), ("RRF", "+3 points, p = 0.12"), (_EQUAL, "+2 to +4 points"))
    return [_gaps(values, _NASF, other, claim, _MAIN) for other, claim in claims]


def weights_by_kind(values: dict[str, dict[str, Values]]) -> list[dict[str, Any]]:
    """Return the differences in recall@10 of weights by kind of query (llmds Hypothesis 1), as `pairs_of_llmds`."""
    claims = ((_NASF, "+5 to +10 % expected"), (LEARNED, ""))
    return [_gaps(values, BY_KIND, other, claim, _RECALL) for other, claim in claims]


def _gaps(values: dict[str, dict[str, Values]], first: str, second: str, claim: str, metric: str) -> dict[str, Any]:
    """Return a row of the differences of two rules: the mean of the sets, and each set."""
    row: dict[str, Any] = {"difference": f"{first} - {second}", "paper (recall@10)": claim}
    for name, chosen in [("mean of the sets", values), *((name, {name: values[name]}) for name in values)]:
        mean, error = _mean_gap(chosen, first, second, metric)
        row[name] = str(Interval(mean, mean - 1.96 * error, mean + 1.96 * error))
    return row


def first_documents(run: dict[str, list[str]]) -> list[str]:
    """Return the best document of each query."""
    return [documents[0] if documents else "" for documents in run.values()]


def popularity_rows(firsts: dict[str, dict[str, list[str]]], share: float = 0.03) -> list[dict[str, Any]]:
    """Return for each set and search how many queries find one of its most found documents first.

    The most found documents are chosen on the same queries, `share` of the distinct ones, so that all searches gain by
    it alike. Ratios are to dense search, over the same queries.

    Args:
        firsts: set -> search -> best document of each query.
    """
    rows = []
    for name, by_search in firsts.items():
        hits = {}
        for search, found in by_search.items():
            counts = Counter(found)
            top = {document for document, _ in counts.most_common(max(1, round(share * len(counts))))}
            hits[search] = [float(document in top) for document in found]
        for search, own in hits.items():
            row: dict[str, Any] = {"set": name, "search": search, "queries": len(own)}
            row |= {"different documents": len(set(by_search[search])), "share": str(wilson(int(sum(own)), len(own)))}
            dense = hits[_DENSE]
            rows.append(row | {f"/ {_DENSE}": "" if search == _DENSE else str(ratio_of_means(own, dense, block=1))})
    return rows


def _samples(values: dict[str, dict[str, Values]]) -> Samples:
    """Return nDCG@10 of every query, for comparison with a later run."""
    samples = Samples()
    for dataset, rules in values.items():
        for name, measured in rules.items():
            samples.values[f"{dataset}/{name}"] = {_MAIN: measured[_MAIN].tolist()}
    return samples
