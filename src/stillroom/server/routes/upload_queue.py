"""Queue of one tenant's uploads and deletions, which run one after the other, each in a thread.

A change runs in steps and checks between them whether it was cancelled: by a disconnect, a request, or because the
server stops. A change that is cancelled while it waits never begins.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stillroom.core.cancellation import Cancellation
from stillroom.errors import ChangeCancelledError, QueueFullError
from stillroom.server.limits.workers import Workers, shutting_down_error

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom

T = TypeVar("T")

MAX_CHANGES = 256
"""Most uploads and deletions of one tenant that wait or run."""
_MAX_HELD = 2
"""Upload budget of a tenant, in uploads of the largest size that are read, wait or are indexed."""
_RETRY_SECONDS = 5.0


class QueuedChange(Generic[T]):
    """One upload or deletion. Called on the event loop only."""

    def __init__(self, work: Callable[[Cancellation], T], release: Callable[[], None]) -> None:
        """
        Args:
            release: called once, when the work has ended or was cancelled before it began.
        """
        self._work = work
        self._release = release
        self._claim = Lock()
        """Taken once: by the thread that starts the work, or by an earlier cancellation."""
        self._stop = Cancellation()
        self.task: asyncio.Task[T]
        """Resolves to the result. Set by the queue."""

    def run(self) -> T:
        """Do the work; called in a thread. Raises EngineClosedError: it was cancelled before."""
        if not self._claim.acquire(blocking=False):
            raise shutting_down_error()
        try:
            return self._work(self._stop)
        finally:
            self._release()

    def cancel(self) -> None:
        """Cancel the change after its current step, or before its first. Idempotent."""
        self._stop.cancel()
        if self.prevent_start():
            self.task.cancel()

    def task_ended(self) -> None:
        """Clean up after the task has ended; if the event loop ended it, stop its thread too."""
        self._stop.cancel()
        self.prevent_start()

    def prevent_start(self) -> bool:
        """Prevent the work from beginning. Returns False if it has begun."""
        is_first = self._claim.acquire(blocking=False)
        if is_first:
            self._release()
        return is_first

    @property
    def is_cancelled(self) -> bool:
        return self._stop.is_cancelled


class UploadQueue:
    """The changes of one tenant, and its upload budget. Called on the event loop only."""

    def __init__(self, stillroom: "Stillroom", workers: Workers) -> None:
        self.stillroom = stillroom
        self.max_bytes = stillroom.config.server.max_upload_bytes
        self._workers = workers
        self._writing = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._num_bytes_held = 0
        self._idle_work: Callable[[Cancellation], object] | None = None
        self._idle: QueuedChange[object] | None = None
        self._on_idle_end: Callable[[asyncio.Task[object]], None] = lambda _: None

    @contextlib.contextmanager
    def reserve_bytes(self, num_bytes: int) -> Iterator[None]:
        """Reserves `num_bytes` of the tenant's upload budget.

        Raises:
            QueueFullError: the upload would exceed the budget.
        """
        if self._num_bytes_held + num_bytes > _MAX_HELD * self.max_bytes:
            raise self._full(
                f"uploads of {self._num_bytes_held} bytes are running already; send this one when they are done"
            )
        self._num_bytes_held += num_bytes
        try:
            yield
        finally:
            self._num_bytes_held -= num_bytes

    def check_capacity(self) -> None:
        """Raises QueueFullError: `MAX_CHANGES` changes wait or run."""
        if len(self._running) >= MAX_CHANGES:
            raise self._full(f"{len(self._running)} uploads and deletions wait already; try again later")

    def _full(self, reason: str) -> QueueFullError:
        self.stillroom.metrics.count_refused("queue")
        return QueueFullError(reason, _RETRY_SECONDS)

    def start(self, work: Callable[[Cancellation], T], release: Callable[[], None] = lambda: None) -> QueuedChange[T]:
        """Queue a change. It begins when the changes before it have ended, unless the server stops first.

        Args:
            release: called when the change has ended or was cancelled before it began.
        """
        if self._idle is not None:
            self._idle.cancel()
        change = self._queue(work, release)
        change.task.add_done_callback(lambda _: self._resume())
        return change

    def start_when_idle(
        self, work: Callable[[Cancellation], object], on_end: Callable[["asyncio.Task[object]"], None]
    ) -> None:
        """Run work while no change waits or runs. A new change cancels it; it starts again after the last change.

        Args:
            on_end: called each time the work ends, cancelled or not.
        """
        self._idle_work, self._on_idle_end = work, on_end
        self._resume()

    def _resume(self) -> None:
        if self._idle_work is None or self._running or self._workers.is_stopping:
            return

        def ended(task: "asyncio.Task[object]") -> None:
            self._idle = None
            is_cancelled = task.cancelled() or isinstance(task.exception(), ChangeCancelledError)
            self._idle_work = self._idle_work if is_cancelled else None
            self._on_idle_end(task)
            self._resume()

        self._idle = self._queue(self._idle_work, lambda: None)
        self._idle.task.add_done_callback(ended)

    def _queue(self, work: Callable[[Cancellation], T], release: Callable[[], None]) -> QueuedChange[T]:
        change = QueuedChange(work, release)

        async def locked() -> T:
            async with self._writing:
                if self._workers.is_stopping:
                    raise shutting_down_error()
                return await asyncio.get_running_loop().run_in_executor(
                    self._workers.uploads, contextvars.copy_context().run, change.run
                )

        def ended(task: "asyncio.Task[T]") -> None:
            if not task.cancelled():
                task.exception()  # marks it as retrieved; the client may be gone
            self._running.discard(task)
            self._workers.changes.discard(change)
            change.task_ended()

        change.task = asyncio.create_task(locked())
        self._running.add(change.task)
        self._workers.changes.add(change)
        change.task.add_done_callback(ended)
        return change
