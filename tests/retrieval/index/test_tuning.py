"""Tuning: the confidence bound, the curve on a fake index with a fake clock, and a real graph with fresh queries."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binomtest

from stillroom.config.settings import IndexConfig
from stillroom.core.ids import ChunkId
from stillroom.errors import ConfigError
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.index.hnsw import HnswIndex
from stillroom.retrieval.index.tuning import (
    K,
    Tuner,
    Tuning,
    effort_grid,
    goal_of,
    lower_recall_bound,
    measure_curve,
    synthetic_queries,
    tune,
)
from stillroom.retrieval.ranking import Ranking

RECALL = IndexConfig(kind="hnsw", m=8, ef_construction=40, ann_recall=0.95)
BUDGET = dataclasses.replace(RECALL, ann_recall=0.0, search_budget_s=0.005)


class FakeIndex:
    """Finds `effort` of the true ten in `effort` milliseconds of fake time."""

    def __init__(self, size: int = 1000) -> None:
        self.size = size
        self.structure = 0
        self.now_s = 0.0
        self.num_searches = 0

    def __len__(self) -> int:
        return self.size

    def effort_range(self) -> tuple[int, int]:
        return 1, 20

    def search(
        self, query: NDArray[np.float32], k: int, effort: int | None = None, allowed: AllowedIds | None = None
    ) -> Ranking:
        assert effort is not None
        self.now_s += effort * 1e-3
        self.num_searches += 1
        return [(ChunkId(at if at < effort else 100 + at), 1.0) for at in range(k)]

    def search_staged(
        self,
        query: NDArray[np.float32],
        k: int,
        num_stages: int,
        effort: int | None = None,
        allowed: AllowedIds | None = None,
    ) -> Iterator[Ranking]:
        yield self.search(query, k, effort)

    def exact(self, queries: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        return np.tile(np.arange(k, dtype=np.int64), (len(queries), 1))

    def sample(self, num: int, rng: np.random.Generator) -> NDArray[np.float32]:
        return rng.standard_normal((num, 4)).astype(np.float32)

    def add(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None: ...

    def remove(self, ids: Sequence[int]) -> None: ...

    def in_order(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32] | None]]:
        raise NotImplementedError

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        return {}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None: ...

    def monotonic(self) -> float:
        return self.now_s

    unix = monotonic


def unit(count: int, seed: int, dimension: int = 24) -> NDArray[np.float32]:
    vectors = np.random.default_rng(seed).standard_normal((count, dimension)).astype(np.float32)
    found: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return found


def test_the_least_effort_that_reaches_the_recall_wins() -> None:
    index = FakeIndex()
    tuning = tune(index, RECALL, index.monotonic)
    assert tuning.chosen.effort == 11 and tuning.chosen.ann_recall_at_10 == 1.0
    low = tune(index, dataclasses.replace(RECALL, ann_recall=0.5), index.monotonic)
    assert low.chosen.effort == 6 and 0.5 <= low.chosen.recall_low < 0.6


def test_the_most_effort_within_the_budget_wins() -> None:
    index = FakeIndex()
    tuning = tune(index, BUDGET, index.monotonic)
    assert tuning.chosen.effort == 4
    assert tuning.chosen.p50_s == pytest.approx(0.004) and tuning.chosen.p95_s == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dataclasses.replace(BUDGET, search_budget_s=0.0005), "the least effort takes 0.001000 s"),
        (RECALL, r"the greatest effort \(3\) gives 0.3000.*flat"),
    ],
)
def test_unreachable_goal_is_reported(config: IndexConfig, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = FakeIndex()
    monkeypatch.setattr(index, "effort_range", lambda: (1, 3))
    with pytest.raises(ConfigError, match=message):
        tune(index, config, index.monotonic)


def test_goals_exclude_each_other_and_flat_has_none() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        IndexConfig(kind="hnsw", ann_recall=0.9, search_budget_s=0.1)
    assert goal_of(IndexConfig(ann_recall=0.9)) is None
    assert goal_of(IndexConfig(kind="hnsw")) is None
    assert goal_of(RECALL) != goal_of(BUDGET)


def test_curve_is_measured_again_after_growth_by_more_than_a_quarter(tmp_path: Path) -> None:
    index = FakeIndex()
    tuner = Tuner(tmp_path / "tuning.json", BUDGET, "corpus", index)
    assert tuner.effort(index) == 4
    first, num_searches = tuner.tuning, index.num_searches
    index.size = 1250
    assert tuner.effort(index) == 4 and tuner.tuning is first and index.num_searches == num_searches
    index.size = 1251
    tuner.effort(index)
    assert tuner.tuning is not first and index.num_searches > num_searches
    second, index.structure = tuner.tuning, 1
    tuner.effort(index)
    assert tuner.tuning is not second, "the lists were trained again"


def test_the_choice_is_stored_beside_the_index(tmp_path: Path) -> None:
    path, index = tmp_path / "tuning.json", FakeIndex()
    Tuner(path, RECALL, "corpus", index).save(index)
    num_searches = index.num_searches
    again = Tuner(path, RECALL, "corpus", index)
    assert again.effort(index) == 11 and index.num_searches == num_searches
    assert Tuning.from_json(json.loads(path.read_text())) == again.tuning
    for other in (Tuner(path, RECALL, "another corpus", index), Tuner(path, BUDGET, "corpus", index)):
        other.effort(index)
        assert index.num_searches > num_searches
        num_searches = index.num_searches
    path.write_text("{}")
    assert Tuner(path, RECALL, "corpus", index).effort(index) == 11, "a damaged file is ignored"


def test_an_impossible_goal_is_tried_once(tmp_path: Path) -> None:
    index = FakeIndex()
    tuner = Tuner(tmp_path / "tuning.json", dataclasses.replace(BUDGET, search_budget_s=1e-6), "corpus", index)
    for _ in range(3):
        with pytest.raises(ConfigError):
            tuner.effort(index)
        assert index.num_searches == 400, "100 queries, once for recall and three times for time"
    assert Tuner(tmp_path / "t", IndexConfig(), "corpus").effort(index) is None
    index.size = 0
    assert tuner.effort(index) is None


def test_chosen_effort_reaches_the_recall_on_fresh_queries() -> None:
    vectors = unit(1500, seed=0)
    index = HnswIndex(24, RECALL)
    index.add(np.arange(1500, dtype=np.int64), vectors)
    index.remove(range(100))
    tuning = tune(index, RECALL, lambda: 0.0)
    assert tuning == tune(index, RECALL, lambda: 0.0), "a recall goal is reproducible"
    fresh = synthetic_queries(index, 300, seed=12345)
    truth = index.exact(fresh, K)
    assert truth.min() >= 100, "removed vectors are not in the truth"

    def recall(effort: int) -> float:
        found = [{int(i) for i, _ in index.search(query, K, effort)} for query in fresh]
        pairs = zip(found, truth.tolist(), strict=True)
        return float(np.mean([len(ids.intersection(true)) / K for ids, true in pairs]))

    assert recall(tuning.chosen.effort) >= 0.95
    assert recall(10) < 0.95, "the default is not enough"


def test_recall_rises_with_effort() -> None:
    index = HnswIndex(24, RECALL)
    index.add(np.arange(800, dtype=np.int64), unit(800, seed=0))
    points = measure_curve(index, unit(50, seed=1)).points
    assert [point.effort for point in points] == effort_grid(10, 800)
    assert points[0].ann_recall_at_10 < points[-1].ann_recall_at_10
    assert points[-1].ann_recall_at_10 > 0.99


@given(st.lists(st.integers(0, K), min_size=2, max_size=200))
def test_bound_lies_between_zero_and_the_mean(found: list[int]) -> None:
    recalls = [count / K for count in found]
    bound = lower_recall_bound(recalls)
    assert -1e-9 <= bound <= np.mean(recalls) + 1e-9


def test_bound_equals_the_wilson_interval() -> None:
    # 400 perfect queries are 4000 trials: n / (n + z^2)
    assert lower_recall_bound([1.0] * 400) == pytest.approx(4000 / (4000 + 1.645**2))
    # all or nothing: each query is one trial; one-sided 95 % is two-sided 90 %
    wilson = binomtest(90, 100).proportion_ci(0.90, method="wilson").low
    assert lower_recall_bound([1.0] * 90 + [0.0] * 10) == pytest.approx(wilson, abs=1e-4)


@given(st.integers(1, 100), st.integers(0, 5000))
def test_the_grid_spans_the_range(low: int, more: int) -> None:
    grid = effort_grid(low, low + more)
    assert grid[0] == low and grid[-1] == low + more and grid == sorted(set(grid))
