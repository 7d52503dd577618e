"""A chat question that is being searched: its hops as they happen, then the streams of its answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from stillroom.rag.hops import Hop, OnHop
from stillroom.server.routes.answer_events import cancel

if TYPE_CHECKING:
    from stillroom.rag.stream import AsyncAnswerStream


class AskedQuestion:
    """Stands for the streams of a question until they exist. Belongs to the event loop that creates it."""

    def __init__(self, ask: "Callable[[OnHop], Coroutine[Any, Any, list[AsyncAnswerStream]]]") -> None:
        """
        Args:
            ask: begins to answer; calls its argument, from any thread, after each hop.
        """
        self.request_id = ""
        """Of the first answer; empty before the first hop is known."""
        loop = asyncio.get_running_loop()
        self._hops: asyncio.Queue[Hop | None] = asyncio.Queue()
        self._asking = loop.create_task(ask(lambda hop: loop.call_soon_threadsafe(self._hops.put_nowait, hop)))
        self._asking.add_done_callback(lambda _: self._hops.put_nowait(None))
        self._first: Hop | None = None

    async def begin(self) -> "AskedQuestion":
        """Wait until the first hop is known or the streams exist. Raises as `Stillroom.astreams`; being cancelled
        cancels the question."""
        self._first = await self._next_hop()
        return self

    async def hops(self) -> AsyncIterator[Hop]:
        """Yield the hops until the streams exist. Raises as `begin`, whose return is a precondition."""
        hop = self._first
        while hop is not None:
            yield hop
            hop = await self._next_hop()

    async def _next_hop(self) -> Hop | None:
        try:
            hop = await self._hops.get()
        except BaseException:
            self.cancel()
            raise
        self.request_id = self.streams[0].request_id if hop is None else hop.request_id
        return hop

    @property
    def streams(self) -> "Sequence[AsyncAnswerStream]":
        """Precondition: `hops` has ended."""
        return self._asking.result()

    def cancel(self) -> None:
        """Cancel the search, or the answers if they have begun."""
        if not self._asking.done():
            self._asking.cancel()
        elif not self._asking.cancelled() and self._asking.exception() is None:
            cancel(self._asking.result())


async def with_hops(
    asked: AskedQuestion,
    hop_event: Callable[[Hop], str],
    answer_events: "Callable[[Sequence[AsyncAnswerStream]], AsyncIterator[str]]",
) -> AsyncIterator[str]:
    """Yield an event for each hop, then those of the answers. Precondition: `AskedQuestion.begin` has returned."""
    async for hop in asked.hops():
        yield hop_event(hop)
    async for event in answer_events(asked.streams):
        yield event
