"""Threads for what takes long, in pools of their own: however much there is of it, questions and probes find a thread.

What blocks for a moment only (searches, pages of documents, parsing) uses asyncio's own threads.
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
    """Work that ends early."""

    def cancel(self) -> None: ...


class Workers:
    """Of one server. Called on the event loop only, but for `close`."""

    def __init__(self) -> None:
        self.uploads = ThreadPoolExecutor(4, "stillroom-upload")
        """Changes of documents; those of one tenant wait for each other."""
        self.embeddings = ThreadPoolExecutor(2, "stillroom-embed")
        self.probes = ThreadPoolExecutor(1, "stillroom-probe")
        """Health and metrics."""
        self.changes: set[Cancellable] = set()
        """Uploads and deletions that wait or are under way."""
        self._stopped: asyncio.Future[None] | None = None
        self.is_stopping = False

    async def run(self, pool: ThreadPoolExecutor | None, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """What a call gives, made in a thread of the pool; None: asyncio's own.

        Raises:
            EngineClosedError: the server stops, and it is not done. It goes on if it had begun.
        """
        bound = partial(contextvars.copy_context().run, call, *args, **options)
        return await self.result(asyncio.get_running_loop().run_in_executor(pool, bound))

    async def result(self, work: "asyncio.Future[T]") -> T:
        """The result of work that goes on when the caller is cancelled. Raises as `run`, and ChangeCancelledError: the
        work was cancelled."""
        if self._stopped is None:
            self._stopped = asyncio.get_running_loop().create_future()
        if self.is_stopping and not self._stopped.done():
            self._stopped.set_result(None)
        either: set[asyncio.Future[Any]] = {work, self._stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise shutting_down()
        try:
            return work.result()
        except (asyncio.CancelledError, ChangeCancelledError) as error:
            if self.is_stopping:
                raise shutting_down() from error
            raise ChangeCancelledError(
                "the upload was cancelled before it was complete; nothing of it was kept"
            ) from error

    def stop_waiting(self) -> None:
        """Requests wait no longer for what is not done, and changes of documents end with the piece they are at."""
        self.is_stopping = True
        for change in list(self.changes):
            change.cancel()
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    def close(self) -> None:
        """Returns when the pieces of work that had begun are done; the rest never begins."""
        for change in list(self.changes):
            change.cancel()
        for pool in (self.uploads, self.embeddings, self.probes):
            pool.shutdown(cancel_futures=True)


def shutting_down() -> EngineClosedError:
    """What a request ends with that the server does not finish."""
    return EngineClosedError("the server is shutting down; ask again in a moment, or ask another one")
