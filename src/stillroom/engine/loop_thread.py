"""A thread with an event loop of its own, for engines whose requests run in other processes."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from stillroom.errors import EngineClosedError

T = TypeVar("T")


class LoopThread:
    """A running loop. Every call comes before its end, or is refused."""

    def __init__(self, name: str) -> None:
        self._closing = threading.Lock()  # orders every call before, or after, the end of the loop
        self.is_closed = False
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the thread. Raises EngineClosedError."""
        with self._closing:
            self._check_open()
            self.loop.call_soon_threadsafe(function)

    def call_if_open(self, function: Callable[[], object]) -> None:
        """Call a function in the thread, unless it has ended."""
        with self._closing:
            if not self.is_closed:
                self.loop.call_soon_threadsafe(function)

    def start(self, coroutine: Callable[[], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Run a coroutine in the thread. Raises EngineClosedError."""
        with self._closing:
            self._check_open()
            return asyncio.run_coroutine_threadsafe(coroutine(), self.loop)

    def close(self, at_the_end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all tasks, run `at_the_end`, and stop the thread. Idempotent."""
        with self._closing:
            if self.is_closed:
                return
            self.is_closed = True
        asyncio.run_coroutine_threadsafe(self._shut_down(at_the_end), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _shut_down(self, at_the_end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await at_the_end()
        await self.loop.shutdown_asyncgens()

    def _check_open(self) -> None:
        if self.is_closed:
            raise EngineClosedError("the engine is closed; open the knowledge base again")
