"""Chooses `ef_search` or `nprobe` for a goal of recall or time (llmds Hypothesis 3).

The index is searched with a sample of queries at growing effort (`ef_search` of HNSW, `nprobe` of IVF-PQ) and compared
with the exact answer: a `SearchCurve`. The least effort whose recall reaches the goal with confidence is chosen, or the
greatest within the time. The same effort finds less in a larger corpus, so the curve is measured again when the size
has changed by a quarter. A recall goal gives the same choice for the same index and seed; a time goal depends on the
machine.
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
from stillroom.retrieval.atomic_files import write_atomically
from stillroom.retrieval.ranking import Ranking
from stillroom.retrieval.vector_index import SearchedIndex, VectorIndex

K = 10
"""Neighbours whose recall is measured: ann_recall_at_10."""

DEPTH = 50
"""Results per timed search: the default of `search.num_candidates`."""

NUM_QUERIES = 400
"""If all are perfect, 400 queries with K trials each prove a recall of 0.999, the highest goal allowed."""

GROWTH = 0.25
"""Change of size after which the curve is measured again; recall falls by less than 0.002 meanwhile (bench)."""

_NOISE = 1.2
"""Length of the noise added to a stored unit vector to make a query: their cosine is then about 0.64, as between real
questions and the chunks that answer them. Nearer queries would need less effort (docs/index-bench.md)."""

_STEP = math.sqrt(2.0)
_Z = 1.645
"""One-sided 95 % quantile."""

_NUM_ROUNDS = 3
"""Timed runs per query, of which the least counts: the rest is noise of the machine."""

_MAX_TIMED = 100


class TunableIndex(VectorIndex, Protocol):
    """An approximate index that can be searched at several efforts and can compute the exact answer."""

    @property
    def structure(self) -> int:
        """A number that changes when efforts change their meaning."""
        ...

    def effort_range(self) -> tuple[int, int]:
        """Return the least and the greatest useful effort."""
        ...

    def exact(self, queries: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """Return the true ids [q, k] nearest to queries [q, d], padded with -1."""
        ...

    def sample(self, num: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Return up to `num` distinct stored vectors [num, d]."""
        ...


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Recall and time of one effort."""

    effort: int
    ann_recall_at_10: float
    recall_low: float
    """Lower end of the one-sided 95 % confidence interval over queries."""
    p50_s: float
    """Seconds per search; 0 if time was not measured."""
    p95_s: float


@dataclass(frozen=True, slots=True)
class SearchCurve:
    """Recall and time by ascending effort, on one state of an index."""

    num_vectors: int
    points: tuple[CurvePoint, ...]

    def least_for_recall(self, ann_recall: float) -> CurvePoint | None:
        """Return the least effort with at least this recall at 95 % confidence; None if there is none."""
        return next((point for point in self.points if point.recall_low >= ann_recall), None)

    def most_for_budget(self, budget_s: float) -> CurvePoint | None:
        """Return the last point whose 95th percentile is within the budget; None if the first exceeds it."""
        best = None
        for point in self.points:
            if point.p95_s > budget_s:
                break
            best = point
        return best


@dataclass(frozen=True, slots=True)
class Tuning:
    """A chosen effort and its measurement; stored beside the index."""

    goal: str
    """Text of goal and index settings; another goal needs another measurement."""
    num_vectors: int
    """Chunks at the measurement."""
    structure: int
    """`TunableIndex.structure` at the measurement."""
    chosen: CurvePoint

    def holds_for(self, goal: str, index: TunableIndex) -> bool:
        """Whether goal and structure are the same and the size has changed by at most `GROWTH`."""
        is_same = self.goal == goal and self.structure == index.structure
        return is_same and abs(len(index) - self.num_vectors) <= GROWTH * self.num_vectors

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Tuning":
        """Invert `to_json`.

        Raises:
            KeyError, TypeError, ValueError: the content is malformed.
        """
        num_vectors, structure = int(content["num_vectors"]), int(content["structure"])
        return cls(str(content["goal"]), num_vectors, structure, CurvePoint(**content["chosen"]))


class Tuner:
    """Chosen effort of one knowledge base's index, in memory and in a file beside it. Not thread-safe."""

    def __init__(self, path: Path, config: IndexConfig, corpus_id: str, clock: Clock | None = None) -> None:
        """`path`: file of the choice; only `save` writes it."""
        self._path = path
        self._config = config
        self._corpus_id = corpus_id
        self._now = (clock or SystemClock()).monotonic
        self._goal = goal_of(config)
        self._tuning: Tuning | None = None
        self._is_stored = False
        self._problem: tuple[int, ConfigError] | None = None
        """Chunks and error of the last impossible goal, so that not every search measures again."""

    @property
    def tuning(self) -> Tuning | None:
        """The present choice; None before the first search, or without a goal."""
        return self._tuning

    def effort(self, index: SearchedIndex) -> int | None:
        """Return the effort to search with; None without a goal. Measures first (about a second) if needed.

        Raises:
            ConfigError: no effort reaches the goal.
        """
        if self._goal is None or len(index) == 0:
            return None
        tunable = cast(TunableIndex, index)  # an index with a goal is approximate
        if self._tuning is None:
            self._tuning = self._load()
            self._is_stored = self._tuning is not None
        if self._tuning is None or not self._tuning.holds_for(self._goal, tunable):
            self._tuning, self._is_stored = self._tune(tunable), False
        return self._tuning.chosen.effort

    def save(self, index: VectorIndex) -> None:
        """Measure if needed and store the choice. Needs the write lock.

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
    """Return a text of the goal and of all settings that a measurement depends on; None without a goal."""
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
    """Choose the effort for the goal of the configuration. Precondition: it has a goal.

    Args:
        now: clock in seconds; called before and after each timed search.
        queries: real queries [q, d] to measure with; None makes some from the index's own vectors.

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
        raise ConfigError(_unreachable_message(config, curve))
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
        now: clock for timing searches of `DEPTH` results; None measures recall only.
        stop: ends the measurement after a point for which it is true.
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
    """Return integers from low to high, each about 1.4 times the previous."""
    steps = range(math.ceil(math.log(high / low, _STEP)) + 1)
    return sorted({min(high, round(low * _STEP**step)) for step in steps})


def synthetic_queries(index: TunableIndex, num: int, seed: int) -> NDArray[np.float32]:
    """Return up to `num` unit queries [num, d]: stored vectors, each moved in a random direction."""
    rng = np.random.default_rng(seed)
    vectors = index.sample(num, rng)
    noise = rng.standard_normal(vectors.shape).astype(np.float32)
    moved = vectors + _NOISE * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    queries: NDArray[np.float32] = moved / np.linalg.norm(moved, axis=1, keepdims=True)
    return queries


def lower_recall_bound(recalls: Sequence[float]) -> float:
    """Return the lower end of the one-sided 95 % Wilson (1927) interval of the mean recall.

    The K results of one query are not independent trials. The spread between queries gives their effective number (Korn
    and Graubard 1998): from one to K trials per query.
    """
    count, p = len(recalls), float(np.mean(recalls))
    variance = float(np.var(recalls, ddof=1)) / count if count > 1 else 0.0
    num_trials = min(K * count, max(count, p * (1 - p) / variance)) if variance > 0 else K * count
    centre = p + _Z**2 / (2 * num_trials)
    half = _Z * math.sqrt(p * (1 - p) / num_trials + _Z**2 / (4 * num_trials**2))
    return (centre - half) / (1 + _Z**2 / num_trials)


def _recall(found: Ranking, true: NDArray[np.int64]) -> float:
    """Return the share of the true ids [k] that were found."""
    there = {int(chunk_id) for chunk_id in true if chunk_id >= 0}
    return len(there.intersection(chunk_id for chunk_id, _ in found)) / len(there)


def _least_seconds(index: TunableIndex, query: NDArray[np.float32], effort: int, now: Callable[[], float]) -> float:
    seconds = []
    for _ in range(_NUM_ROUNDS):
        began = now()
        index.search(query, DEPTH, effort)
        seconds.append(now() - began)
    return min(seconds)


def _unreachable_message(config: IndexConfig, curve: SearchCurve) -> str:
    first, last = curve.points[0], curve.points[-1]
    if config.ann_recall:
        return (
            f"index.ann_recall = {config.ann_recall} cannot be reached: the greatest effort ({last.effort}) gives "
            f"{last.ann_recall_at_10:.4f} (with confidence {last.recall_low:.4f}); lower it, raise "
            f"{'index.refine' if config.kind == 'ivf_pq' else 'index.m'} in a new knowledge base, or use "
            'index.kind = "flat"'
        )
    return (
        f"index.search_budget_s = {config.search_budget_s} cannot be kept: the least effort takes {first.p95_s:.6f} s "
        "(95th percentile); raise it"
    )
