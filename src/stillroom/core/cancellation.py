"""Cancels work in another thread; the work checks between two of its pieces."""

from threading import Event

from stillroom.errors import ChangeCancelledError


class Cancellation:
    """Cancels one piece of work. Thread-safe."""

    def __init__(self) -> None:
        self._event = Event()

    @property
    def is_cancelled(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        """End the work at its next `check`. Idempotent."""
        self._event.set()

    def wait(self, seconds: float) -> None:
        """Pause the work. Raises ChangeCancelledError as soon as it is cancelled."""
        self._event.wait(seconds)
        self.check()

    def check(self) -> None:
        """Raise ChangeCancelledError if the work was cancelled."""
        if self._event.is_set():
            raise ChangeCancelledError("the work was cancelled before it was complete")
