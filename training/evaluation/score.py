"""Scores answers: means with intervals, compared with targets."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stillroom_bench.instrument.statistics import Interval
from training.evaluation.ask import Asked
from training.intervals import mean_by_group

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
