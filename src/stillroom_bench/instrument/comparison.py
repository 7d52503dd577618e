"""Compares a result with an earlier one: changes, their significance, and figures with too few samples to tell."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from stillroom.errors import UsageError
from stillroom_bench.instrument.bench_report import FORMAT, BenchResult, SampleOf
from stillroom_bench.instrument.harness import Direction, Samples, direction_of
from stillroom_bench.instrument.statistics import Interval, holm, paired_test, ratio_of_means, ratio_of_medians

LEVEL = 0.05
"""Adjusted p-values below it are significant."""
_MOST_EXACT = 50
"""Maximum samples of an arm for the exact rank test."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """The contents of an earlier result file."""

    benchmark: str
    parameters: dict[str, Any]
    samples: Samples


def load_earlier(path: Path) -> Earlier:
    """Read a result file.

    Raises:
        UsageError: the file is not a result of this format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise UsageError(f"{path} has result format {content['format']}, this version reads {FORMAT}; run it again")
        samples = Samples()
        for arm, metrics in content["arms"].items():
            samples.values[arm] = {
                metric: [math.nan if x is None else float(x) for x in data["samples"]]
                for metric, data in metrics.items()
            }
        return Earlier(str(content["benchmark"]), dict(content["parameters"]), samples)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a result of stillroom bench: {error}") from None


def check_benchmark(earlier: Earlier, benchmark: str) -> None:
    """Check that the earlier result is of this benchmark; raises UsageError otherwise."""
    if earlier.benchmark != benchmark:
        raise UsageError(
            f"--compare names a result of `{earlier.benchmark}`, which `{benchmark}` cannot be compared to"
        )


@dataclass(frozen=True, slots=True)
class MetricChange:
    """One metric of one arm, now against then."""

    arm: str
    metric: str
    then: float
    now: float
    """Medians of runs and requests, means of questions."""
    ratio: Interval | None
    """Now / then; None if it is not finite, as with `then` = 0."""
    p_value: float
    """Paired t-test if the samples are of the same questions; else Mann-Whitney U, because runs have outliers."""
    least_p: float
    """Smallest p-value possible with this number of samples."""
    is_constant: bool
    """Whether all samples now and then are equal, so that no test can find a difference."""
    sampled: str
    """Number and unit of samples, as in `5 runs`."""
    adjusted_p: float = 1.0
    """Holm-corrected over all metrics that are not constant."""
    can_be_told: bool = False
    """Whether `least_p` would be significant after correction."""

    @property
    def is_significant(self) -> bool:
        return self.adjusted_p < LEVEL and self.now != self.then and (self.ratio is None or self.ratio.excludes(1.0))

    @property
    def is_regression(self) -> bool:
        return self.verdict == "regression"

    @property
    def verdict(self) -> str:
        if not self.is_significant:
            return "no difference" if self.can_be_told else f"cannot be told with {self.sampled}"
        direction = direction_of(self.metric)
        if direction is Direction.NEITHER:
            return "changed"
        return "regression" if (self.now > self.then) == (direction is Direction.SMALLER) else "improvement"


@dataclass(frozen=True, slots=True)
class ResultComparison:
    """The changes between two results of one benchmark."""

    changes: list[MetricChange]
    """Metrics that both results have, regressions first."""
    unmatched: list[str]
    """Arms and metrics that only one result has."""
    differing: dict[str, tuple[Any, Any]]
    """Parameters with different values: then and now."""
    needed: int | None
    """Samples per side with which every figure could be significant; None if there are enough."""

    @property
    def warnings(self) -> list[str]:
        """Notes on the validity of the comparison."""
        differing = ", ".join(f"{name} ({then} then, {now} now)" for name, (then, now) in self.differing.items())
        found = [f"parameters differ, so figures may not be comparable: {differing}"] if differing else []
        if self.unmatched:
            found.append(f"only in one of the two results: {', '.join(self.unmatched)}")
        if self.needed is not None:
            found.append(
                f"too few samples for some figures; with {self.needed} on both sides, any could differ significantly"
            )
        return found


def compare(result: BenchResult, earlier: Earlier) -> ResultComparison:
    """Compare every metric that both results have.

    Raises:
        UsageError: the earlier result is of another benchmark.
    """
    check_benchmark(earlier, result.benchmark)
    now_parameters = json.loads(json.dumps(result.parameters, default=str))
    differing = {
        name: (earlier.parameters[name], value)
        for name, value in now_parameters.items()
        if name in earlier.parameters and earlier.parameters[name] != value
    }
    is_paired = result.sample_of == "question" and not differing
    changes = changes_between(result.samples, earlier.samples, result.sample_of, is_paired=is_paired)
    names = [
        {f"{arm} {metric}" for arm, metrics in one.values.items() for metric in metrics}
        for one in (result.samples, earlier.samples)
    ]
    return ResultComparison(changes, sorted(names[0] ^ names[1]), differing, _needed(changes))


def changes_between(
    now: Samples, then: Samples, sample_of: SampleOf = "run", *, is_paired: bool = False
) -> list[MetricChange]:
    """Return the changes of all common metrics, regressions first.

    Args:
        is_paired: whether samples with the same index are of the same question.
    """
    found = []
    for arm, metrics in now.values.items():
        for metric, values in metrics.items():
            old = then.values.get(arm, {}).get(metric, [])
            pairs = is_paired and len(values) == len(old)
            usable = _usable(values, old, pairs)
            if all(usable):
                found.append(_change(arm, metric, usable, sample_of, pairs))
    return sorted(_adjusted(found), key=lambda change: (not change.is_regression, change.arm, change.metric))


def _usable(now: Sequence[float], then: Sequence[float], pairs: bool) -> tuple[list[float], list[float]]:
    """Return the finite samples; of pairs, those where both are finite."""
    if pairs:
        both = [pair for pair in zip(now, then, strict=True) if all(map(math.isfinite, pair))]
        return [pair[0] for pair in both], [pair[1] for pair in both]
    return list(filter(math.isfinite, now)), list(filter(math.isfinite, then))


def _change(
    arm: str, metric: str, samples: tuple[Sequence[float], Sequence[float]], sample_of: SampleOf, is_paired: bool
) -> MetricChange:
    now, then = samples
    middle: Callable[[Sequence[float]], Any] = np.mean if sample_of == "question" else np.median
    if is_paired:
        ratio, least_p = ratio_of_means(now, then, block=1), _least_signs_p(len(now))
        p_value = max(paired_test(now, then)[1], least_p)
    else:
        ratio, least_p = ratio_of_medians(now, then), _least_ranks_p(len(now), len(then))
        p_value = _ranks_p(now, then)
    num = min(len(now), len(then))
    return MetricChange(
        arm=arm,
        metric=metric,
        then=float(middle(then)),
        now=float(middle(now)),
        ratio=ratio if ratio.is_finite else None,
        p_value=p_value,
        least_p=least_p,
        is_constant=len({*now, *then}) == 1,
        sampled=f"{num} {sample_of}" + ("" if num == 1 else "s"),
    )


def _adjusted(found: Sequence[MetricChange]) -> list[MetricChange]:
    """Apply Holm's correction over all changes that are not constant."""
    p_values = np.array([change.p_value for change in found if not change.is_constant])
    adjusted = iter(holm(p_values.tolist()))

    def could_pass(change: MetricChange) -> bool:
        num_before = int((p_values < change.least_p).sum())
        return change.least_p * (len(p_values) - num_before) < LEVEL

    return [
        replace(change, can_be_told=change.least_p < LEVEL)
        if change.is_constant
        else replace(change, adjusted_p=next(adjusted), can_be_told=could_pass(change))
        for change in found
    ]


def _needed(changes: Sequence[MetricChange]) -> int | None:
    if all(change.can_be_told for change in changes):
        return None
    return next(num for num in count(2) if _least_ranks_p(num, num) * len(changes) < LEVEL)


def _ranks_p(now: Sequence[float], then: Sequence[float]) -> float:
    if len({*now, *then}) == 1:
        return 1.0
    is_exact = max(len(now), len(then)) <= _MOST_EXACT and len({*now, *then}) == len(now) + len(then)
    p_value = float(stats.mannwhitneyu(now, then, method="exact" if is_exact else "asymptotic").pvalue)
    return max(p_value, _least_ranks_p(len(now), len(then)))  # with ties, the approximation falls below it


def _least_ranks_p(num_now: int, num_then: int) -> float:
    """Return the p-value when every sample of one side exceeds every sample of the other."""
    return min(1.0, 2 / math.comb(num_now + num_then, num_now))


def _least_signs_p(num: int) -> float:
    """Return the sign test's p-value when all differences have one sign.

    It bounds the t-test, which underestimates the spread of very few pairs.
    """
    return 0.5 ** (num - 1)
