"""Cancelling work that goes on in another thread: the work looks between two of its pieces."""

from threading import Event

from stillroom.errors import ChangeCancelledError


class Cancellation:
    """Of one piece of work. Thread-safe."""

    def __init__(self) -> None:
        self._event = Event()

    @property
    def is_cancelled(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        """Have the work end at its next `check`. Idempotent."""
        self._event.set()

    def check(self) -> None:
        """Called by the work between two pieces.

        Raises:
            ChangeCancelledError: the work was cancelled.
        """
        if self._event.is_set():
            raise ChangeCancelledError("the change of documents was cancelled before it was complete")
