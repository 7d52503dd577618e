"""When requests come, as somebody recorded it: bursts and lulls of a real service, at any rate.

Read are Azure's traces (`.csv` with a `TIMESTAMP` column) and Mooncake's (`.jsonl`, milliseconds under `timestamp`).
"""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

from stillroom.errors import UsageError

Draw = Callable[[int, float, Sequence[int]], list[float]]
"""How many requests, how many per second, and a seed: the seconds at which they come, ascending."""


def arrivals(count: int, per_second: float, seed: Sequence[int]) -> list[float]:
    """Seconds at which so many requests come in a Poisson process, given that they come within their mean time: sorted
    uniform moments. Given the number, short runs have the rate they are said to have."""
    moments = np.sort(np.random.default_rng(seed).uniform(0.0, count / per_second, size=count))
    found: list[float] = moments.tolist()
    return found


def arrivals_of(trace: Path | None) -> Draw:
    """A Poisson process; or a stretch of a trace that the seed chooses, its order and its bursts kept, slowed down or
    sped up to the rate.

    Raises:
        UsageError: the file is no such trace. So does the drawing, of more requests than it has.
    """
    if trace is None:
        return arrivals
    moments, name = np.array(list(_moments(trace))), trace.name
    if (np.diff(moments) < 0).any():
        raise UsageError(f"{name} is not in the order of time")

    def draw(count: int, per_second: float, seed: Sequence[int]) -> list[float]:
        if count >= len(moments):
            raise UsageError(f"{name} has {len(moments)} requests, too few for {count}; lower --requests")
        start = int(np.random.default_rng(seed).integers(len(moments) - count))
        stretch = moments[start : start + count + 1] - moments[start]
        if stretch[-1] == 0.0:
            raise UsageError(f"{count} requests of {name} came at the same moment; raise --requests")
        found: list[float] = (stretch[:-1] * (count / per_second / stretch[-1])).tolist()
        return found

    return draw


def _moments(trace: Path) -> Iterator[float]:
    """Seconds since whenever."""
    try:
        with trace.open(encoding="utf-8", newline="") as lines:
            if trace.suffix == ".jsonl":
                yield from (float(json.loads(line)["timestamp"]) / 1e3 for line in lines if line.strip())
            else:
                for row in csv.DictReader(lines):
                    seconds, _, fraction = row["TIMESTAMP"].partition(".")  # seven digits, more than datetime reads
                    yield datetime.fromisoformat(f"{seconds}+00:00").timestamp() + float(f"0.{fraction or 0}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{trace} is no trace of arrivals, .csv with TIMESTAMP or .jsonl with timestamp: {error}"
        ) from None
