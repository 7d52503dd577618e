"""How much work the house takes on, so that whoever is let in is served in time and whoever is not is told at once.

Requests are counted from their arrival, before any search. Beyond those that can run, so many may wait as are served
within `max_wait_s` at the pace at which the last ones were. Once the house is closing it takes on nothing more. Called
on the event loop only.
"""

from collections import deque

from stillroom.core.clock import Clock
from stillroom.errors import EngineClosedError, QueueFullError

_NUM_REMEMBERED = 64
_UNKNOWN_PACE = 4
"""Until a first request has ended, so many times the seats are let in."""


class Admission:
    """Of one server."""

    def __init__(self, num_seats: int, max_waiting: int, max_wait_s: float, clock: Clock) -> None:
        """
        Args:
            num_seats: requests that run at the same time.
            max_waiting: beside them; 0 is no limit.
            max_wait_s: 0 is no limit.
        """
        self._num_seats = num_seats
        self._max_waiting = max_waiting
        self._max_wait = max_wait_s
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._pace: float | None = None
        self.num_in_flight = 0
        self.is_closing = False

    def enter(self) -> None:
        """One request more; `leave` when it has ended, however it does.

        Raises:
            EngineClosedError: the house is closing.
            QueueFullError: too many wait already.
        """
        if self.is_closing:
            raise EngineClosedError("the server is shutting down; ask again in a moment, or ask another one")
        problem = self.problem()
        if problem is not None:
            raise problem
        if self.num_in_flight == 0:  # the time without work says nothing of the pace
            self._ends.clear()
            self._ends.append(self._clock.monotonic())
        self.num_in_flight += 1

    def leave(self, *, was_served: bool) -> None:
        """A request has ended; how fast those are that were refused or failed says nothing of the pace."""
        self.num_in_flight -= 1
        if was_served:
            self._ends.append(self._clock.monotonic())
            self._pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)

    def problem(self) -> QueueFullError | None:
        """Why one more is not taken on; None if it is."""
        num_waiting = self.num_in_flight - self._num_seats
        if num_waiting < 0:
            return None
        if self._max_waiting and num_waiting >= self._max_waiting:
            seconds = max(1.0, self._pace or 1.0)
            return QueueFullError(
                f"{num_waiting} requests wait already (runtime.max_waiting); ask again in {seconds:.0f} s", seconds
            )
        if not self._max_wait:
            return None
        if self._pace is None:
            is_too_long, excess = self.num_in_flight >= _UNKNOWN_PACE * self._num_seats, 1.0
        else:
            excess = (num_waiting + 1) * self._pace - self._max_wait
            is_too_long = excess > 0
        if not is_too_long:
            return None
        seconds = max(1.0, excess)
        return QueueFullError(
            f"{num_waiting} requests wait already, longer than server.max_wait_s allows; ask again in {seconds:.0f} s",
            seconds,
        )
