"""Streams of an answer's text: `AnswerStream` for threads, `AsyncAnswerStream` for event loops.

The engine's thread pushes token events; an `AnswerCollector` turns them into text. Closing a stream early cancels its
request.
"""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator

from stillroom.backends.tool_chat import CallFormat
from stillroom.core.ids import RequestId
from stillroom.engine.events import TokenEvent
from stillroom.errors import UsageError
from stillroom.rag.answer import Answer, Source, TokenScore
from stillroom.rag.answer_collector import AnswerCollector


class _Stream:
    """Common part of both streams."""

    def __init__(self, collector: AnswerCollector, cancel: Callable[[], None]) -> None:
        self._collector = collector
        self._cancel = cancel
        self._is_over = False
        self._num_scores_taken = 0
        self.stillroom: object = None
        """Keeps the `Stillroom` from being collected, and so closed, before the stream."""

    @property
    def request_id(self) -> RequestId:
        return self._collector.started.request_id

    @property
    def sources(self) -> tuple[Source, ...]:
        """Chunks of the prompt; known before the first token."""
        return self._collector.started.sources

    @property
    def call_format(self) -> CallFormat | None:
        """How the answer writes a call of a tool; None if no tool may be called."""
        return self._collector.started.call_format

    @property
    def answer(self) -> Answer:
        """The finished answer.

        Raises:
            UsageError: the stream was not read to its end.
        """
        self._collector.complete()
        if self._collector.answer is None:
            raise UsageError("the answer is not complete; read the stream to its end first")
        return self._collector.answer

    def cancel(self) -> None:
        """Stop generating; the KV blocks are freed after the current step. No effect if the answer is complete."""
        self._is_over = True
        if self._collector.answer is None:
            self._cancel()
        elif self._collector.needs_time:
            self._collector.complete(cites=False)

    def take_logprobs(self) -> list[TokenScore]:
        """Log probabilities of the tokens since the last call; empty unless requested."""
        first, self._num_scores_taken = self._num_scores_taken, len(self._collector.scores)
        return self._collector.scores[first:]

    def _feed(self, event: TokenEvent) -> str:
        self._is_over = event.finish_reason is not None
        piece = self._collector.feed(event)
        if self._collector.answer is not None and not self._is_over:
            self._is_over = True
            self._cancel()  # the answer ended at a stop string, which the engine does not know
        return piece


class AnswerStream(_Stream):
    """Iterates over pieces of text."""

    def __init__(
        self, collector: AnswerCollector, events: "queue.SimpleQueue[TokenEvent]", cancel: Callable[[], None]
    ) -> None:
        super().__init__(collector, cancel)
        self._events = events

    def read_to_end(self) -> Answer:
        """Wait for the complete answer. Raises as `next`."""
        for _ in self:
            pass
        return self.answer

    def __next__(self) -> str:
        """The next piece, which is not empty; raises EngineError if generation fails or is cancelled."""
        while not self._is_over:
            if piece := self._feed(self._events.get()):
                return piece
        self._collector.complete()
        raise StopIteration

    def __iter__(self) -> Iterator[str]:
        """Pieces as they come. Closing the iterator early cancels the request. Raises as `next`."""
        try:
            while (piece := next(self, None)) is not None:
                yield piece
        finally:
            self.cancel()


class AsyncAnswerStream(_Stream):
    """Iterates over pieces of text with `async for`, in the event loop that created it."""

    def __init__(
        self, collector: AnswerCollector, events: "asyncio.Queue[TokenEvent]", cancel: Callable[[], None]
    ) -> None:
        super().__init__(collector, cancel)
        self._events = events
        self._loop = asyncio.get_running_loop()

    async def __anext__(self) -> str:
        """The next piece, which is not empty.

        Raises:
            EngineError: generation failed, or was cancelled.
            UsageError: the running event loop is not the one that created the stream.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise UsageError("this stream was created in another event loop; read it there")
        while not self._is_over:
            if piece := self._feed(await self._events.get()):
                return piece
        if self._collector.needs_time:
            await asyncio.to_thread(self._collector.complete)
        raise StopAsyncIteration

    async def __aiter__(self) -> AsyncIterator[str]:
        """Pieces as they come. Closing the iterator early cancels the request. Raises as `anext`."""
        try:
            while (piece := await anext(self, None)) is not None:
                yield piece
        finally:
            self.cancel()
