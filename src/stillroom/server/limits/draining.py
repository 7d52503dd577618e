"""The end of a server: it takes on nothing new, and what runs is finished or handed back.

For `grace_s` running answers go on, and the address still answers: new requests and `/readyz` get 503, so that whoever
balances load learns of it. Then what still runs ends with the error `shutting_down`, as a stream's last event or as a
status, so that nobody takes half an answer for a whole one; and then the address is given back. A change of documents
that had begun is completed, though its client has been told.
"""

import asyncio
from collections.abc import Callable

from stillroom.core.clock import Clock
from stillroom.server.limits.admission import AdmissionControl
from stillroom.server.limits.workers import Workers

_FAREWELL_S = 5.0
"""For last events to go out."""


class Draining:
    """Asked every now and then whether it is over."""

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
        self._handing_back: asyncio.Future[None] | None = None

    def is_over(self, *, hurry: bool = False) -> bool:
        """Whether nothing runs any more. The first call begins it.

        Args:
            hurry: the grace is over.
        """
        now = self._clock.monotonic()
        if self._began is None:
            self._began = now
            self._admission.is_closing = True
        if self._admission.num_in_flight == 0:
            return True
        if self._handing_back is None and (hurry or now >= self._began + self._grace):
            self._began = now - self._grace
            self._workers.stop_waiting()
            self._handing_back = asyncio.ensure_future(asyncio.to_thread(self._stop_generating))
        return now >= self._began + self._grace + _FAREWELL_S
