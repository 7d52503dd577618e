"""How many threads compute: by measurement, because it depends on what else the machine does.

After every kernel threads wait for each other. On a quiet machine all cores together are fastest; beside other work the
thread that the system has put aside holds up all, and fewer threads are faster, by far (docs/log.md).
"""

import logging
import math
import os
from collections.abc import Callable

import torch

from stillroom.backends.calibration import Bench, step_seconds

logger = logging.getLogger(__name__)

_ENOUGH = 0.95
"""Fewer threads are taken if they need at most this share of the time."""


def tune_threads(bench: Bench) -> int:
    """Choose torch's number of threads (our kernels follow it) for a decoder on a CPU; returns it.

    An `OMP_NUM_THREADS` in the environment is somebody's decision and is left alone, as is a device that is no CPU.
    """
    most = torch.get_num_threads()
    if bench.device.k_LSGD.device.type != "cpu" or most == 1 or "OMP_NUM_THREADS" in os.environ:
        return most
    chosen = choose(candidates(most), lambda count: _seconds(bench, count))
    torch.set_num_threads(chosen)
    if chosen != most:
        logger.info("%d of %d threads are fastest now, beside what else this machine does", chosen, most)
    return chosen


def candidates(most: int) -> list[int]:
    """All of them, then half as often as it can be halved."""
    return [max(most >> shift, 1) for shift in range(most.bit_length())]


def choose(counts: list[int], measure: Callable[[int], list[float]]) -> int:
    """The count with the least time, on geometric average over what is measured; the first unless another is clearly
    faster."""
    times = {count: measure(count) for count in counts}

    def average(count: int) -> float:
        return math.exp(sum(math.log(max(seconds, 1e-9)) for seconds in times[count]) / len(times[count]))

    best = min(counts, key=average)
    return best if average(best) < _ENOUGH * average(counts[0]) else counts[0]


def _seconds(bench: Bench, count: int) -> list[float]:
    """A token's step and a short prompt's, the best of three each."""
    torch.set_num_threads(count)
    lengths = (1, min(64, bench.num_slots))
    return [min(step_seconds(bench, 0, new) for _ in range(3)) for new in lengths]
