"""Arrival times of requests: a Poisson process, or a recorded trace of a real service scaled to any rate.

Reads Azure's traces (`.csv` with a `TIMESTAMP` column) and Mooncake's (`.jsonl`, milliseconds in `timestamp`).
"""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

from stillroom.errors import UsageError

Draw = Callable[[int, float, Sequence[int]], list[float]]
"""(count, requests per second, seed) -> arrival times in seconds, ascending."""


def arrivals(count: int, per_second: float, seed: Sequence[int]) -> list[float]:
    """Return arrival times of a Poisson process, conditioned on `count` arrivals in `count / per_second` seconds.

    Those are sorted uniform times, so short runs have exactly the given rate.
    """
    moments = np.sort(np.random.default_rng(seed).uniform(0.0, count / per_second, size=count))
    found: list[float] = moments.tolist()
    return found


def arrivals_of(trace: Path | None) -> Draw:
    """Return a Poisson process, or a function that draws a stretch of a trace.

    The seed chooses the stretch; its order and bursts are kept and its speed is scaled to the rate.

    Raises:
        UsageError: the file is not such a trace. Drawing raises it too, for more requests than the trace has.
    """
    if trace is None:
        return arrivals
    moments, name = np.array(list(_moments(trace))), trace.name
    if (np.diff(moments) < 0).any():
        raise UsageError(f"{name} is not sorted by time; sort its lines")

    def draw(count: int, per_second: float, seed: Sequence[int]) -> list[float]:
        if count >= len(moments):
            raise UsageError(f"{name} has {len(moments)} requests, too few for {count}; lower --requests")
        start = int(np.random.default_rng(seed).integers(len(moments) - count))
        stretch = moments[start : start + count + 1] - moments[start]
        if stretch[-1] == 0.0:
            raise UsageError(f"{count} requests of {name} arrived at the same time; raise --requests")
        found: list[float] = (stretch[:-1] * (count / per_second / stretch[-1])).tolist()
        return found

    return draw


def _moments(trace: Path) -> Iterator[float]:
    """Yield the times of a trace, in seconds from an arbitrary start."""
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
            f"{trace} is not a trace of arrivals: .csv with TIMESTAMP or .jsonl with timestamp: {error}"
        ) from None
