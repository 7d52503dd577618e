"""Rule for starting an engine again that ended. Pure."""

from collections import deque

FIRST_PAUSE_SECONDS = 1.0
"""Before the first start of a row of failures; doubled for each further one."""
MAX_PAUSE_SECONDS = 30.0
WINDOW_SECONDS = 600.0
MAX_ENDS = 5
"""An engine that ends more often than this within the window is given up."""


class Restarts:
    """The ends of one engine."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque()

    def pause_after_end(self, now: float) -> float | None:
        """Note that the engine ended; return the seconds to wait before it is started again, None to give it up.

        Args:
            now: seconds of a monotonic clock.
        """
        self._ends.append(now)
        while self._ends[0] <= now - WINDOW_SECONDS:
            self._ends.popleft()
        if len(self._ends) > MAX_ENDS:
            return None
        return float(min(FIRST_PAUSE_SECONDS * 2 ** (len(self._ends) - 1), MAX_PAUSE_SECONDS))
