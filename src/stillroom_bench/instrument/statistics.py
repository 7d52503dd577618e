"""Statistics of samples: summaries, ratios with intervals, paired tests (llmds 3.4 and Appendix D).

Percentiles are computed from the samples without correction: unlike llmds D.4, which edits them into order, they are
ordered by construction.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import stats

FloatArray = NDArray[np.float64]

DEFAULT_FLAKY_CV = 0.20
"""Coefficient of variation above which a figure is marked flaky (llmds 3.4.3)."""


class Reproducibility(StrEnum):
    """The classes of llmds D.1, by coefficient of variation."""

    EXCELLENT = "excellent"
    """Below 10 %: accept."""
    GOOD = "good"
    """10 to 20 %: accept with monitoring."""
    FLAKY = "flaky"
    """20 to 50 %: investigate."""
    VERY_FLAKY = "very flaky"
    """50 % and more: reject."""
    UNKNOWN = "one sample"
    """One sample says nothing about the next one."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One metric of one arm."""

    num_samples: int
    mean: float
    std: float
    """Sample standard deviation (n - 1); NaN for a single sample."""
    cv: float
    """std / |mean|; infinite for a mean of 0 with any spread, NaN for a single sample."""
    ci_low: float
    ci_high: float
    """95 % confidence interval of the mean: Student t below 30 samples, normal from 30; of shares see
    `summarise_shares`."""
    p50: float
    p95: float
    p99: float
    minimum: float
    maximum: float

    @property
    def reproducibility(self) -> Reproducibility:
        if self.num_samples < 2:
            return Reproducibility.UNKNOWN
        if self.cv < 0.10:
            return Reproducibility.EXCELLENT
        if self.cv < 0.20:
            return Reproducibility.GOOD
        return Reproducibility.FLAKY if self.cv < 0.50 else Reproducibility.VERY_FLAKY

    def is_flaky(self, threshold: float = DEFAULT_FLAKY_CV) -> bool:
        """Whether the coefficient of variation exceeds the threshold (llmds D.3)."""
        return self.cv > threshold


def summarise(samples: Sequence[float]) -> Summary:
    """Summarise at least one sample (llmds 3.4.1, 3.4.2); samples that are not finite make most fields NaN."""
    values = np.asarray(samples, dtype=np.float64)
    assert values.size > 0, "no samples"
    with np.errstate(invalid="ignore"):
        mean = float(values.mean())
        std = float(values.std(ddof=1)) if values.size > 1 else math.nan
        p50, p95, p99 = (float(value) for value in np.percentile(values, [50, 95, 99]))
    cv = 0.0 if std == 0 else math.inf if mean == 0 else std / abs(mean)
    half = _half_width(std, values.size)
    low, high = float(values.min()), float(values.max())
    return Summary(values.size, mean, std, cv, mean - half, mean + half, p50, p95, p99, low, high)


def summarise_shares(samples: Sequence[float]) -> Summary:
    """Summarise at least one sample between 0 and 1.

    The interval of the mean stays there: Wilson's if all samples are 0 or 1, else that of `summarise`, cut.
    """
    summary = summarise(samples)
    if set(samples) <= {0.0, 1.0}:
        interval = wilson(int(sum(samples)), len(samples))
        return replace(summary, ci_low=interval.low, ci_high=interval.high)
    return replace(summary, ci_low=max(0.0, summary.ci_low), ci_high=min(1.0, summary.ci_high))


def _half_width(std: float, count: int) -> float:
    if count < 2:
        return math.nan  # the spread of one sample is unknown
    critical = float(stats.t.ppf(0.975, count - 1)) if count < 30 else 1.96
    return critical * std / math.sqrt(count)


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    """NaN, like `high`, if the spread is unknown: of one sample."""
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.3g}"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"

    @property
    def is_finite(self) -> bool:
        """Whether neither the value nor a bound is infinite; they are if a denominator can be 0."""
        return math.isfinite(self.value) and not math.isinf(self.low) and not math.isinf(self.high)

    def excludes(self, value: float) -> bool:
        """Return whether the interval lies entirely above or below a value."""
        return value < self.low or value > self.high


def wilson(num_right: int, num_samples: int) -> Interval:
    """Return the share of right samples, of at least one, with its 95 % interval by Wilson (1927)."""
    interval = stats.binomtest(num_right, num_samples).proportion_ci(method="wilson")
    return Interval(num_right / num_samples, float(interval.low), float(interval.high))


def bootstrapped(values: FloatArray, *, seed: int = 0, num_resamples: int = 2000) -> Interval:
    """Return the mean of at least one sample with a percentile bootstrap interval."""
    rows = np.random.default_rng(seed).integers(0, values.size, size=(num_resamples, values.size))
    low, high = np.percentile(values[rows].mean(axis=1), [2.5, 97.5])
    return Interval(float(values.mean()), float(low), float(high))


def rank_correlation(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> Interval | None:
    """Return Spearman's rank correlation with a percentile bootstrap interval of 1,000 resamples.

    None if there are fewer than three pairs, or if all values of one side are equal.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    assert a.size == b.size
    if a.size < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None

    def rho(own: FloatArray, other: FloatArray) -> float:
        if np.ptp(own) == 0 or np.ptp(other) == 0:
            return math.nan
        return float(np.corrcoef(stats.rankdata(own), stats.rankdata(other))[0, 1])

    draws = np.random.default_rng(seed).integers(0, a.size, size=(1000, a.size))
    low, high = np.nanpercentile([rho(a[rows], b[rows]) for rows in draws], [2.5, 97.5])
    return Interval(rho(a, b), float(low), float(high))


def ratio_of_medians(
    numerator: Sequence[float], denominator: Sequence[float], *, seed: int = 0, num_resamples: int = 5000
) -> Interval:
    """Return the ratio of two arms' medians with a percentile bootstrap interval.

    Arms of equal length are resampled in pairs, because interleaved runs share the machine's slow phases; others
    independently.
    """
    a, b = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    if min(a.size, b.size) < 2:
        with np.errstate(divide="ignore", invalid="ignore"):
            return Interval(float(np.divide(np.median(a), np.median(b))), math.nan, math.nan)
    rng = np.random.default_rng(seed)
    rows_a = rng.integers(0, a.size, size=(num_resamples, a.size))
    rows_b = rows_a if a.size == b.size else rng.integers(0, b.size, size=(num_resamples, b.size))
    return _interval(np.median(a), np.median(b), np.median(a[rows_a], axis=1), np.median(b[rows_b], axis=1))


def ratio_of_means(
    numerator: Sequence[float],
    denominator: Sequence[float],
    *,
    block: int = 10,
    seed: int = 0,
    num_resamples: int = 5000,
) -> Interval:
    """Return the ratio of two arms' means over the same requests in the same order, with a bootstrap interval.

    Requests that queue behind each other are slow together, so independent resampling would make the interval too
    narrow. A circular block bootstrap resamples runs of `block` neighbours, at most a fifth of the requests.
    """
    a, b = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    assert a.size == b.size > 0
    if a.size < 2:
        with np.errstate(divide="ignore", invalid="ignore"):
            return Interval(float(np.divide(a[0], b[0])), math.nan, math.nan)
    rng = np.random.default_rng(seed)
    block = max(1, min(block, a.size // 5))
    starts = rng.integers(0, a.size, size=(num_resamples, -(-a.size // block)))
    rows = (starts[:, :, None] + np.arange(block)).reshape(num_resamples, -1)[:, : a.size] % a.size
    return _interval(a.mean(), b.mean(), a[rows].mean(axis=1), b[rows].mean(axis=1))


def ratio_of_pairs(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """Return the geometric mean of positive paired ratios with Student's t interval of their logarithms.

    For few pairs, such as seeds, of which a bootstrap would be too narrow; no interval for a single pair.
    """
    logs = np.log(np.asarray(numerator, dtype=np.float64) / np.asarray(denominator, dtype=np.float64))
    mean = float(logs.mean())
    half = _half_width(float(logs.std(ddof=1)), logs.size) if logs.size > 1 else math.nan
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _interval(numerator: Any, denominator: Any, numerators: FloatArray, denominators: FloatArray) -> Interval:
    """Return the interval of a ratio; infinite if a denominator is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value, ratios = float(np.divide(numerator, denominator)), numerators / denominators
        if np.isnan(ratios).any():  # 0 / 0
            return Interval(value, -math.inf, math.inf)
        low, high = np.percentile(ratios, [2.5, 97.5])
        return Interval(value, float(low), float(high))


@dataclass(frozen=True, slots=True)
class PairedTest:
    """A paired t-test of two arms on the same queries."""

    mean_difference: float
    """first - second."""
    p_value: float
    """Two-sided paired t-test, before correction."""
    adjusted_p: float
    """After Holm's correction over its family of tests."""

    @property
    def is_significant(self) -> bool:
        return self.adjusted_p < 0.05


Name = TypeVar("Name", bound=Hashable)


def paired_tests(pairs: Mapping[Name, tuple[Sequence[float], Sequence[float]]]) -> dict[Name, PairedTest]:
    """Run paired t-tests on a family of comparisons, with Holm's correction."""
    raw = {name: paired_test(a, b) for name, (a, b) in pairs.items()}
    adjusted = holm([p for _, p in raw.values()])
    return {
        name: PairedTest(difference, p, corrected)
        for (name, (difference, p)), corrected in zip(raw.items(), adjusted, strict=True)
    }


def paired_test(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the mean of first - second, and the p-value of a two-sided paired t-test."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    difference = a - b
    if difference.size < 2 or not difference.any():
        return float(difference.mean()), 1.0
    if np.ptp(difference) == 0:  # a constant non-zero difference has no spread
        return float(difference.mean()), 0.0
    return float(difference.mean()), float(stats.ttest_rel(a, b).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down correction, in the given order."""
    count = len(p_values)
    adjusted = [0.0] * count
    largest = 0.0
    for rank, index in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
