"""Time is an argument: whoever needs the time is given a clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back; for durations."""
        ...

    def unix(self) -> float:
        """Seconds since 1970 UTC; for records."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.perf_counter()

    def unix(self) -> float:
        return time.time()
