"""Engine whose requests run on OpenAI-compatible servers; the same interface as `async_engine`.

A thread with its own event loop talks to the servers; each request is a task there. Every submitted request gets
exactly one last event. How to use it: docs/engines.md
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from stillroom.core.clock import Clock
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, SampleRequest
from stillroom.engine.deadlines import deadline_error
from stillroom.engine.events import Listener, TokenEvent
from stillroom.engine.loop_thread import LoopThread
from stillroom.engine.openai_protocol import EventDelta, RemotePrompt, ServerChoice, body_of, path_of
from stillroom.engine.server_pool import ServerPool
from stillroom.errors import EngineClosedError, EngineError, StillroomError

logger = logging.getLogger(__name__)

_Events = AsyncGenerator[EventDelta, None]


class OpenAIEngine:
    """A running engine. Close it, or use it as a context manager."""

    def __init__(self, servers: ServerPool, model: str, clock: Clock) -> None:
        """
        Args:
            model: name of the model; empty: the first that a server lists, see `find_model`.
        """
        self.model = model
        self.servers = servers
        self._clock = clock
        self._tasks: dict[RequestId, asyncio.Task[TokenEvent]] = {}
        self._begun: set[RequestId] = set()
        self._thread = LoopThread("stillroom-openai")

    @property
    def is_alive(self) -> bool:
        return not self._thread.is_closed

    @property
    def num_waiting(self) -> int:
        """Requests without any text of an answer yet."""
        return max(0, len(self._tasks) - len(self._begun))

    @property
    def num_running(self) -> int:
        return len(self._begun)

    @property
    def problem(self) -> str | None:
        """Why no request can be answered now, in words for callers; None if a server may take one."""
        if any(one.is_alive for one in self.servers.states()):
            return None
        return "no server takes requests now" if len(self.servers.urls) > 1 else "the server takes no requests now"

    def watch(self) -> None:
        """Probe servers that failed, from now until this is closed."""
        self._thread.start(self.servers.watch)

    def find_model(self) -> str:
        """Return the named model, or else the first that the first reachable server lists. Several servers are checked
        to serve it; a single one tells with the first request.

        Raises: as `ServerPool.find_model`.
        """
        if not self.model or len(self.servers.urls) > 1:
            self.model = self._thread.start(lambda: self.servers.find_model(self.model)).result()
        return self.model

    def submit(
        self, prompt: RemotePrompt, request: SampleRequest, listener: Listener, choice: ServerChoice | None = None
    ) -> None:
        """Start a request; its events go to the listener.

        Args:
            choice: the server for it; None: chosen without knowing the prompt.

        Raises:
            UsageError: a sampling parameter cannot be sent to a server.
            EngineClosedError: the engine was closed.
        """
        choice = choice or ServerChoice()
        body = body_of(prompt, request.sampling, self.model, has_extra_sampling=self.servers.has_extra_sampling)
        body |= {"cache_salt": choice.cache_salt} if choice.cache_salt else {}

        def start() -> None:
            events = self.servers.stream(path_of(prompt), body, choice)
            task = self._thread.loop.create_task(self._answer_in_time(request, events, listener))
            self._tasks[request.request_id] = task
            task.add_done_callback(lambda ended: self._end(request.request_id, ended, listener))

        self._thread.call(start)

    def cancel(self, request_id: RequestId) -> None:
        """Close the request's connection, so that the server stops; its last event says `aborted`.

        No effect if the request has ended.
        """

        def stop() -> None:
            if task := self._tasks.get(request_id):
                task.cancel()

        self._thread.call_if_open(stop)

    def close(self) -> None:
        """Abort all requests and stop the thread. Idempotent."""
        self._thread.close(self.servers.close)

    def __enter__(self) -> "OpenAIEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _answer_in_time(self, request: SampleRequest, events: _Events, listener: Listener) -> TokenEvent:
        seconds = None if request.deadline is None else request.deadline - self._now()
        try:
            async with asyncio.timeout(seconds):
                return await self._answer(request.request_id, events, listener)
        except TimeoutError:
            raise deadline_error() from None

    async def _answer(self, request_id: RequestId, events: _Events, listener: Listener) -> TokenEvent:
        """Tell the listener of every piece of text; the last event is the result."""
        reason, usage, route = FinishReason.STOP, None, None
        async with contextlib.aclosing(events):
            async for progress in events:
                route = progress.route
                reason = progress.finish_reason or reason
                usage = progress.usage or usage
                if progress.text:
                    self._begun.add(request_id)
                    listener(TokenEvent(request_id, None, None, self._now(), text=progress.text, route=route))
        return TokenEvent(request_id, None, reason, self._now(), usage=usage, route=route)

    def _end(self, request_id: RequestId, task: "asyncio.Task[TokenEvent]", listener: Listener) -> None:
        """Send the last event of a request whose task has ended."""
        del self._tasks[request_id]
        self._begun.discard(request_id)
        try:
            listener(self._last_event(request_id, task))
        except Exception:  # such as a closed event loop
            logger.exception("the listener of %s failed", request_id)

    def _last_event(self, request_id: RequestId, task: "asyncio.Task[TokenEvent]") -> TokenEvent:
        error: Exception | None = None
        if task.cancelled():
            if self._thread.is_closed:
                error = EngineClosedError("the engine was closed before the answer was complete")
        elif (failure := task.exception()) is None:
            return task.result()
        elif isinstance(failure, StillroomError):
            error = failure
        else:
            logger.error("generating %s failed", request_id, exc_info=failure)
            error = EngineError(f"generation failed: {type(failure).__name__}; the log has the details")
        return TokenEvent(request_id, None, FinishReason.ABORTED, self._now(), error)

    def _now(self) -> float:
        return self._clock.monotonic()
