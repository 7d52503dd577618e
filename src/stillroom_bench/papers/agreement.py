"""Compares the figures of a new result with a committed one: does the new interval overlap the committed one?"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from stillroom_bench.instrument.bench_report import format_value
from stillroom_bench.instrument.statistics import Interval
from stillroom_bench.papers.page import INTERVAL

Verdict = Literal["agrees", "differs", "absent"]
"""`agrees`: the intervals overlap. `absent`: the new result has no such figure, as without the runtime that gave it."""
Key = tuple[str, ...]
"""Arm, metric and what of it; or table, labels of the row, column and number in the cell."""
ORDER: tuple[Verdict, ...] = ("differs", "absent", "agrees")
"""Worst first."""

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "MiB": 2.0**20}
_PLAIN = re.compile(r"[-+]?[\d.,]+(?:e[-+]\d+)?(?: ?(?:us|ms|s|MiB|%))?")
_NUM_LABELS = 2


@dataclass(frozen=True, slots=True)
class Agreement:
    """A figure of a committed result beside the same figure of a new one."""

    figure: str
    """Arm and metric, or table, row and column."""
    committed: str
    now: str | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ResultAgreement:
    """All figures of one report."""

    figures: tuple[Agreement, ...]
    """Those with an interval."""
    changed: tuple[Agreement, ...]
    """Table cells without interval that have another text now, or none."""
    num_cells: int
    """Table cells without interval."""

    @property
    def num_same(self) -> int:
        return self.num_cells - len(self.changed)

    def quoted(self, interval: str) -> Agreement | None:
        """Return the figure whose committed text is this; the one that agrees least, if several have it."""
        found = [one for one in self.figures if one.committed == interval]
        return min(found, key=lambda one: ORDER.index(one.verdict), default=None)

    def count(self, verdict: Verdict) -> int:
        return sum(one.verdict == verdict for one in self.figures)


def compare_results(committed: dict[str, Any], now: dict[str, Any]) -> ResultAgreement:
    """Compare two result files, as read from JSON."""
    new = dict(intervals_of(now))
    figures = tuple(
        Agreement(_figure(key), text, new.get(key), _verdict(text, new.get(key)))
        for key, text in intervals_of(committed)
    )
    old_cells, new_cells = dict(_plain_cells(committed)), dict(_plain_cells(now))
    changed = (
        Agreement(_figure(key), text, new_cells.get(key), "differs" if key in new_cells else "absent")
        for key, text in old_cells.items()
        if new_cells.get(key) != text
    )
    return ResultAgreement(figures, tuple(changed), len(old_cells))


def _figure(key: Key) -> str:
    return ", ".join(filter(None, key))


def intervals_of(result: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    """Yield every figure with an interval, written as in the report."""
    for arm, metrics in result["arms"].items():
        for metric, found in metrics.items():
            summary, ratio = found["summary"], found["ratio_to_baseline"]
            if summary["ci_low"] is not None:
                mean, low, high = (format_value(metric, summary[name]) for name in ("mean", "ci_low", "ci_high"))
                yield (arm, metric, "mean"), f"{mean} [{low}, {high}]"
            if ratio is not None and ratio["low"] is not None:
                yield (arm, metric, "x baseline"), str(Interval(**ratio))
    for key, value in _cells(result):
        for number, text in enumerate(INTERVAL.findall(value) if isinstance(value, str) else ()):
            yield (*key, str(number or "")), text


def overlap(one: str, other: str) -> bool:
    """Return whether two intervals, written as in a report, have a point in common."""
    (_, low, high), (_, other_low, other_high) = interval_numbers(one), interval_numbers(other)
    return max(low, other_low) <= min(high, other_high)


def _verdict(committed: str, now: str | None) -> Verdict:
    if now is None:
        return "absent"
    return "agrees" if overlap(committed, now) else "differs"


def interval_numbers(interval: str) -> list[float]:
    """Return value and bounds in their base unit."""
    found = re.findall(r"(-?\d[\d.]*(?:e[+-]\d+)?)(?: (us|ms|s|MiB))?", interval)
    return [float(number) * _UNITS.get(unit, 1.0) for number, unit in found]


def _plain_cells(result: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    for key, value in _cells(result):
        text = f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)
        if text and not INTERVAL.search(text):
            yield key, text


def _cells(result: dict[str, Any]) -> Iterator[tuple[Key, Any]]:
    """Yield all table cells; a row is named by its first labels, so that rows without a counterpart shift no other."""
    for table, rows in result["tables"].items():
        seen: Counter[Key] = Counter()
        for row in rows:
            labels = tuple(str(value) for value in row.values() if _is_label(value))[:_NUM_LABELS]
            seen[labels] += 1
            for column, value in row.items():
                yield (table, *labels, "" if seen[labels] == 1 else f"row {seen[labels]}", column), value


def _is_label(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value) and not _PLAIN.fullmatch(value) and not INTERVAL.search(value)
    return isinstance(value, int)
