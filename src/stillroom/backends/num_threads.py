"""Chooses the number of compute threads by measurement, because it depends on the machine's other load.

Threads wait for each other after every kernel. On an idle machine all cores are fastest; on a busy one, a descheduled
thread delays all others, and fewer threads are much faster (docs/log.md). While serving, `thread_control` follows the
load.
"""

import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
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
    if not is_free_to_choose(0, target.device.k_LSGD.device):
        return torch.get_num_threads()
    most = most_threads()
    chosen = 1 if most == 1 else choose(candidates(most), lambda count: _seconds(target, count))
    torch.set_num_threads(chosen)
    if chosen != most:
        logger.info("computing with %d of %d threads, the fastest under the machine's present load", chosen, most)
    return chosen


def is_free_to_choose(num_threads: int, device: torch.device) -> bool:
    """Whether the number is Stillroom's to choose: on a CPU, if neither the setting nor `OMP_NUM_THREADS` fixes it.

    Args:
        num_threads: `runtime.num_threads`.
    """
    return device.type == "cpu" and not num_threads and "OMP_NUM_THREADS" not in os.environ


def most_threads() -> int:
    """torch's number of threads, which respects the CPU affinity, but at most the cgroup's quota, rounded up."""
    return max(1, math.ceil(min(torch.get_num_threads(), cgroup_cpus())))


def cgroup_cpus(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> float:
    """Return the lowest CPU quota of this process's cgroup (v1 or v2) and those above it; infinity without a quota."""
    found = [math.inf]
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            of_version = root / "cpu" if controllers else root
            own = PurePosixPath(path.lstrip("/"))
            found += [_quota(of_version / one) for one in (own, *own.parents)]
    return min(found)


def _quota(folder: Path) -> float:
    """Quota of one cgroup, in CPUs."""
    with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:  # -1: no quota
            return int(quota) / int(period)
    return math.inf


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
