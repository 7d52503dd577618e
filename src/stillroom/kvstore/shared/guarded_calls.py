"""Calls of a shared tier: watched, timed and counted, so that a tier that fails, hangs or is slow is left alone."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from stillroom.core.clock import Clock
from stillroom.kvstore.shared.circuit_breaker import CircuitBreaker
from stillroom.kvstore.shared.link_meter import LinkMeter

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

STUCK_TIMEOUTS = 5
"""A call that takes so many timeouts does not come back: the tier is not used until it does."""
_MAX_WARNINGS = 100
"""Different messages that are logged until the tier is used again."""


class GuardedCalls:
    """Thread-safe. Errors of the tier are counted and logged, never raised."""

    def __init__(self, clock: Clock, timeout_seconds: float, name: str) -> None:
        """
        Args:
            timeout_seconds: of a reply without bytes.
            name: of the tier, for messages; holds no password.
        """
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._name = name
        self._breaker = CircuitBreaker(clock.monotonic)
        self.meter = LinkMeter()
        self.num_failures = 0
        """Calls that failed or took too long."""
        self._lock = threading.Lock()
        self._in_flight: dict[int, float] = {}
        self._num_calls = 0
        self._used_at = float("-inf")
        self._warned: set[str] = set()
        self._last_warning = ""

    @property
    def is_usable(self) -> bool:
        """Whether the circuit breaker is closed, and no call hangs."""
        if not self._breaker.is_closed:
            return False
        began = min(list(self._in_flight.values()), default=float("inf"))
        return self._clock.monotonic() - began < STUCK_TIMEOUTS * self._timeout_seconds

    @property
    def may_probe(self) -> bool:
        """Whether the circuit breaker is open and lets one call through."""
        return self._breaker.may_probe

    @property
    def num_opened(self) -> int:
        """How often the circuit breaker opened."""
        return self._breaker.num_opened

    def is_idle(self, seconds: float) -> bool:
        """Whether the breaker is closed and no call has ended for so long."""
        return self._breaker.is_closed and self._clock.monotonic() - self._used_at >= seconds

    def probed(self, latency_seconds: float, num_bytes: int, seconds: float, *, is_first: bool) -> None:
        """Use what a probe measured, and close the circuit breaker."""
        self.meter.start(latency_seconds, num_bytes, seconds)
        self._report(latency_seconds, num_bytes, seconds, is_first)
        self._breaker.close()

    def run(self, call: Callable[[], _Result], num_bytes: float = 0) -> _Result | None:
        """Call the tier, and tell the circuit breaker how that went; None if it fails.

        Args:
            num_bytes: that are moved, which takes time; infinite for a call of any duration.
        """
        began, is_timed = self._clock.monotonic(), num_bytes != float("inf")
        with self._watching(began if is_timed else float("inf")):
            try:
                result = call()
            except OSError as error:
                self._fail(error.strerror or str(error))  # strerror: without the name of a temporary file
                return None
        link = self.meter.link
        expected = 4 * link.seconds(int(num_bytes)) if is_timed and link is not None else 0.0
        self._used_at = self._clock.monotonic()
        if is_timed and self._used_at - began > self._timeout_seconds + expected:
            self._fail(f"a reply took longer than reuse.kv_tier_timeout_s={self._timeout_seconds:g}")
        else:
            self._breaker.succeed()
            if num_bytes == 0:
                self.meter.observe(0, self._used_at - began)
        return result

    @contextmanager
    def _watching(self, began: float) -> Iterator[None]:
        """Note a call, so that one that never ends is seen.

        Args:
            began: infinite for a call of any duration.
        """
        with self._lock:
            self._num_calls += 1
            number = self._num_calls
            self._in_flight[number] = began
        try:
            yield
        finally:
            with self._lock:
                del self._in_flight[number]

    def _report(self, latency_seconds: float, num_bytes: int, seconds: float, is_first: bool) -> None:
        """Log that a probe succeeded where that is news. Precondition: the breaker is as it was before."""
        if self._breaker.is_closed:
            return
        with self._lock:
            self._warned.clear()
            self._last_warning = ""
        speed = f"reads {num_bytes / max(seconds, 1e-9) / 2**20:.0f} MiB/s" if num_bytes else "takes no KV now"
        text = f"replies in {1000 * latency_seconds:.2f} ms and {speed}"
        if is_first:
            logger.info("%s is used; it %s", self._name, text)
        else:
            logger.warning("%s can be used again; it %s", self._name, text)

    def _fail(self, reason: str) -> None:
        with self._lock:
            self.num_failures += 1
        self._breaker.fail()
        if self._breaker.is_closed:
            self.warn(f"failed in one call: {reason}")
        else:
            self.warn(f"cannot be used; KV is computed, and a removal is completed later: {reason}")

    def warn(self, message: str) -> None:
        """Log a message once until the tier is used again; while it cannot be used, whenever the message changes."""
        with self._lock:
            known = self._warned if self._breaker.is_closed else {self._last_warning}
            is_known = message in known or len(self._warned) >= _MAX_WARNINGS
            self._warned.add(message)
            self._last_warning = message
        if not is_known:
            logger.warning("%s %s", self._name, message)
