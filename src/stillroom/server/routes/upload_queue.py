"""Changes of one tenant's documents: uploads and deletions, one after the other, each in a thread.

A change works in pieces and looks between two of them whether it was cancelled: because its client left, asked for it,
or the server stops. A change that waits when it is cancelled never begins.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stillroom.core.cancellation import Cancellation
from stillroom.errors import ChangeCancelledError, QueueFullError
from stillroom.server.limits.workers import Workers, shutting_down

if TYPE_CHECKING:
    from stillroom.rag.stillroom import Stillroom

T = TypeVar("T")

MAX_CHANGES = 256
"""Uploads and deletions of one tenant that wait or are under way."""
_MAX_HELD = 2
"""Uploads of the largest size that one tenant may have here at the same time: being read, waiting or being indexed."""
_RETRY_SECONDS = 5.0


class QueuedChange(Generic[T]):
    """One upload or deletion. Called on the event loop only."""

    def __init__(self, work: Callable[[Cancellation], T], release: Callable[[], None]) -> None:
        """
        Args:
            release: called once, when the work has ended or will never begin.
        """
        self._work = work
        self._release = release
        self._claim = Lock()
        """Of the thread that works, or of the cancellation that comes first."""
        self._stop = Cancellation()
        self.task: asyncio.Task[T]
        """The result. Set by the queue."""

    def run(self) -> T:
        """Work, in a thread. Raises EngineClosedError: it was given up before."""
        if not self._claim.acquire(blocking=False):
            raise shutting_down()
        try:
            return self._work(self._stop)
        finally:
            self._release()

    def cancel(self) -> None:
        """End it between two pieces of its work, or before the first. Idempotent."""
        self._stop.cancel()
        if self.give_up():
            self.task.cancel()

    def abandon(self) -> None:
        """Its task has ended: by itself, or with the event loop, and then its thread is to end too."""
        self._stop.cancel()
        self.give_up()

    def give_up(self) -> bool:
        """Have it never begin. Returns whether it had not begun."""
        is_first = self._claim.acquire(blocking=False)
        if is_first:
            self._release()
        return is_first

    @property
    def is_cancelled(self) -> bool:
        return self._stop.is_cancelled


class UploadQueue:
    """The changes of one tenant, and how much of uploads may be here. Called on the event loop only."""

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
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Reserves `num_bytes` of the tenant's upload budget.

        Raises:
            QueueFullError: with the uploads that are here already it is too much.
        """
        if self._num_bytes_held + num_bytes > _MAX_HELD * self.max_bytes:
            raise self._full(f"uploads of {self._num_bytes_held} bytes are under way; send this one when they are done")
        self._num_bytes_held += num_bytes
        try:
            yield
        finally:
            self._num_bytes_held -= num_bytes

    def check_room(self) -> None:
        """Raises QueueFullError: too many changes wait already."""
        if len(self._running) >= MAX_CHANGES:
            raise self._full(f"{len(self._running)} uploads and deletions wait already")

    def _full(self, reason: str) -> QueueFullError:
        self.stillroom.metrics.count_refused("queue")
        return QueueFullError(reason, _RETRY_SECONDS)

    def start(self, work: Callable[[Cancellation], T], release: Callable[[], None] = lambda: None) -> QueuedChange[T]:
        """Queue a change. It begins when those before it have ended, unless the server stops until then.

        Args:
            release: called when the change has ended or will never begin.
        """
        if self._idle is not None:
            self._idle.cancel()
        change = self._queue(work, release)
        change.task.add_done_callback(lambda _: self._resume())
        return change

    def start_when_idle(
        self, work: Callable[[Cancellation], object], on_end: Callable[["asyncio.Task[object]"], None]
    ) -> None:
        """Do this while there is no change: one that comes cancels it, and it begins again after the last.

        Args:
            on_end: told each time it ends, cancelled or not.
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
                    raise shutting_down()
                return await asyncio.get_running_loop().run_in_executor(
                    self._workers.uploads, contextvars.copy_context().run, change.run
                )

        def ended(task: "asyncio.Task[T]") -> None:
            if not task.cancelled():
                task.exception()  # after the client has left, nothing else asks for it
            self._running.discard(task)
            self._workers.changes.discard(change)
            change.abandon()

        change.task = asyncio.create_task(locked())
        self._running.add(change.task)
        self._workers.changes.add(change)
        change.task.add_done_callback(ended)
        return change
