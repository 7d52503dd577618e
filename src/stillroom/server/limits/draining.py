"""Graceful shutdown: no new requests, a grace period for running ones, then an error for the rest.

For `grace_s` running answers continue, and new requests and `/readyz` get 503, which load balancers see. Then every
remaining request ends with the error `shutting_down`, as a status or as a stream's last event, so that a partial answer
is never taken for a complete one. A change of documents that has begun is completed, although its client got the error.
"""

import asyncio
import logging
from collections.abc import Callable

from stillroom.core.clock import Clock
from stillroom.server.limits.admission import AdmissionControl
from stillroom.server.limits.workers import Workers

logger = logging.getLogger(__name__)

_LAST_EVENTS_S = 5.0
"""Time for the last events to be sent."""


class Draining:
    """Shutdown of one server. `is_over` is polled on the event loop."""

    def __init__(
        self,
        admission: AdmissionControl,
        workers: Workers,
        stop_generating: Callable[[], None],
        grace_s: float,
        clock: Clock,
    ) -> None:
        self._admission = admission
        self._workers = workers
        self._stop_generating = stop_generating
        self._grace = grace_s
        self._clock = clock
        self._began: float | None = None
        self._ending_answers: asyncio.Future[None] | None = None

    def is_over(self, *, hurry: bool = False) -> bool:
        """Whether no request runs any more; then no work begins either. The first call begins the shutdown.

        Args:
            hurry: end the grace period now.
        """
        now = self._clock.monotonic()
        if self._began is None:
            self._began = now
            self._admission.is_closing = True
            if num_running := self._admission.num_in_flight:
                logger.info(
                    "stopping: %d running %s up to %g s (server.grace_s); a second Ctrl-C ends them at once",
                    num_running,
                    "request gets" if num_running == 1 else "requests get",
                    self._grace,
                )
        if self._admission.num_in_flight == 0:
            self._workers.stop_waiting()  # work that no request waits for would begin again when the loop ends it
            return True
        if self._ending_answers is None and (hurry or now >= self._began + self._grace):
            self._began = now - self._grace
            self._workers.stop_waiting()
            self._ending_answers = asyncio.ensure_future(asyncio.to_thread(self._stop_generating))
        return now >= self._began + self._grace + _LAST_EVENTS_S
