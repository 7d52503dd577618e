"""Chooses the number of compute threads by measurement, because it depends on the machine's other load.

Threads wait for each other after every kernel. On an idle machine all cores are fastest; on a busy one, a descheduled
thread delays all others, and fewer threads are much faster (docs/log.md).
"""

import logging
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from stillroom.backends.calibration import CalibrationTarget

logger = logging.getLogger(__name__)

_ENOUGH = 0.95
"""Fewer threads are chosen only if they take less than this share of the time."""


def tune_threads(target: "CalibrationTarget") -> int:
    """Choose and return torch's number of threads for a decoder on a CPU; Stillroom's kernels use the same number.

    Does nothing if `OMP_NUM_THREADS` is set, or the device is not a CPU.
    """
    most = torch.get_num_threads()
    if target.device.k_LSGD.device.type != "cpu" or most == 1 or "OMP_NUM_THREADS" in os.environ:
        return most
    chosen = choose(candidates(most), lambda count: _seconds(target, count))
    torch.set_num_threads(chosen)
    if chosen != most:
        logger.info("computing with %d of %d threads, the fastest under the machine's present load", chosen, most)
    return chosen


def candidates(most: int) -> list[int]:
    """`most`, then half of it, and so on down to 1."""
    return [max(most >> shift, 1) for shift in range(most.bit_length())]


def choose(counts: list[int], measure: Callable[[int], list[float]]) -> int:
    """The count with the least geometric mean of its times; the first unless another is clearly faster."""
    times = {count: measure(count) for count in counts}

    def average(count: int) -> float:
        return math.exp(sum(math.log(max(seconds, 1e-9)) for seconds in times[count]) / len(times[count]))

    best = min(counts, key=average)
    return best if average(best) < _ENOUGH * average(counts[0]) else counts[0]


def _seconds(target: "CalibrationTarget", count: int) -> list[float]:
    """Seconds for one token and for a short prompt, the best of three each."""
    from stillroom.backends.calibration import step_seconds  # imports the decoder's kernels, which a reader lacks

    torch.set_num_threads(count)
    lengths = (1, min(64, target.num_slots))
    return [min(step_seconds(target, 0, new) for _ in range(3)) for new in lengths]
