"""Times to first token by kind of question, and the verdict on the target, of `stillroom bench first-questions`."""

from collections.abc import Sequence
from typing import Any

from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.statistics import Interval, ratio_of_means

TIERS, PREPARED = "tiers", "prepared"
"""The arm that others are compared with, and the first word of the arms that prepare."""
TARGET = 0.5
"""Mean time to first token of prepared documents, as a ratio to `tiers`."""
TIMES, TARGETS = "Mean time to first token", f"Target: at most {TARGET:g} of {TIERS}"
"""Names of the tables."""


def time_rows(samples: Samples, is_first: Sequence[bool]) -> list[dict[str, Any]]:
    """Return mean times to first token by kind of question and arm, as ratios to `tiers`.

    Args:
        is_first: whether each sample is of a first question.
    """
    kinds = {"all": [True] * len(is_first), "first": is_first, "repeated": [not one for one in is_first]}
    rows = []
    for kind, chosen in kinds.items():
        for arm in samples.values if any(chosen) else ():
            seconds, cached = (_chosen(samples, arm, metric, chosen) for metric in ("ttft_seconds", "cached_share"))
            baseline = _chosen(samples, TIERS, "ttft_seconds", chosen)
            rows.append(
                {
                    "questions": kind,
                    "arm": arm,
                    "count": len(seconds),
                    "mean, ms": f"{1000 * sum(seconds) / len(seconds):.1f}",
                    f"ratio to {TIERS}": "" if arm == TIERS else str(ratio_of_means(seconds, baseline, block=1)),
                    "prompt tokens computed": f"{1 - sum(cached) / len(cached):.1%}",
                }
            )
    return rows


def _chosen(samples: Samples, arm: str, metric: str, chosen: Sequence[bool]) -> list[float]:
    return [value for value, is_chosen in zip(samples.of(arm, metric), chosen, strict=True) if is_chosen]


def target_rows(samples: Samples) -> list[dict[str, Any]]:
    """Return a row with the verdict for each arm that prepares."""
    rows = []
    baseline = samples.of(TIERS, "ttft_seconds")
    for arm in samples.values:
        if arm.startswith(PREPARED):
            ratio = ratio_of_means(samples.of(arm, "ttft_seconds"), baseline, block=1)
            rows.append({"arm": arm, f"ratio to {TIERS}": str(ratio), "verdict": verdict(ratio)})
    return rows


def verdict(ratio: Interval) -> str:
    """Return whether the target is met; it is decided only if the whole interval is on one side of it."""
    if ratio.high <= TARGET:
        return "met"
    return "missed" if ratio.low > TARGET else "not decided: the interval includes the target"
