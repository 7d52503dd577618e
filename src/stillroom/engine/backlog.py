"""Bounds how many requests may wait for an engine. Imports no torch."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable

from stillroom.core.queueing import ServicePace, is_below_share
from stillroom.errors import QueueFullError


class Backlog:
    """Limits waiting requests, and estimates when to ask again. Thread-safe.

    Counts requests that were accepted and have not reached the scheduler yet, and the rate at which requests end.
    """

    def __init__(self, max_waiting: int) -> None:
        """
        Args:
            max_waiting: 0 is no limit.
        """
        self._max_waiting = max_waiting
        self._accepted: Counter[str] = Counter()  # by tenant; not in the scheduler yet
        self._lock = threading.Lock()
        self._pace = ServicePace()

    def accept(self, tenant: str, num_waiting: int, waiting: Callable[[], Iterable[str]], now: float) -> None:
        """Count one more request. A full queue still accepts a tenant that has less than an equal share of it.

        Args:
            num_waiting: requests that wait in the scheduler.
            waiting: returns the tenant of each of these; called only if the queue is full.

        Raises:
            QueueFullError: the queue is full, and the tenant has its share of it.
        """
        with self._lock:
            is_full = self._max_waiting and num_waiting + self._accepted.total() >= self._max_waiting
            if is_full and not is_below_share(tenant, Counter(waiting()) + self._accepted, self._max_waiting):
                seconds = max(1.0, self._pace.seconds_at(now))
                raise QueueFullError(
                    f"{self._max_waiting} requests wait already (runtime.max_waiting); ask again in {seconds:.0f} s",
                    seconds,
                )
            self._accepted[tenant] += 1

    def enter_scheduler(self, tenant: str) -> None:
        """Uncount an accepted request: it waits in the scheduler from now on."""
        with self._lock:
            self._accepted[tenant] -= 1
            self._accepted += Counter()  # drops tenants with a count of 0

    def begin(self, now: float) -> None:
        """Start measuring the rate again: the idle time before does not count."""
        with self._lock:
            self._pace.start(now)

    def end(self, at: float) -> None:
        with self._lock:
            self._pace.end(at)
