"""Stops using a shared tier that fails or hangs, until a probe succeeds. No torch."""

from collections.abc import Callable
from threading import Lock

MAX_FAILURES = 3
"""Failures in a row that open the breaker."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds until the first probe, and at most; doubled by every probe that fails."""


class CircuitBreaker:
    """Closed: the tier is used. Open: it is not, and from time to time the writing thread probes it (half-open), so
    that no request waits for a trial. Thread-safe."""

    def __init__(self, now: Callable[[], float]) -> None:
        """
        Args:
            now: seconds, never decreasing.
        """
        self._now = now
        self._lock = Lock()
        self._num_failures = MAX_FAILURES  # opens with the first probe's success
        self._pause = FIRST_PAUSE
        self._probe_at = float("-inf")
        self.num_opened = 0
        """How often it opened after it was closed."""

    @property
    def is_closed(self) -> bool:
        return self._num_failures < MAX_FAILURES

    @property
    def may_probe(self) -> bool:
        """Whether it is open, and the pause since the last failure is over."""
        return not self.is_closed and self._now() >= self._probe_at

    def succeed(self) -> None:
        """Record that the tier replied in time."""
        with self._lock:
            if self._num_failures < MAX_FAILURES:
                self._num_failures = 0

    def close(self) -> None:
        """Record that a probe succeeded."""
        with self._lock:
            self._num_failures, self._pause = 0, FIRST_PAUSE

    def fail(self) -> None:
        """Record that the tier failed, or did not reply in time."""
        with self._lock:
            was_closed = self.is_closed
            self._num_failures = min(self._num_failures + 1, MAX_FAILURES)
            if self.is_closed:
                return
            self.num_opened += was_closed
            self._pause = FIRST_PAUSE if was_closed else min(2 * self._pause, LONGEST_PAUSE)
            self._probe_at = self._now() + self._pause
