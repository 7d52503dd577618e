"""Tables of `stillroom bench looking`: measures by ranking and kind of question, differences to search, and cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stillroom_bench.instrument.statistics import Interval, bootstrapped, ratio_of_medians
from stillroom_bench.quality.looking_arms import SEARCH

_TITLES = {
    "all_needed": "All needed chunks among the best {}",
    "recall": "Share of needed chunks among the best {}",
    "ndcg_at_10": "nDCG@10, one grade",
    "right": "Right answers from the best {}",
}
_ALL = "all"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question under one ranking."""

    arm: str
    kind: str
    values: Mapping[str, float]
    """Measure -> value."""


def tables_of(
    outcomes: Sequence[Outcome], seconds: Sequence[Mapping[str, float]], num_kept: int
) -> dict[str, list[dict[str, Any]]]:
    """Return a table per measure, one of its paired differences to search, and one of cost.

    Args:
        seconds: of each question, by what was timed.
    """
    tables = {}
    for measure, title in _TITLES.items():
        found = _by_arm_and_kind(outcomes, measure)
        if not found:
            continue
        name = title.format(num_kept)
        tables[name] = [
            {"ranking": arm, **{kind: _shown(bootstrapped(np.array(values))) for kind, values in by_kind.items()}}
            for arm, by_kind in found.items()
        ]
        if measure == "recall":
            continue  # differs like the measure before or after it
        tables[f"{name}: difference to search"] = [
            {"ranking": arm, **{kind: _difference(values, found[SEARCH][kind]) for kind, values in by_kind.items()}}
            for arm, by_kind in found.items()
            if arm != SEARCH
        ]
    tables["Cost of a question"] = _costs(seconds)
    return tables


def _by_arm_and_kind(outcomes: Sequence[Outcome], measure: str) -> dict[str, dict[str, list[float]]]:
    """Return values in the order of the questions; with several kinds, also those of all questions."""
    kinds = list(dict.fromkeys(one.kind for one in outcomes if measure in one.values))
    found: dict[str, dict[str, list[float]]] = {}
    for one in outcomes:
        if measure in one.values:
            by_kind = found.setdefault(one.arm, {})
            for kind in [one.kind, *([_ALL] if len(kinds) > 1 else [])]:
                by_kind.setdefault(kind, []).append(one.values[measure])
    order = [*kinds, _ALL]
    return {arm: dict(sorted(by_kind.items(), key=lambda pair: order.index(pair[0]))) for arm, by_kind in found.items()}


def _difference(values: Sequence[float], search: Sequence[float]) -> str:
    if len(values) != len(search):
        return "-"  # not all questions have this ranking
    return _shown(bootstrapped(np.array(values) - np.array(search)), "+")


def _shown(interval: Interval, sign: str = "") -> str:
    return f"{interval.value:{sign}.3f} ({interval.low:{sign}.3f} to {interval.high:{sign}.3f})"


def _costs(seconds: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return medians, and ratios of medians to those of the same questions' search and full prefill."""
    rows = []
    for name in dict.fromkeys(name for one in seconds for name in one):
        values = [one[name] for one in seconds if name in one]
        row: dict[str, Any] = {"what": name, "p50": f"{1000 * float(np.median(values)):.2f} ms"}
        for base in dict.fromkeys(other for one in seconds for other in one if other == SEARCH or "prefill" in other):
            pairs = [(one[name], one[base]) for one in seconds if name in one and base in one]
            ratio = ratio_of_medians(*zip(*pairs, strict=True)) if pairs else "-"
            row[f"ratio to {base}"] = str(ratio)
        rows.append(row)
    return rows
