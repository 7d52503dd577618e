"""Threads for what takes long, in pools of their own: however much there is of it, questions and probes find a thread.

What blocks for a moment only (searches, pages of documents, parsing) uses asyncio's own threads.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from stillroom.errors import EngineClosedError

T = TypeVar("T")


class Workers:
    """Of one server. Called on the event loop only, but for `close`."""

    def __init__(self) -> None:
        self.uploads = ThreadPoolExecutor(4, "stillroom-upload")
        """Changes of documents; those of one tenant wait for each other."""
        self.embeddings = ThreadPoolExecutor(2, "stillroom-embed")
        self.probes = ThreadPoolExecutor(1, "stillroom-probe")
        """Health and metrics."""
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
        """What it gives; whoever leaves does not end it. Raises as `run`."""
        if self._stopped is None:
            self._stopped = asyncio.get_running_loop().create_future()
        if self.is_stopping and not self._stopped.done():
            self._stopped.set_result(None)
        either: set[asyncio.Future[Any]] = {work, self._stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise shutting_down()
        return work.result()

    def stop_waiting(self) -> None:
        """Nobody waits any longer for what is not done."""
        self.is_stopping = True
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    def close(self) -> None:
        """Returns when what had begun is done; the rest never begins."""
        for pool in (self.uploads, self.embeddings, self.probes):
            pool.shutdown(cancel_futures=True)


def shutting_down() -> EngineClosedError:
    """What a request ends with that the server does not finish."""
    return EngineClosedError("the server is shutting down; ask again in a moment, or ask another one")
