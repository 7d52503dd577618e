"""Tests the comparison of a result with an earlier one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from stillroom.errors import UsageError
from stillroom_bench.instrument.bench_report import BenchResult, SampleOf, save
from stillroom_bench.instrument.comparison import Earlier, MetricChange, changes_between, compare, load_earlier
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples


def samples(metric: str, *runs: float, arm: str = "ours") -> Samples:
    return Samples({arm: {metric: list(runs)}})


def noisy(scale: float = 1.0, seed: int = 0, count: int = 20) -> Samples:
    return samples("search_seconds", *(scale * np.random.default_rng(seed).normal(0.002, 0.0001, count)))


def many(num_figures: int, num_runs: int, scale: float) -> Samples:
    draw = np.random.default_rng(0)
    return Samples(
        {f"arm {at}": {"p50_seconds": list(scale * draw.normal(1, 0.01, num_runs))} for at in range(num_figures)}
    )


def only(changes: list[MetricChange]) -> MetricChange:
    (change,) = changes
    return change


def result(found: Samples, sample_of: SampleOf = "run", **parameters: Any) -> BenchResult:
    return BenchResult("bench x", record_environment(["x"]), parameters, found, sample_of=sample_of)


def test_slowdown_is_a_regression_and_speedup_an_improvement() -> None:
    assert only(changes_between(noisy(1.3, seed=1), noisy())).verdict == "regression"
    assert only(changes_between(noisy(0.7, seed=1), noisy())).verdict == "improvement"
    assert only(changes_between(noisy(seed=1), noisy(seed=2))).verdict == "no difference"


@pytest.mark.parametrize(
    ("metric", "verdict"),
    [
        ("recall_per_second", "improvement"),
        ("token_hit_rate", "improvement"),
        ("recovery_queries", "regression"),
        ("entries_held", "regression"),
        ("recomputed_tokens", "regression"),
        ("exchanged_lists", "changed"),
    ],
)
def test_doubling_is_judged_by_the_direction_of_the_metric(metric: str, verdict: str) -> None:
    runs = [1000.0 + step for step in range(10)]
    assert only(changes_between(samples(metric, *(2 * one for one in runs)), samples(metric, *runs))).verdict == verdict


def test_too_few_runs_are_reported_with_the_number_needed() -> None:
    few = compare(result(many(100, 5, 3.0)), Earlier("bench x", {}, many(100, 5, 1.0)))
    assert {change.verdict for change in few.changes} == {"cannot be told with 5 runs"}
    assert few.needed is not None and f"with {few.needed} on both sides" in few.warnings[0]
    enough = compare(result(many(100, few.needed, 3.0)), Earlier("bench x", {}, many(100, few.needed, 1.0)))
    assert {change.verdict for change in enough.changes} == {"regression"} and not enough.warnings
    less = compare(result(many(100, few.needed - 1, 3.0)), Earlier("bench x", {}, many(100, few.needed - 1, 1.0)))
    assert not any(change.is_significant for change in less.changes)
    assert only(changes_between(noisy(3.0, count=1), noisy(count=1))).verdict == "cannot be told with 1 run"


def test_ties_do_not_lower_the_smallest_p_value() -> None:
    change = only(changes_between(samples("ttft_seconds", 2.0, 2.0, 2.0), samples("ttft_seconds", 1.0, 1.0, 1.0)))
    assert change.verdict == "cannot be told with 3 runs" and change.p_value == change.least_p


def test_constant_metrics_do_not_count_in_the_correction() -> None:
    now, then = many(1, 5, 3.0), many(1, 5, 1.0)
    for found in (now, then):
        found.values |= {f"exact {at}": {"recall": [0.9] * 5} for at in range(100)}
    assert [change.verdict for change in changes_between(now, then)] == ["regression", *["no difference"] * 100]


def test_questions_are_compared_in_pairs() -> None:
    then = np.clip(np.random.default_rng(0).beta(0.6, 0.5, 300), 0, 1)
    now = np.clip(then - 0.03, 0, 1)
    earlier = Earlier("bench x", {"seed": 0}, samples("ndcg_at_10", *then))
    change = only(compare(result(samples("ndcg_at_10", *now), "question", seed=0), earlier).changes)
    assert change.verdict == "regression" and change.now == pytest.approx(now.mean())
    assert change.p_value == pytest.approx(stats.ttest_rel(now, then).pvalue)
    other = only(compare(result(samples("ndcg_at_10", *now), "question", seed=1), earlier).changes)
    assert other.p_value == pytest.approx(stats.mannwhitneyu(now, then).pvalue), "another seed may draw other questions"
    two = changes_between(samples("exact_match", 1, 1), samples("exact_match", 0, 0), "question", is_paired=True)
    assert only(two).verdict == "cannot be told with 2 questions"


def test_metrics_that_were_zero_are_compared() -> None:
    change = only(changes_between(samples("stall_seconds", *range(1, 9)), samples("stall_seconds", *[0.0] * 8)))
    assert (change.then, change.now, change.ratio, change.verdict) == (0.0, 4.5, None, "regression")
    half = [0.0] * 200 + [0.5] * 100
    now = samples("ndcg_at_10", *(one / 2 for one in half))
    assert only(changes_between(now, samples("ndcg_at_10", *half), "question", is_paired=True)).verdict == "regression"


def test_other_benchmark_is_refused_and_different_parameters_are_named() -> None:
    with pytest.raises(UsageError, match="a result of `bench y`, which `bench x` cannot be compared to"):
        compare(result(noisy()), Earlier("bench y", {}, noisy()))
    now = result(noisy(), size=100, ratios=(0.1, 0.2), seed=0)
    found = compare(now, Earlier("bench x", {"size": 50, "ratios": [0.1, 0.2], "older": 1}, noisy()))
    assert found.differing == {"size": (50, 100)} and "size (50 then, 100 now)" in found.warnings[0]
    found = compare(result(noisy()), Earlier("bench x", {}, samples("recall", 1.0)))
    assert found.unmatched == ["ours recall", "ours search_seconds"] and not found.changes


def change_format(text: str) -> str:
    return text.replace('"format": 1', '"format": 99')


@pytest.mark.parametrize("spoil", [lambda _: "", lambda _: "[]", lambda _: '{"format": 1, "arms": 3}', change_format])
def test_invalid_result_files_are_refused(tmp_path: Path, spoil: Callable[[str], str]) -> None:
    path = tmp_path / "r.json"
    save(result(noisy(), k=1), path)
    assert load_earlier(path) == Earlier("bench x", {"k": 1}, noisy())
    path.write_text(spoil(path.read_text()))
    with pytest.raises(UsageError, match=str(path)):
        load_earlier(path)
