"""Scores answers: means with intervals, compared with targets.

Questions about one document are correlated, so an interval resamples documents instead of questions (a cluster
bootstrap, percentiles of 2,000).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stillroom_bench.instrument.statistics import Interval
from training.evaluation.ask import Asked

_RESAMPLES = 2000

TARGETS = {
    "xquad exact match": 0.35,
    "xquad F1": 0.45,
    "microworld single": 0.9,
    "microworld split": 0.85,
    "unanswerable": 0.7,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over questions."""

    name: str
    interval: Interval
    num_questions: int
    num_groups: int
    target: float | None

    @property
    def is_reached(self) -> bool | None:
        """Whether the mean is at least the target; None without a target."""
        return None if self.target is None else self.interval.value >= self.target


def mean_by_group(values: Sequence[float], groups: Sequence[str], seed: int = 0) -> Interval:
    """Return the mean of all values with a 95 % interval over groups drawn with replacement."""
    names, places = np.unique(np.asarray(groups), return_inverse=True)
    sums = np.bincount(places, weights=np.asarray(values, dtype=float), minlength=len(names))
    sizes = np.bincount(places, minlength=len(names))
    drawn = np.random.default_rng(seed).integers(0, len(names), size=(_RESAMPLES, len(names)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(sums.sum() / sizes.sum()), float(low), float(high))


def figures(name: str, asked: Sequence[Asked]) -> list[Figure]:
    """Return the reported figures of one set."""
    if name == "xquad":
        return [
            _figure("xquad exact match", asked, lambda one: one.is_right),
            _figure("xquad F1", asked, lambda one: one.f1),
            _figure("xquad, says that the documents do not say", asked, lambda one: one.is_silent),
        ]
    if name == "unanswerable":
        return [_figure("unanswerable", asked, lambda one: one.is_silent)]
    kinds: Iterable[str] = dict.fromkeys(one.question.kind for one in asked)
    return [
        _figure(f"{name} {kind}", [one for one in asked if one.question.kind == kind], lambda one: one.is_right)
        for kind in kinds
    ]


def _figure(name: str, asked: Sequence[Asked], value: Callable[[Asked], float]) -> Figure:
    groups = [one.group for one in asked]
    interval = mean_by_group([value(one) for one in asked], groups)
    return Figure(name, interval, len(asked), len(set(groups)), TARGETS.get(name))
