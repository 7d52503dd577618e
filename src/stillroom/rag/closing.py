"""Closing a room, also one that was forgotten: its threads, files and the right to keep KV outlive the object."""

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from stillroom.rag.answering import Answering
from stillroom.telemetry.metrics import Metrics


class Closing:
    """Has no reference to the room, and the parts have none: otherwise it would never be forgotten."""

    def __init__(
        self, stillroom: object, answering: Answering, metrics: Metrics, parts: Sequence[Callable[[], None]], path: Path
    ) -> None:
        """
        Args:
            parts: what to close once nothing is generated any more, in this order.
            path: of the knowledge base.
        """
        self._answering, self._metrics, self._parts, self._path = answering, metrics, parts, path
        self._finalizer = weakref.finalize(stillroom, self._forgotten)
        self._finalizer.atexit = False  # a process that ends takes everything with it

    def close(self) -> None:
        """Idempotent."""
        self._finalizer.detach()
        if not self._answering.close():
            return
        self._metrics.forget_corpora(str(self._path))
        for close in self._parts:
            close()

    def _forgotten(self) -> None:
        if self._answering.is_open:
            # the collector runs in any thread, also in one of the room's own, and whatever locks that holds
            threading.Thread(target=self.close, name="stillroom-close", daemon=True).start()
            warnings.warn(f"a Stillroom on {self._path} was not closed", ResourceWarning, stacklevel=2)
