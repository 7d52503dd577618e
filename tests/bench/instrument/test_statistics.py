"""Tests every statistic against SciPy or hand-computed values."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stillroom_bench.instrument.bench_report import BenchResult, rows
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.statistics import (
    Reproducibility,
    holm,
    paired_tests,
    rank_correlation,
    ratio_of_means,
    ratio_of_medians,
    ratio_of_pairs,
    summarise,
    summarise_shares,
    wilson,
)

SAMPLES = st.lists(st.floats(0.001, 1000), min_size=1, max_size=60)


def test_summary_equals_hand_computed_values() -> None:
    summary = summarise([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])  # mean 5, squares of deviations sum to 32
    assert summary.mean == 5.0
    assert summary.std == pytest.approx(math.sqrt(32 / 7))
    assert summary.cv == pytest.approx(math.sqrt(32 / 7) / 5)
    assert summary.ci_high - 5 == pytest.approx(2.364624 * math.sqrt(32 / 7) / math.sqrt(8), rel=1e-6)
    assert (summary.p50, summary.minimum, summary.maximum) == (4.5, 2.0, 9.0)
    assert summary.p95 == pytest.approx(8.3)  # between the 7th and 8th: 0.95 * 7 = 6.65


def test_rank_correlation_is_spearmans_with_an_interval_around_it() -> None:
    rng = np.random.default_rng(3)
    first = rng.integers(0, 9, size=80).astype(float)
    second = first + rng.normal(0, 4, size=80)
    found = rank_correlation(first.tolist(), second.tolist())

    assert found is not None and found.value == pytest.approx(float(stats.spearmanr(first, second).statistic))
    assert found.low < found.value < found.high and found.low > 0
    assert rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
    assert rank_correlation([1.0, 2.0], [1.0, 2.0]) is None


def test_summary_of_the_papers_example() -> None:
    """llmds 5.2.1: mean 27.05, std 1.45, 5 repetitions: CV 5.37 %.

    The paper's interval [25.77, 28.32] is 1.96 s / sqrt(n), not Student's t as its section 3.4.2 requires below 30
    samples. Ours uses Student's t and is wider.
    """
    samples = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    samples = 27.05 + samples / samples.std(ddof=1) * 1.45
    summary = summarise(samples.tolist())
    assert summary.cv == pytest.approx(0.0536, abs=1e-4)
    assert 27.05 - 1.96 * summary.std / math.sqrt(5) == pytest.approx(25.77, abs=0.01)
    assert summary.ci_low == pytest.approx(25.25, abs=0.01)


@given(SAMPLES)
def test_intervals_equal_those_of_scipy(samples: list[float]) -> None:
    summary, count = summarise(samples), len(samples)
    if count < 2:
        assert math.isnan(summary.ci_low)
        return
    error = stats.sem(samples)
    if error == 0:
        assert summary.ci_low == summary.ci_high == summary.mean
        return
    distribution = stats.t(count - 1) if count < 30 else stats.norm()
    low, high = summary.mean - distribution.ppf(0.975) * error, summary.mean + distribution.ppf(0.975) * error
    assert (summary.ci_low, summary.ci_high) == pytest.approx((low, high), rel=1e-3, abs=1e-6)


@given(st.lists(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)), min_size=1, max_size=40))
def test_interval_of_shares_stays_between_0_and_1_and_holds_the_mean(samples: list[float]) -> None:
    summary = summarise_shares(samples)
    assert 0.0 <= summary.ci_low <= summary.mean + 1e-12 and summary.mean - 1e-12 <= summary.ci_high <= 1.0


def test_interval_of_right_answers_is_that_of_wilson() -> None:
    summary = summarise_shares([1.0, 1.0, 1.0, 0.0])
    # (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n) with p = 0.75, n = 4, z = 1.96
    assert (summary.ci_low, summary.ci_high) == pytest.approx((0.30064, 0.95441), abs=1e-4)
    assert summarise([1.0, 1.0, 1.0, 0.0]).ci_high > 1.0, "Student's t is beyond"
    assert wilson(4, 4).low == pytest.approx(4 / (4 + 1.96**2), abs=1e-4), "four right answers are no proof of all"


@given(SAMPLES)
def test_percentiles_are_ordered(samples: list[float]) -> None:
    summary = summarise(samples)
    assert summary.minimum <= summary.p50 <= summary.p95 <= summary.p99 <= summary.maximum


@pytest.mark.parametrize(
    ("spread", "expected", "flaky"),
    [(0.05, "excellent", False), (0.15, "good", False), (0.3, "flaky", True), (0.8, "very flaky", True)],
)
def test_reproducibility_classes_of_the_appendix(spread: float, expected: str, flaky: bool) -> None:
    samples = np.array([-1.0, 0.0, 1.0]) * spread + 1  # the standard deviation is the spread
    summary = summarise(samples.tolist())
    assert summary.reproducibility is Reproducibility(expected)
    assert summary.is_flaky() is flaky


def test_cv_around_zero_is_zero_or_infinite() -> None:
    assert summarise([0.0, 0.0]).cv == 0.0
    assert summarise([-1.0, 1.0]).cv == math.inf


def test_ratio_of_equal_arms_is_one_and_of_doubled_arm_two() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(10, 1, size=40)
    same = ratio_of_medians(a.tolist(), a.tolist())
    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0)
    double = ratio_of_medians((2 * a).tolist(), (a + rng.normal(0, 0.1, 40)).tolist())
    assert double.low < 2.0 < double.high and double.excludes(1.0) and not double.excludes(2.0)


def test_bootstrap_interval_covers_the_truth_in_95_percent() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        a, b = rng.lognormal(0.3, 0.2, 30), rng.lognormal(0.0, 0.2, 25)
        interval = ratio_of_medians(a.tolist(), b.tolist(), seed=trial, num_resamples=400)
        covered += not interval.excludes(math.exp(0.3))
    assert 180 <= covered <= 199


def test_holm_equals_hand_computed_values() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_monotone_and_never_smaller_than_the_raw_value(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(a >= p for a, p in zip(adjusted, p_values, strict=True))
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    assert all(adjusted[i] <= adjusted[j] for i, j in zip(order, order[1:], strict=False))


def test_paired_tests_equal_scipy_and_are_corrected_together() -> None:
    rng = np.random.default_rng(2)
    base = rng.normal(0.5, 0.2, 50)
    better, similar = base + rng.normal(0.1, 0.1, 50), base + rng.normal(0.0, 0.1, 50)
    tests = paired_tests({"better": (better.tolist(), base.tolist()), "similar": (similar.tolist(), base.tolist())})
    assert tests["better"].p_value == pytest.approx(stats.ttest_rel(better, base).pvalue)
    assert tests["better"].adjusted_p == pytest.approx(2 * tests["better"].p_value)
    assert tests["better"].is_significant and not tests["similar"].is_significant


def test_identical_arms_are_never_significant() -> None:
    test = paired_tests({"same": ([1.0, 2.0], [1.0, 2.0])})["same"]
    assert (test.mean_difference, test.adjusted_p) == (0.0, 1.0)


def test_one_sample_has_a_value_and_nothing_else() -> None:
    summary = summarise([0.203])
    assert summary.mean == summary.p50 == 0.203
    assert all(math.isnan(value) for value in (summary.std, summary.cv, summary.ci_low, summary.ci_high))
    assert summary.reproducibility is Reproducibility.UNKNOWN and not summary.is_flaky()
    for ratio in (ratio_of_medians([2.0], [4.0]), ratio_of_means([2.0], [4.0]), ratio_of_medians([2.0], [4.0, 4.0])):
        assert (str(ratio), ratio.is_finite, ratio.excludes(1.0)) == ("0.5", True, False)
    assert not ratio_of_medians([2.0], [0.0]).is_finite
    assert not ratio_of_medians([0.0, 1.0], [0.0, 1.0]).is_finite, "resamples without a ratio"


def test_report_shows_one_sample_without_interval_and_class() -> None:
    samples = Samples({"a": {"seconds": [0.5]}, "b": {"seconds": [0.25]}})
    result = BenchResult("bench", record_environment(), {}, samples, "a")
    found = {row["arm"]: row for row in rows(result)}
    assert found["b"]["mean"] == "0.25" and found["b"]["x baseline"] == "0.5"
    assert (found["b"]["p95"], found["b"]["CV"], found["b"]["class"]) == ("", "", "one sample")
    assert result.to_json()["arms"]["b"]["seconds"]["ratio_to_baseline"] == {"value": 0.5, "low": None, "high": None}


def test_ratio_of_pairs_is_students_t_of_the_logarithms() -> None:
    found = ratio_of_pairs([2.0, 4.0, 8.0], [1.0, 2.0, 2.0])
    logs = np.log([2.0, 2.0, 4.0])
    low, high = stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs))

    assert (found.value, found.low, found.high) == pytest.approx(tuple(np.exp([logs.mean(), low, high])))
    assert math.isnan(ratio_of_pairs([3.0], [2.0]).low)
