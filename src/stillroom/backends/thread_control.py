"""Sets the number of threads of the engine's thread, and lowers it while other processes use the cores."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stillroom.backends.num_threads import is_free_to_choose, most_threads
from stillroom.backends.thread_chooser import WINDOW_SECONDS, ThreadChooser
from stillroom.config.settings import RuntimeConfig
from stillroom.core.clock import Clock
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom.telemetry.cpu_times import CpuTimes

logger = logging.getLogger(__name__)

_QUIET_CPUS = 0.1
"""Below this use by others while a model is loaded, the number of threads measured then is the machine's best."""


class ThreadControl:
    """The number of threads that torch and Stillroom's kernels use in the engine's thread."""

    def __init__(self, chooser: ThreadChooser, clock: Clock, read: Callable[[], CpuTimes | None] | None = None) -> None:
        """
        Args:
            read: reads the CPU times that `chooser` follows; None: the number stays as it is.
        """
        self._chooser = chooser
        self._clock = clock
        self._read = read
        self._next_at = float("-inf")

    @property
    def count(self) -> int:
        """The number of threads now. Thread-safe."""
        return self._chooser.count

    @property
    def is_adaptive(self) -> bool:
        """Whether `adjust` may change the number."""
        return self._read is not None

    def apply(self) -> None:
        """Use the present number in the calling thread. Threads that start later use the highest number."""
        torch.get_num_threads()  # without it, the thread's first use of torch would set the default number again
        torch.set_num_threads(self.count)
        if self.count != self._chooser.most:  # torch has made `count` the default of later threads
            run_in_short_lived_thread(lambda: torch.set_num_threads(self._chooser.most))

    def adjust(self) -> None:
        """Read the CPU times, at most once in `WINDOW_SECONDS`, and follow them in the calling thread."""
        now = self._clock.monotonic()
        if self._read is None or now < self._next_at:
            return
        self._next_at = now + WINDOW_SECONDS
        times, before = self._read(), self.count
        if times is None or self._chooser.observe(now, times) == before:
            return
        self.apply()
        chooser = self._chooser
        shares = chooser.count, chooser.most, chooser.busy, chooser.num_cpus
        logger.info("computing with %d of %d threads; other processes want %.1f of %d CPUs", *shares)


@dataclass(frozen=True, slots=True)
class BeforeLoading:
    """State of the machine before a model is loaded and its number of threads is measured."""

    at: float
    times: CpuTimes | None
    most: int
    """Threads that this process may use."""

    @classmethod
    def now(cls, clock: Clock) -> "BeforeLoading":
        return cls(clock.monotonic(), read_cpu_times(), most_threads())

    def control(self, config: RuntimeConfig, clock: Clock, device: torch.device) -> ThreadControl:
        """Return the control of an engine whose threads were tuned in the calling thread.

        The number changes later only on a CPU, if neither `runtime.num_threads` nor `OMP_NUM_THREADS` fixes it and the
        system reports CPU times.
        """
        count, times = torch.get_num_threads(), read_cpu_times()
        if self.times is not None and times is not None and is_free_to_choose(config.num_threads, device):
            seconds = max(clock.monotonic() - self.at, WINDOW_SECONDS)
            was_quiet = times.others - self.times.others < _QUIET_CPUS * seconds
            most = count if was_quiet else max(count, self.most)
            if most > 1:
                return ThreadControl(ThreadChooser(most, len(os.sched_getaffinity(0)), count), clock, read_cpu_times)
        return ThreadControl(ThreadChooser(count, count, count), clock)


def read_cpu_times() -> CpuTimes | None:
    """Read the times of the CPUs that this process may use; None if the system does not report them."""
    return CpuTimes.now(cpus=os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
