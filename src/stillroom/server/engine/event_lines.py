"""The events of a request as lines for its front: the first token at once, later ones in batches.

The engine's thread hands events over one by one; a line is sent at most every `BATCH_SECONDS`, so that many streams of
small events do not keep the event loop and the network busy. Closing the connection cancels the request.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from stillroom.cluster.wire import HEARTBEAT_SECONDS, MEDIA_TYPE, Failure, FirstToken, WireEvent, events_to_json
from stillroom.cluster.wire_reading import dump
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason
from stillroom.engine.events import Listener, TokenEvent

BATCH_SECONDS = 0.02
"""Longest time that a token waits for others."""


class EventBuffer:
    """Events of one request on their way from the engine's thread to the event loop."""

    def __init__(self, num_samples: int, received_at: float, is_alive: Callable[[], bool]) -> None:
        """
        Args:
            received_at: when the request was received, in seconds on the engine's monotonic clock.
            is_alive: whether the engine's thread runs.
        """
        self._is_alive = is_alive
        self._loop = asyncio.get_running_loop()
        self._received_at = received_at
        self._lock = threading.Lock()
        self._events: list[tuple[int, TokenEvent]] = []
        self._is_planned = False
        """Whether the event loop knows that there are events."""
        self._ready = asyncio.Event()
        self._sent_at = float("-inf")
        self._begun: set[int] = set()
        self._open = set(range(num_samples))
        """Samples without their last event, on the event loop."""

    def listener(self, sample: int) -> Listener:
        """Return the listener of a sample, for the engine's thread."""

        def listen(event: TokenEvent) -> None:
            is_urgent = event.admission is not None or event.finish_reason is not None
            with self._lock:
                self._events.append((sample, event))
                is_known, self._is_planned = self._is_planned, True
            if is_urgent or not is_known:
                self._loop.call_soon_threadsafe(self._plan, is_urgent)

        return listen

    def _plan(self, is_urgent: bool) -> None:
        delay = 0.0 if is_urgent else self._sent_at + BATCH_SECONDS - self._loop.time()
        if delay <= 0:
            self._ready.set()
        else:
            self._loop.call_later(delay, self._ready.set)

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield lines until every sample has ended; an empty one after each silence of `HEARTBEAT_SECONDS`."""
        while self._open:
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._ready.wait()
            except TimeoutError:
                yield b"\n"
                continue
            self._sent_at = self._loop.time()
            events = self._take()
            if events:
                yield dump(events_to_json(events)) + b"\n"

    def _take(self) -> list[WireEvent]:
        """Return what has come since the last line, one event for each sample."""
        self._ready.clear()
        with self._lock:
            taken, self._events, self._is_planned = self._events, [], False
        by_sample: dict[int, list[TokenEvent]] = {}
        for sample, event in taken:
            by_sample.setdefault(sample, []).append(event)
        found = [self._merged(sample, events) for sample, events in by_sample.items() if sample in self._open]
        self._open -= {event.sample for event in found if event.end is not None}
        return found

    def _merged(self, sample: int, events: Sequence[TokenEvent]) -> WireEvent:
        last = events[-1]
        with_tokens = [event for event in events if event.token_id is not None]
        found = WireEvent(
            sample=sample,
            tokens=tuple(event.token_id for event in with_tokens if event.token_id is not None),
            logprobs=tuple(event.logprobs for event in with_tokens if event.logprobs is not None),
            lookup=next((event.lookup for event in reversed(events) if event.lookup is not None), None),
            end=last.finish_reason,
            failure=None if last.error is None else self._failure(last.error),
        )
        first = next((event for event in events if event.admission is not None), None)
        if first is None or sample in self._begun:
            return found
        self._begun.add(sample)
        return replace(found, first=self._first(first))

    def _failure(self, error: Exception) -> Failure:
        """Describe an error. Another engine may continue what an engine that has failed cannot."""
        found = Failure.of(error)
        return replace(found, kind="closed") if found.kind == "engine" and not self._is_alive() else found

    def _first(self, event: TokenEvent) -> FirstToken:
        assert event.admission is not None
        began = self._received_at
        return FirstToken(
            admitted=max(0.0, event.admission.admitted_at - began),
            began=max(0.0, event.admission.began_at - began),
            computed=max(0.0, event.at - began),
            reuse=event.reuse,
        )

    def end(self, sample: int, reason: FinishReason) -> None:
        """End a sample that needs no computing. Called on the event loop, before `lines`."""
        self.listener(sample)(TokenEvent(RequestId(""), None, reason, self._received_at))


class EventLines(StreamingResponse):
    """A reply of lines. When it ends, or its connection, `cancel` is called."""

    def __init__(self, lines: AsyncIterator[bytes], cancel: Callable[[], None]) -> None:
        super().__init__(lines, media_type=MEDIA_TYPE, headers={"cache-control": "no-store"})
        self._cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()
