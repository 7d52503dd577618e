"""Measures the latency and the bandwidth of a shared tier, by a moving average. No torch."""

from threading import Lock

from stillroom.core.kv import Link

_WEIGHT = 0.2
"""Of a new measurement."""
_FULL_BYTES_PER_SECOND = 1e12
"""Assumed of a tier that is full at the start, until the first record is read."""
_LARGE_BYTES = 128 * 1024
"""Transfers from here on say how fast bytes come, smaller ones how long a reply takes."""


class LinkMeter:
    """Thread-safe. Transfers that share the network each measure their part of it, which is what the next one gets."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._link: Link | None = None

    @property
    def link(self) -> Link | None:
        """None before the first `start`."""
        return self._link

    def start(self, latency_seconds: float, num_bytes: int, seconds: float) -> None:
        """Take over the measurements of a probe: the time of a small reply, and of one with this many bytes;
        without bytes if the tier is full.

        Later probes count like other transfers.
        """
        if self._link is None:
            speed = num_bytes / max(seconds - latency_seconds, 1e-9) if num_bytes else _FULL_BYTES_PER_SECOND
            self._link = Link(latency_seconds, speed)
            return
        self.observe(0, latency_seconds)
        if num_bytes:
            self.observe(num_bytes, seconds)

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Count a transfer, or a reply without bytes."""
        with self._lock:
            link = self._link
            if link is None:
                return
            if num_bytes < _LARGE_BYTES:
                latency = link.latency_seconds + _WEIGHT * (seconds - link.latency_seconds)
                self._link = Link(latency, link.bytes_per_second)
                return
            pace = max(seconds - link.latency_seconds, 1e-9) / num_bytes
            pace = (1 - _WEIGHT) / link.bytes_per_second + _WEIGHT * pace
            self._link = Link(link.latency_seconds, 1 / pace)
