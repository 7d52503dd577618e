"""What changed between an earlier result and this one, how surely, and where so few samples cannot tell."""

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
from stillroom_bench.instrument.harness import Direction, Samples, direction_of
from stillroom_bench.instrument.report import FORMAT, BenchResult, SampleOf
from stillroom_bench.instrument.statistics import Interval, holm, paired_test, ratio_of_means, ratio_of_medians

LEVEL = 0.05
"""Adjusted p-values below it are significant."""
_MOST_EXACT = 50
"""Samples of an arm up to which ranks are tested exactly."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a result file holds of an earlier run."""

    benchmark: str
    parameters: dict[str, Any]
    samples: Samples


def load_earlier(path: Path) -> Earlier:
    """Read a result file.

    Raises:
        UsageError: it is not a result file of this format.
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
    """Raises UsageError where the earlier result is another benchmark's."""
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
    """Now / then; None where that is no number, as after 0."""
    p_value: float
    """Of a paired t-test on the same questions; else Mann-Whitney U, since runs at different times have outliers."""
    least_p: float
    """That so many samples could give at best."""
    is_constant: bool
    """All samples are equal, now and then: no test could find anything."""
    sampled: str
    """How many samples of what, as in `5 runs`."""
    adjusted_p: float = 1.0
    """Holm over all metrics where a test could find something."""
    can_be_told: bool = False
    """Whether the best p-value that so many samples can give would be significant."""

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
    """A result against an earlier one of the same benchmark."""

    changes: list[MetricChange]
    """Every metric that both have, regressions first."""
    unmatched: list[str]
    """Arms and metrics that only one of them has."""
    differing: dict[str, tuple[Any, Any]]
    """Parameters that both have with unlike values: then and now."""
    needed: int | None
    """Samples on both sides from which on everything could be told; None if it can."""

    @property
    def warnings(self) -> list[str]:
        """What the reader has to know before the figures."""
        differing = ", ".join(f"{name} ({then} then, {now} now)" for name, (then, now) in self.differing.items())
        found = [f"parameters differ, so figures may not be comparable: {differing}"] if differing else []
        if self.unmatched:
            found.append(f"only in one of the two results: {', '.join(self.unmatched)}")
        if self.needed is not None:
            found.append(
                f"too few samples to tell everything; with {self.needed} on both sides any figure could differ"
            )
        return found


def compare(result: BenchResult, earlier: Earlier) -> ResultComparison:
    """Every figure of both.

    Raises:
        UsageError: the earlier result is another benchmark's.
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
    """Regressions first.

    Args:
        is_paired: samples with the same index are of the same question.
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
    """The samples that are numbers; of pairs, those where both are."""
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
    """Corrected together; a figure that could not have differed costs the others nothing."""
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
    return max(p_value, _least_ranks_p(len(now), len(then)))  # the approximation goes below it where samples tie


def _least_ranks_p(num_now: int, num_then: int) -> float:
    """Where every sample of one side is above every one of the other."""
    return min(1.0, 2 / math.comb(num_now + num_then, num_now))


def _least_signs_p(num: int) -> float:
    """Where all differences have one sign: a t-test of so few pairs would claim to know their spread."""
    return 0.5 ** (num - 1)
