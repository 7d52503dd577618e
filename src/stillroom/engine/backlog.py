"""How many requests may wait for the engine, and when to ask again if too many do. Thread-safe."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable

from stillroom.core.queueing import ServicePace, is_below_share
from stillroom.errors import QueueFullError


class Backlog:
    """Counts what was accepted and does not wait in the scheduler yet, and how fast requests end."""

    def __init__(self, max_waiting: int) -> None:
        """
        Args:
            max_waiting: 0 is no limit.
        """
        self._max_waiting = max_waiting
        self._accepted: Counter[str] = Counter()  # by tenant
        self._lock = threading.Lock()
        self._pace = ServicePace()

    def accept(self, tenant: str, num_waiting: int, waiting: Callable[[], Iterable[str]], now: float) -> None:
        """One request more, if there is room beside those that wait in the scheduler, or if its tenant has less than an
        equal share of them: no tenant shuts another out.

        Args:
            waiting: the tenant of each of them; asked only if there is no room.

        Raises:
            QueueFullError: there is none.
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

    def hand_over(self, tenant: str) -> None:
        """One that was accepted waits in the scheduler now."""
        with self._lock:
            self._accepted[tenant] -= 1
            self._accepted += Counter()  # without those that have none

    def begin(self, now: float) -> None:
        """Work arrived after idle time, which does not count for how fast requests end."""
        with self._lock:
            self._pace.start(now)

    def end(self, at: float) -> None:
        """A request has ended."""
        with self._lock:
            self._pace.end(at)
