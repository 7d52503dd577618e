"""Clocks, passed as arguments: of the machine, and virtual."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back; for durations."""
        ...

    def unix(self) -> float:
        """Seconds since 1970 UTC; for records."""
        ...


class SystemClock:
    """The clock of the machine."""

    def monotonic(self) -> float:
        return time.perf_counter()

    def unix(self) -> float:
        return time.time()


class VirtualClock:
    """A clock that moves by `advance` only, for simulations and tests."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def unix(self) -> float:
        return self.now
