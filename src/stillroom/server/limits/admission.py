"""Admission of requests that generate: those that can be served in time are admitted, the others refused at once.

A request takes a slot when its body is complete, before any search. Beyond the requests that can run, as many may wait
as are served within `max_wait_s` at the recent rate. When all slots are taken, a tenant below an equal share of them is
still admitted, so that no tenant shuts out another. A closing server admits nothing. Called on the event loop only.
"""

import math
from collections import Counter

from stillroom.core.clock import Clock
from stillroom.core.queueing import ServicePace, is_below_share
from stillroom.errors import QueueFullError
from stillroom.server.limits.workers import shutting_down_error

_UNKNOWN_PACE = 4
"""Until a first request has ended, this many times `num_slots` are admitted."""


class AdmissionControl:
    def __init__(self, num_slots: int, max_waiting: int, max_wait_s: float, clock: Clock) -> None:
        """
        Args:
            num_slots: requests that can run at the same time.
            max_waiting: requests that may wait beyond them; 0 is no limit.
            max_wait_s: longest wait in seconds; 0 is no limit.
        """
        self._num_slots = num_slots
        self._max_waiting = max_waiting or math.inf
        self._max_wait = max_wait_s or math.inf
        self._clock = clock
        self._pace = ServicePace()
        self._num_held: Counter[str] = Counter()
        """Admitted requests by tenant. Tenants without requests are absent."""
        self.num_admitted = 0
        self.num_in_flight = 0
        """Requests of every kind that are running. Counted by the middleware that starts them."""
        self.is_closing = False

    def check_open(self) -> None:
        """Raises EngineClosedError: the server is closing."""
        if self.is_closing:
            raise shutting_down_error()

    def enter(self, tenant: str) -> None:
        """Admit a request; call `leave` when it has ended, in whatever way.

        Raises:
            EngineClosedError: the server is closing.
            QueueFullError: too many requests wait, and the tenant has its share of the slots.
        """
        self.check_open()
        problem = self.problem()
        limit = self._num_slots + min(self._max_waiting, self._num_in_time)
        if problem is not None and not is_below_share(tenant, self._num_held, limit):
            raise problem
        if self.num_admitted == 0:  # idle time does not count towards the pace
            self._pace.start(self._clock.monotonic())
        self.num_admitted += 1
        self._num_held[tenant] += 1

    def leave(self, tenant: str, *, was_served: bool) -> None:
        """Free a request's slot. Only served requests count towards the pace."""
        self.num_admitted -= 1
        self._num_held[tenant] -= 1
        if not self._num_held[tenant]:
            del self._num_held[tenant]
        if was_served:
            self._pace.end(self._clock.monotonic())

    def problem(self) -> QueueFullError | None:
        """Return why one more request would be refused; None if it would be admitted."""
        num_waiting = self.num_admitted - self._num_slots
        pace = self._pace.seconds or 1.0
        if num_waiting >= self._max_waiting:
            return _full(f"{num_waiting} requests wait already (runtime.max_waiting)", pace)
        if self.num_admitted >= self._num_slots + self._num_in_time:
            message = "a request would wait longer than server.max_wait_s allows"
            return _full(message, (num_waiting + 1) * pace - self._max_wait if self._pace.seconds else 1.0)
        return None

    @property
    def _num_in_time(self) -> float:
        """Number of waiting requests of which the last is still served in time."""
        pace = self._pace.seconds
        if self._max_wait == math.inf or pace == 0:
            return math.inf
        return (_UNKNOWN_PACE - 1) * self._num_slots if pace is None else self._max_wait // pace


def _full(reason: str, seconds: float) -> QueueFullError:
    seconds = max(1.0, seconds)
    return QueueFullError(f"{reason}; ask again in {seconds:.0f} s", seconds)
