"""How many requests are admitted, so that each is served in time and the others are refused at once.

Seats are for requests that generate, from when their body is here, before any search. Beyond those that can run, so
many may wait as are served within `max_wait_s` at the pace at which the last ones were. When the house is full a tenant
who holds less than an equal share of it is let in all the same, so none shuts another out. Once the house is closing it
takes on nothing more. Called on the event loop only.
"""

import math
from collections import Counter

from stillroom.core.clock import Clock
from stillroom.core.queueing import ServicePace, is_below_share
from stillroom.errors import QueueFullError
from stillroom.server.limits.workers import shutting_down

_UNKNOWN_PACE = 4
"""Until a first request has ended, so many times the seats are let in."""


class AdmissionControl:
    """Of one server."""

    def __init__(self, num_seats: int, max_waiting: int, max_wait_s: float, clock: Clock) -> None:
        """
        Args:
            num_seats: requests that run at the same time.
            max_waiting: beside them; 0 is no limit.
            max_wait_s: 0 is no limit.
        """
        self._num_seats = num_seats
        self._max_waiting = max_waiting or math.inf
        self._max_wait = max_wait_s or math.inf
        self._clock = clock
        self._pace = ServicePace()
        self._held: Counter[str] = Counter()
        """Requests that generate, by tenant; of whom there is none is not in it."""
        self.num_seated = 0
        self.num_in_flight = 0
        """Requests for work of every kind. Whoever lets one in counts it."""
        self.is_closing = False

    def check_open(self) -> None:
        """Raises EngineClosedError: the house is closing."""
        if self.is_closing:
            raise shutting_down()

    def enter(self, tenant: str) -> None:
        """One request more that generates; `leave` when it has ended, however it does.

        Raises:
            EngineClosedError: the house is closing.
            QueueFullError: too many wait already, and the tenant has his share.
        """
        self.check_open()
        problem = self.problem()
        limit = self._num_seats + min(self._max_waiting, self._num_in_time)
        if problem is not None and not is_below_share(tenant, self._held, limit):
            raise problem
        if self.num_seated == 0:  # the time without work says nothing of the pace
            self._pace.start(self._clock.monotonic())
        self.num_seated += 1
        self._held[tenant] += 1

    def leave(self, tenant: str, *, was_served: bool) -> None:
        """A request has ended; how fast those are that were refused or failed says nothing of the pace."""
        self.num_seated -= 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        if was_served:
            self._pace.end(self._clock.monotonic())

    def problem(self) -> QueueFullError | None:
        """Why one more is not taken on; None if it is."""
        num_waiting = self.num_seated - self._num_seats
        pace = self._pace.seconds or 1.0
        if num_waiting >= self._max_waiting:
            return _full("as many requests wait as may (runtime.max_waiting)", pace)
        if self.num_seated >= self._num_seats + self._num_in_time:
            message = "a request would wait longer than server.max_wait_s allows"
            return _full(message, (num_waiting + 1) * pace - self._max_wait if self._pace.seconds else 1.0)
        return None

    @property
    def _num_in_time(self) -> float:
        """Requests that may wait so that the last of them is served in time."""
        pace = self._pace.seconds
        if self._max_wait == math.inf or pace == 0:
            return math.inf
        return (_UNKNOWN_PACE - 1) * self._num_seats if pace is None else self._max_wait // pace


def _full(reason: str, seconds: float) -> QueueFullError:
    seconds = max(1.0, seconds)
    return QueueFullError(f"{reason}; ask again in {seconds:.0f} s", seconds)
