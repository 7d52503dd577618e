"""From what a user wants (a recall, or a time) to the parameter of an approximate index (llmds Hypothesis 3).

The index is searched with a sample of queries at growing effort (`ef_search` of HNSW, `nprobe` of IVF-PQ) and compared
with the exact answer: a `SearchCurve`. The least effort whose recall is surely high enough wins, or the greatest that
keeps the time. As the corpus grows the same effort finds less, so the curve is measured again when the corpus has
changed in size by a quarter. A recall goal gives the same choice for the same index and seed; a time goal depends on
the machine.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig
from stillroom.core.clock import Clock, SystemClock
from stillroom.errors import ConfigError
from stillroom.retrieval.index_file import write_atomically
from stillroom.retrieval.ranking import Ranking
from stillroom.retrieval.vector_index import VectorIndex

K = 10
"""Recall is that of the 10 nearest: ann_recall_at_10."""

DEPTH = 50
"""Results asked for where time is measured: `search.num_candidates` by default."""

NUM_QUERIES = 400
"""A perfect sample of 400 queries proves 0.999, the highest recall that may be asked for, at K trials each."""

GROWTH = 0.25
"""Change of size after which the curve is measured again. In the bench recall falls by less than 0.002 over it."""

_NOISE = 1.2
"""Length of the noise added to a stored vector of length 1 to make a query of it: the cosine between the two is then
about 0.64, as between real questions and the chunks that answer them. Nearer queries would need less effort than real
ones (docs/index-bench.md)."""

_STEP = math.sqrt(2.0)
_Z = 1.645
"""One-sided 95 %."""

_NUM_ROUNDS = 3
"""Each query is timed this often and the least counts: the rest is the machine's noise."""

_MAX_TIMED = 100


class TunableIndex(VectorIndex, Protocol):
    """An approximate index that can be searched at several efforts and knows the exact answer."""

    @property
    def structure(self) -> int:
        """A number that changes when an effort comes to mean something else."""
        ...

    def effort_range(self) -> tuple[int, int]:
        """The least and the greatest effort that make sense."""
        ...

    def exact(self, queries: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """The true ids [q, k] for queries [q, d]; -1 fills up."""
        ...

    def sample(self, num: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Up to `num` different stored vectors [num, d]."""
        ...


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One effort."""

    effort: int
    ann_recall_at_10: float
    recall_low: float
    """Lower end of the one-sided 95 % confidence interval over queries."""
    p50_s: float
    """Seconds per search; 0 where time was not measured."""
    p95_s: float


@dataclass(frozen=True, slots=True)
class SearchCurve:
    """What efforts cost and bring, by ascending effort, on one state of an index."""

    num_vectors: int
    points: tuple[CurvePoint, ...]

    def least_for_recall(self, ann_recall: float) -> CurvePoint | None:
        """The cheapest point whose recall is at least this with 95 % confidence; None where there is none."""
        return next((point for point in self.points if point.recall_low >= ann_recall), None)

    def most_for_budget(self, budget_s: float) -> CurvePoint | None:
        """The last point before searches take longer than this (95th percentile); None where even the first does."""
        best = None
        for point in self.points:
            if point.p95_s > budget_s:
                break
            best = point
        return best


@dataclass(frozen=True, slots=True)
class Tuning:
    """A choice and what it rests on; stored beside the index."""

    goal: str
    """What was asked for and of which index; another goal means another measurement."""
    num_vectors: int
    """Chunks when it was measured."""
    structure: int
    """Of the index then; see `TunableIndex.structure`."""
    chosen: CurvePoint

    def holds_for(self, goal: str, index: TunableIndex) -> bool:
        """Whether the goal is the same and the index has about the size it had."""
        is_same = self.goal == goal and self.structure == index.structure
        return is_same and abs(len(index) - self.num_vectors) <= GROWTH * self.num_vectors

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Tuning":
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        num_vectors, structure = int(content["num_vectors"]), int(content["structure"])
        return cls(str(content["goal"]), num_vectors, structure, CurvePoint(**content["chosen"]))


class Tuner:
    """Keeps the choice for the index of one knowledge base, in memory and in a file beside it. Not thread-safe."""

    def __init__(self, path: Path, config: IndexConfig, corpus_id: str, clock: Clock | None = None) -> None:
        """`path`: where the choice is stored; only `save` writes."""
        self._path = path
        self._config = config
        self._corpus_id = corpus_id
        self._now = (clock or SystemClock()).monotonic
        self._goal = goal_of(config)
        self._tuning: Tuning | None = None
        self._is_stored = False
        self._problem: tuple[int, ConfigError] | None = None
        """Chunks and error when the goal was last found impossible, so that each search does not try again."""

    @property
    def tuning(self) -> Tuning | None:
        """The choice in force; None before the first search, or without a goal."""
        return self._tuning

    def effort(self, index: VectorIndex) -> int | None:
        """The effort to search with, measured first where no measurement holds any more (about a second); None where
        the configuration has no goal.

        Raises:
            ConfigError: no effort reaches the goal.
        """
        if self._goal is None or len(index) == 0:
            return None
        tunable = cast(TunableIndex, index)  # whatever has a goal is approximate
        if self._tuning is None:
            self._tuning = self._load()
            self._is_stored = self._tuning is not None
        if self._tuning is None or not self._tuning.holds_for(self._goal, tunable):
            self._tuning, self._is_stored = self._tune(tunable), False
        return self._tuning.chosen.effort

    def save(self, index: VectorIndex) -> None:
        """Measure if needed, and store the choice. Only under the write lock.

        Raises:
            ConfigError: no effort reaches the goal.
        """
        if self.effort(index) is not None and not self._is_stored and self._tuning is not None:
            content = {"corpus_id": self._corpus_id, **self._tuning.to_json()}
            write_atomically(self._path, (json.dumps(content, indent=2) + "\n").encode())
            self._is_stored = True

    def _tune(self, index: TunableIndex) -> Tuning:
        if self._problem is not None and self._problem[0] == len(index):
            raise self._problem[1]
        try:
            return tune(index, self._config, self._now)
        except ConfigError as error:
            self._problem = (len(index), error)
            raise

    def _load(self) -> Tuning | None:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            return Tuning.from_json(content) if content["corpus_id"] == self._corpus_id else None
        except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: measured again
            return None


def goal_of(config: IndexConfig) -> str | None:
    """What the configuration asks for, in words that change when a measurement is no longer valid; None for nothing."""
    if config.kind == "flat" or not (config.ann_recall or config.search_budget_s):
        return None
    shape = {
        "hnsw": (config.m, config.ef_construction),
        "ivf_pq": (config.nlist, config.num_subquantizers, config.nbits, config.refine),
    }[config.kind]
    asked = f"ann_recall={config.ann_recall}" if config.ann_recall else f"search_budget_s={config.search_budget_s}"
    return f"{config.kind}{shape} seed={config.seed} {asked}"


def tune(
    index: TunableIndex,
    config: IndexConfig,
    now: Callable[[], float],
    queries: NDArray[np.float32] | None = None,
) -> Tuning:
    """Choose the effort for the goal of the configuration, which has one.

    Args:
        now: seconds from an arbitrary start; called before and after each timed search.
        queries: real ones [q, d] to measure with; None makes some from the index's own vectors.

    Raises:
        ConfigError: no effort reaches the goal.
    """
    goal = goal_of(config)
    assert goal is not None and len(index) > 0
    sample = synthetic_queries(index, NUM_QUERIES, config.seed) if queries is None else queries
    if config.ann_recall:
        curve = measure_curve(index, sample, stop=lambda point: point.recall_low >= config.ann_recall)
        chosen = curve.least_for_recall(config.ann_recall)
    else:
        timed = sample[:_MAX_TIMED]
        curve = measure_curve(index, timed, now=now, stop=lambda point: point.p95_s > config.search_budget_s)
        chosen = curve.most_for_budget(config.search_budget_s)
    if chosen is None:
        raise ConfigError(_why_not(config, curve))
    return Tuning(goal, len(index), index.structure, chosen)


def measure_curve(
    index: TunableIndex,
    queries: NDArray[np.float32],
    *,
    now: Callable[[], float] | None = None,
    stop: Callable[[CurvePoint], bool] = lambda _: False,
) -> SearchCurve:
    """Search with queries [q, d] at geometrically growing effort.

    Args:
        now: the clock to time searches of `DEPTH` results with; None measures recall only.
        stop: no greater effort is tried after a point for which this holds.
    """
    truth = index.exact(queries, K)
    points: list[CurvePoint] = []
    for effort in effort_grid(*index.effort_range()):
        recalls = [_recall(index.search(query, K, effort), true) for query, true in zip(queries, truth, strict=True)]
        seconds = [_least_seconds(index, query, effort, now) for query in queries] if now is not None else [0.0]
        p50, p95 = np.percentile(seconds, [50, 95])
        points.append(CurvePoint(effort, float(np.mean(recalls)), lower_recall_bound(recalls), float(p50), float(p95)))
        if stop(points[-1]):
            break
    return SearchCurve(len(index), tuple(points))


def effort_grid(low: int, high: int) -> list[int]:
    """Whole numbers from low to high, each about 1.4 times the one before."""
    steps = range(math.ceil(math.log(high / low, _STEP)) + 1)
    return sorted({min(high, round(low * _STEP**step)) for step in steps})


def synthetic_queries(index: TunableIndex, num: int, seed: int) -> NDArray[np.float32]:
    """Queries [up to num, d] of length 1: stored vectors, moved in a random direction."""
    rng = np.random.default_rng(seed)
    vectors = index.sample(num, rng)
    noise = rng.standard_normal(vectors.shape).astype(np.float32)
    moved = vectors + _NOISE * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    queries: NDArray[np.float32] = moved / np.linalg.norm(moved, axis=1, keepdims=True)
    return queries


def lower_recall_bound(recalls: Sequence[float]) -> float:
    """Lower end of the one-sided 95 % Wilson (1927) interval of the mean recall of queries.

    The K results of one query are not independent trials. Their effective number is what the spread between queries
    says (Korn and Graubard 1998): from one trial per query up to K.
    """
    count, p = len(recalls), float(np.mean(recalls))
    variance = float(np.var(recalls, ddof=1)) / count if count > 1 else 0.0
    num_trials = min(K * count, max(count, p * (1 - p) / variance)) if variance > 0 else K * count
    centre = p + _Z**2 / (2 * num_trials)
    half = _Z * math.sqrt(p * (1 - p) / num_trials + _Z**2 / (4 * num_trials**2))
    return (centre - half) / (1 + _Z**2 / num_trials)


def _recall(found: Ranking, true: NDArray[np.int64]) -> float:
    """The share of the true ids [k] among those found."""
    there = {int(chunk_id) for chunk_id in true if chunk_id >= 0}
    return len(there.intersection(chunk_id for chunk_id, _ in found)) / len(there)


def _least_seconds(index: TunableIndex, query: NDArray[np.float32], effort: int, now: Callable[[], float]) -> float:
    seconds = []
    for _ in range(_NUM_ROUNDS):
        began = now()
        index.search(query, DEPTH, effort)
        seconds.append(now() - began)
    return min(seconds)


def _why_not(config: IndexConfig, curve: SearchCurve) -> str:
    first, last = curve.points[0], curve.points[-1]
    if config.ann_recall:
        return (
            f"index.ann_recall = {config.ann_recall} cannot be reached: the most effort ({last.effort}) gives "
            f"{last.ann_recall_at_10:.4f} (surely {last.recall_low:.4f}); ask for less, raise "
            f"{'index.refine' if config.kind == 'ivf_pq' else 'index.m'} in a new knowledge base, or use "
            'index.kind = "flat"'
        )
    return (
        f"index.search_budget_s = {config.search_budget_s} cannot be kept: the least effort takes {first.p95_s:.6f} s "
        "(95th percentile); allow more time"
    )
