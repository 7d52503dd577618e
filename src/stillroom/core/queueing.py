"""Arithmetic of a full queue: each tenant's equal share, and how fast requests end."""

from collections import Counter, deque

_NUM_REMEMBERED = 64


def is_below_share(tenant: str, held: Counter[str], limit: float) -> bool:
    """Whether the tenant may take one more of `limit` places; a tenant without a place always may.

    Args:
        held: places by tenant. Tenants without places are absent.
    """
    num_tenants = len(held) + (tenant not in held)
    return tenant not in held or (held[tenant] + 1) * num_tenants <= limit


class ServicePace:
    """Seconds per request, over the last 64 requests that ended. Idle time does not count. Not thread-safe."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_NUM_REMEMBERED)  # the first may be the end of the idle time
        self.seconds: float | None = None
        """When the last request ended; None before any has."""

    def start(self, now: float) -> None:
        """Work arrived after idle time."""
        self._ends.clear()
        self._ends.append(now)

    def end(self, at: float) -> None:
        self._ends.append(at)
        self.seconds = self.seconds_at(at)

    def seconds_at(self, now: float) -> float:
        """Seconds per request with the time since the last end, so that a stalled service shows."""
        return (now - self._ends[0]) / max(1, len(self._ends) - 1) if self._ends else 0.0
