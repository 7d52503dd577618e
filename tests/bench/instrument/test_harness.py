"""Tests the harness: order of the arms, samples, memory peaks, environment."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import (
    Arm,
    Direction,
    Metrics,
    direction_of,
    peak_rss_bytes,
    reset_peak_rss,
    run_arms,
)


def test_arms_run_forward_and_backward_after_warm_up() -> None:
    order: list[tuple[str, int]] = []

    def arm(name: str) -> Arm:
        def run(repetition: int) -> Metrics:
            order.append((name, repetition))
            return {"score": repetition}

        return Arm(name, run)

    samples = run_arms([arm("a"), arm("b"), arm("c")], repeat=3, warmup=1)
    assert "".join(name for name, _ in order) == "bac" + "abc" + "cba" + "bca"
    assert samples.of("b", "score") == [0.0, 1.0, 2.0], "warm-up runs are not kept"
    assert len(samples.of("a", "wall_seconds")) == 3


def test_places_of_an_arm_are_spread_evenly() -> None:
    def places(num_arms: int, repeat: int) -> list[list[int]]:
        """Return the place of each arm in each repetition."""
        order: list[int] = []
        arms = [Arm(str(at), lambda _: {}) for at in range(num_arms)]
        run_arms(arms, repeat=repeat, warmup=0, on_run=lambda arm, _: order.append(int(arm)))
        return [
            [order[at : at + num_arms].index(arm) for arm in range(num_arms)] for at in range(0, len(order), num_arms)
        ]

    assert np.mean(places(3, 6), axis=0).tolist() == [1.0] * 3
    assert sorted(map(tuple, places(3, 6))) == sorted(itertools.permutations(range(3)))
    for pair in (0, 2, 4):  # a linear drift affects both arms equally
        assert np.sum(places(2, 6)[pair : pair + 2], axis=0).tolist() == [1, 1]
    assert np.ptp(places(30, 12), axis=0).min() >= 20, "each of many arms runs near the beginning and near the end"


def test_arm_may_return_its_own_wall_time() -> None:
    samples = run_arms([Arm("a", lambda repetition: {"wall_seconds": 42.0})], repeat=2)
    assert samples.of("a", "wall_seconds") == [42.0, 42.0]


def test_memory_peak_is_attributed_to_its_arm() -> None:
    def allocate(num_bytes: int) -> Callable[[int], Metrics]:
        return lambda repetition: {"sum": float(np.ones(num_bytes // 8).sum())}

    samples = run_arms([Arm("big", allocate(200 << 20)), Arm("small", allocate(1 << 10))], repeat=2)
    assert min(samples.of("big", "peak_rss_delta_bytes")) > 150 << 20
    assert max(samples.of("small", "peak_rss_delta_bytes")) < 50 << 20
    reset_peak_rss()
    assert peak_rss_bytes() > 1 << 20


@pytest.mark.parametrize(
    ("direction", "metrics"),
    [
        (Direction.SMALLER, ["ttft_seconds", "index_bytes", "mean_count_error", "recovery_queries", "entries_held"]),
        (Direction.SMALLER, ["recomputed_tokens", "blocks"]),
        (Direction.LARGER, ["queries_per_second", "ndcg_at_10", "token_hit_rate", "ann_recall_at_10", "within_654_ms"]),
        (Direction.NEITHER, ["share_hot", "exchanged_lists", "an undeclared metric"]),
    ],
)
def test_metric_names_imply_the_better_direction(direction: Direction, metrics: list[str]) -> None:
    assert {metric: direction_of(metric) for metric in metrics} == dict.fromkeys(metrics, direction)


def test_environment_is_recorded() -> None:
    environment = record_environment(["/usr/bin/stillroom", "bench", "index"])
    assert environment.command == "stillroom bench index"
    assert environment.num_cpus >= 1 and environment.memory_bytes > 1 << 28
    assert "numpy" in environment.versions


@pytest.mark.parametrize(("value", "expected"), [("4,2", 4), ("3", 3), ("", None), ("many", None)])
def test_number_of_threads_is_that_of_the_outermost_level(
    value: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    environment = record_environment(["x"])
    assert environment.num_threads == (expected or environment.num_cpus)
