"""Thread pools for long work, separate so that uploads never delay questions or probes.

Short blocking calls (searches, pages of documents, parsing) use asyncio's default pool.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

from stillroom.errors import ChangeCancelledError, EngineClosedError

T = TypeVar("T")


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class Workers:
    """Thread pools of one server. Called on the event loop only, except `close`."""

    def __init__(self) -> None:
        self.uploads = ThreadPoolExecutor(4, "stillroom-upload")
        """Uploads and deletions; those of one tenant run one after the other."""
        self.embeddings = ThreadPoolExecutor(2, "stillroom-embed")
        self.documents = ThreadPoolExecutor(2, "stillroom-document")
        """Reading of documents from their files, and pictures of pages."""
        self.probes = ThreadPoolExecutor(1, "stillroom-probe")
        """Health checks and metrics."""
        self.changes: set[Cancellable] = set()
        """Uploads, deletions and readings of documents that wait or run."""
        self._stopped: asyncio.Future[None] | None = None
        self.is_stopping = False

    async def run(self, pool: ThreadPoolExecutor | None, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Return the result of a call made in a thread of `pool`; None is asyncio's default pool.

        Raises:
            EngineClosedError: the server stops first. A call that has begun continues.
        """
        bound = partial(contextvars.copy_context().run, call, *args, **options)
        return await self.result(asyncio.get_running_loop().run_in_executor(pool, bound))

    async def result(self, work: "asyncio.Future[T]") -> T:
        """Return the result of work that continues if the caller is cancelled.

        Raises:
            EngineClosedError: the server stops first.
            ChangeCancelledError: the work was cancelled.
        """
        if self._stopped is None:
            self._stopped = asyncio.get_running_loop().create_future()
        if self.is_stopping and not self._stopped.done():
            self._stopped.set_result(None)
        either: set[asyncio.Future[Any]] = {work, self._stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise shutting_down_error()
        try:
            return work.result()
        except (asyncio.CancelledError, ChangeCancelledError) as error:
            if self.is_stopping:
                raise shutting_down_error() from error
            raise ChangeCancelledError(
                "the upload was cancelled before it was complete; nothing of it was kept"
            ) from error

    def stop_waiting(self) -> None:
        """End requests that wait for work, and cancel uploads and deletions after their current step."""
        self.is_stopping = True
        for change in list(self.changes):
            change.cancel()
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    def close(self) -> None:
        """Cancel the rest and wait for the running steps."""
        for change in list(self.changes):
            change.cancel()
        for pool in (self.uploads, self.embeddings, self.documents, self.probes):
            pool.shutdown(cancel_futures=True)


def shutting_down_error() -> EngineClosedError:
    """Return the error of a request that a stopping server does not finish."""
    return EngineClosedError("the server is shutting down; try again in a moment, or use another server")
