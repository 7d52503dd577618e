"""Decides with how many threads to compute beside other processes, from readings of CPU time.

Threads wait for each other after every kernel. While another process runs on the core of one thread, all threads stand
still. So the number follows the CPU time that others use: at once down, and up again after a quiet time
(docs/runtime.md).
"""

from stillroom.telemetry.cpu_times import CpuTimes

WINDOW_SECONDS = 0.25
"""Shortest time between two readings. /proc/stat counts in hundredths of a second."""
QUIET_SECONDS = 1.0
"""Time for which more threads must fit before more are used."""
TRIAL_SHARE = 0.05
"""Share of the time that threads may stand still because the number went up too early, beyond `TRIAL_CREDIT`."""
TRIAL_CREDIT = 3.0
"""Seconds that may be lost at once, and most seconds of debt: a return waits at most TRIAL_CREDIT / TRIAL_SHARE."""
_IDLE_CPUS = 0.1
"""With fewer idle CPUs, others would use more than they get."""
_CLEARLY = 1.1
"""Another number must promise to be this much faster."""


class ThreadChooser:
    """Chooses the number of threads, `count`, from 1 to `most`."""

    def __init__(self, most: int, num_cpus: int, count: int) -> None:
        """
        Args:
            num_cpus: CPUs that the readings cover; at least `most` threads run on them.
            count: the first choice.
        """
        assert 1 <= count <= most
        self.most = most
        self.num_cpus = num_cpus
        self.count = count
        self.busy = 0.0
        """Mean number of CPUs that others wanted between the last two readings."""
        self._last: tuple[float, CpuTimes] | None = None
        self._credit = TRIAL_CREDIT
        self._fitting: tuple[float, int] | None = None  # since when more threads fit, and how many

    def observe(self, now: float, times: CpuTimes) -> int:
        """Return the number of threads to use from now on.

        Args:
            now: seconds of a monotonic clock.
            times: of `num_cpus` CPUs.
        """
        if self._last is None:
            self._last = now, times
            return self.count
        began, before = self._last
        elapsed = now - began
        if elapsed < WINDOW_SECONDS:
            return self.count
        self._last = now, times
        self.busy = self._wanted((times.others - before.others) / elapsed, (times.idle - before.idle) / elapsed)
        self._credit = min(self._credit + TRIAL_SHARE * elapsed, TRIAL_CREDIT)
        best = self._fastest()
        if best < self.count:
            self._credit = max(self._credit - elapsed, -TRIAL_CREDIT)
            self.count, self._fitting = best, None
        elif best == self.count:
            self._fitting = None
        else:
            since, fitting = self._fitting or (began, best)
            self._fitting = since, min(fitting, best)
            if now - since >= QUIET_SECONDS and self._credit >= 0:
                self.count, self._fitting = self._fitting[1], None
        return self.count

    def _wanted(self, used: float, idle: float) -> float:
        """Number of CPUs that others want, from those that they used and those that were idle.

        Where none was idle, all threads got equal shares, and others wanted more than they used: of C CPUs, n threads
        beside `count` of ours use C n / (n + count).
        """
        used = min(max(used, 0.0), float(self.num_cpus))
        if idle >= _IDLE_CPUS or used == self.num_cpus:
            return used
        return min(max(used, self.count * used / (self.num_cpus - used)), float(self.num_cpus))

    def _fastest(self) -> int:
        """Return the number with the highest expected speed; the present one if no other is clearly faster."""
        best = max(range(1, self.most + 1), key=self._speed)
        return best if self._speed(best) > _CLEARLY * self._speed(self.count) else self.count

    def _speed(self, count: int) -> float:
        """Speed of `count` threads, as a multiple of one: they stand still while others use a core that they need."""
        if count == 1:
            return 1.0  # it waits for no other thread
        missing = self.busy - (self.num_cpus - count)
        return count * (1.0 - min(max(missing, 0.0), 1.0))
