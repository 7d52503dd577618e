"""When searches end that wait for each other: one server takes what waits, up to a batch, and releases each query by
itself. Arithmetic only.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Releases = Callable[[Sequence[int]], NDArray[np.float64]]
"""Seconds from the start of a batch of these queries to each one's result."""


def released(ready: Sequence[float], releases: Releases, max_batch: int = 1) -> list[float]:
    """The moment at which each query has its result.

    Args:
        ready: when each may be searched; in any order, served in the order of time.
        max_batch: queries that are searched together, of those that come while the server is busy; who finds it idle is
            served alone.
    """
    found = [0.0] * len(ready)
    order = sorted(range(len(ready)), key=lambda number: ready[number])
    free, at = 0.0, 0
    while at < len(order):
        start = max(free, ready[order[at]])
        most = max_batch if ready[order[at]] < free else 1
        batch = [number for number in order[at : at + most] if ready[number] <= start]
        seconds = releases(batch)
        for number, one in zip(batch, seconds.tolist(), strict=True):
            found[number] = start + one
        free = start + float(seconds.max())
        at += len(batch)
    return found
