"""Engine whose requests run on the engines of a cluster; the same interface as `async_engine`.

A thread with its own event loop watches the engines and has a task for each request: it chooses an engine, passes the
stream on, and goes on with another engine if the stream breaks (`Forwarding`). Every submitted request gets exactly one
last event. docs/cluster.md
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stillroom.cluster.directory import EngineDirectory
from stillroom.cluster.front_engine import EngineCounts, Sent
from stillroom.cluster.front_engines import Expected, FrontEngines, Totals, engine_name
from stillroom.cluster.wire import AnswerRequest
from stillroom.cluster.wire_state import EngineInfo, EngineState
from stillroom.core.clock import Clock
from stillroom.core.ids import RequestId
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import SampleRequest
from stillroom.engine.cluster_client import ClusterClient, EngineBusyError, EngineLostError, EngineUnreachedError
from stillroom.engine.deadlines import deadline_error
from stillroom.engine.engine_watch import EngineWatch
from stillroom.engine.events import Listener, Route, TokenEvent
from stillroom.engine.forwarding import Forwarding
from stillroom.engine.loop_thread import LoopThread
from stillroom.errors import (
    EngineClosedError,
    EngineError,
    EngineUnavailableError,
    QueueFullError,
    StillroomError,
    WireError,
)

logger = logging.getLogger(__name__)

MAX_START_SECONDS = 300.0
"""Longest wait of a request for an engine that is starting, if that is longer than `engine.wait_s`."""
_CHECK_SECONDS = 1.0
"""Between two looks at whether engines are starting."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long and how often a request is tried."""

    max_migrations: int
    wait_s: float
    """Longest wait for an engine that takes a request."""


@dataclass(slots=True)
class _Request:
    """A request under way."""

    prompt: SegmentedPrompt
    forwarding: Forwarding
    listeners: dict[RequestId, Listener]
    salt: str
    tenant: str | None
    grammar: str | None
    only_own_chunks: bool
    has_begun: bool = False
    """Whether an engine has sent something."""
    fingerprint: bytes | None = None
    """Of the model that generates the answer."""
    waits_since: float | None = None
    """Since when no engine takes it."""
    refusal: EngineError | None = None
    """Of the last engine that did not take it."""
    task: "asyncio.Task[None] | None" = None


class ClusterEngine:
    """A front's engines. Close it, or use it as a context manager."""

    def __init__(
        self,
        client: ClusterClient,
        directory: EngineDirectory,
        expected: Expected,
        patience: Patience,
        clock: Clock,
    ) -> None:
        self._client = client
        self._clock = clock
        self._patience = patience
        self._engines = FrontEngines(expected)
        self._watch = EngineWatch(self._engines, client, directory, clock)
        self._requests: dict[RequestId, _Request] = {}
        """By the ids of their samples, until these have ended."""
        self._num_moved = self._num_unbegun = 0
        self.num_starting: Callable[[], int] = lambda: 0
        """Returns how many engines this process is starting (`serve --replicas`); requests wait for them."""
        self._thread = LoopThread("stillroom-cluster")
        self._watching = self._thread.start(self._watch.run)

    # For any thread

    @property
    def is_alive(self) -> bool:
        return not self._thread.is_closed

    @property
    def problem(self) -> str | None:
        """Why no request can be answered now, in words for callers; None if an engine may take one."""
        if self._engines.num_alive:
            return None
        num_starting = self.num_starting()
        return "no engine takes requests now" + (f"; {num_starting} are starting" if num_starting else "")

    @property
    def infos(self) -> tuple[EngineInfo, ...]:
        """Of the engines that fit this front, or did last; not empty after `wait_until_ready`."""
        return self._watch.infos

    @property
    def totals(self) -> Totals:
        return self._engines.totals

    @property
    def counts(self) -> dict[str, EngineCounts]:
        return self._engines.counts

    @property
    def states(self) -> dict[str, EngineState]:
        """The last report of each engine that may get requests, by address."""
        return self._engines.states

    @property
    def alive(self) -> dict[str, bool]:
        """Whether each engine may get requests, by address."""
        problems = self._engines.problems
        return {address: address not in problems for address in self._engines.addresses}

    @property
    def num_moved(self) -> int:
        """Requests that were sent to another engine because a stream broke."""
        return self._num_moved

    @property
    def num_unbegun(self) -> int:
        """Own requests without a token."""
        return self._num_unbegun

    def wait_until_ready(self) -> None:
        """Wait for an engine that takes requests. Raises as `EngineWatch.ready`."""
        self._thread.start(lambda: self._watch.ready(self._patience.wait_s)).result()

    def submit(
        self,
        prompt: SegmentedPrompt,
        samples: Sequence[SampleRequest],
        listeners: Sequence[Listener],
        *,
        salt: str = "",
        tenant: str | None = None,
        grammar: str | None = None,
    ) -> None:
        """Start the samples of a prompt; the events of each go to its listener.

        Args:
            salt: of the tenant's KV.
            tenant: name; None: the default tenant.
            grammar: of the answers (`JsonConstraint.grammar`).

        Raises:
            EngineClosedError: the engine was closed.
        """

        def start() -> None:
            request = _Request(
                prompt=prompt,
                forwarding=Forwarding(samples, self._patience.max_migrations),
                listeners={one.request_id: listener for one, listener in zip(samples, listeners, strict=True)},
                salt=salt,
                tenant=tenant,
                grammar=grammar,
                only_own_chunks=any(one.may_see is not None for one in samples),
            )
            self._requests.update(dict.fromkeys(request.listeners, request))
            self._num_unbegun += 1
            request.task = self._thread.loop.create_task(self._answer_in_time(request, samples[0].deadline))
            request.task.add_done_callback(lambda task: self._end(request, task))

        self._thread.call(start)

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a sample; its last event says `aborted`. With the last sample of a request its stream is closed, so
        that the engine stops. No effect if the sample has ended."""

        self._thread.call_if_open(lambda: self._cancel(request_id))

    def close(self) -> None:
        """Abort all requests and stop the thread. Idempotent."""
        self._thread.close(self._client.close)

    def __enter__(self) -> "ClusterEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # In the loop's thread

    async def _answer_in_time(self, request: _Request, deadline: float | None) -> None:
        try:
            async with asyncio.timeout(None if deadline is None else deadline - self._now()):
                while not request.forwarding.is_ended:
                    await self._try(request, await self._choose(request))
        except TimeoutError:
            raise deadline_error() from None

    async def _choose(self, request: _Request) -> Sent:
        """Return the engine that gets a request, as soon as one takes requests.

        Raises:
            EngineError: none does.
        """
        begun = self._now() if request.waits_since is None else request.waits_since
        if request.refusal is not None and self._now() > self._waits_until(begun):
            raise request.refusal
        while True:
            try:
                sent = self._engines.send(request.prompt, request.salt, self._now())
            except EngineUnavailableError as error:
                request.waits_since = begun
                # without a token the caller can do better than wait: ask again when a full queue is shorter
                is_full = isinstance(request.refusal, QueueFullError) and not request.forwarding.has_begun
                if is_full or not await self._has_news(begun):
                    raise request.refusal or self._with_starts(error, begun) from None
            else:
                if request.forwarding.has_begun and sent.fingerprint != request.fingerprint:
                    self._engines.on_end(sent, self._now())
                    raise EngineUnavailableError("the engines' model changed while the answer was generated; ask again")
                request.fingerprint = sent.fingerprint
                return sent

    def _waits_until(self, begun: float) -> float:
        wait_s = self._patience.wait_s
        return begun + (max(wait_s, MAX_START_SECONDS) if self.num_starting() else wait_s)

    async def _has_news(self, begun: float) -> bool:
        """Wait for news of an engine; False if a request that waits since then has waited long enough."""
        while not await self._watch.changed(min(self._waits_until(begun), self._now() + _CHECK_SECONDS)):
            if self._now() >= self._waits_until(begun):
                return False
        return True

    def _with_starts(self, error: EngineUnavailableError, begun: float) -> EngineUnavailableError:
        """Return an error that says how long a request has waited, and for what."""
        num_starting = self.num_starting()
        waited = f"the request has waited {self._now() - begun:.0f} s (engine.wait_s is {self._patience.wait_s:g} s)"
        starts = f"; {num_starting} engines of this server are starting" if num_starting else ""
        return EngineUnavailableError(f"{error}; {waited}{starts}")

    async def _try(self, request: _Request, sent: Sent) -> None:
        """Let an engine generate the answer, to its end or until its stream breaks."""
        try:
            await self._stream(request, sent)
        except EngineBusyError as busy:
            self._engines.on_refused(sent, str(busy), is_lost=False)
            request.refusal, request.waits_since = busy.error, request.waits_since or self._now()
        except _BrokenError as broken:
            logger.warning("the engine at %s did not complete a request: %s", sent.engine, broken.error)
            self._engines.on_broken(sent, str(broken.error))
            if (error := request.forwarding.break_off(broken.error)) is not None:
                raise error from None
            self._num_moved += 1
        except EngineUnreachedError as error:
            logger.warning("the engine at %s did not take a request: %s", sent.engine, error)
            self._engines.on_refused(sent, str(error), is_lost=True)
            request.refusal, request.waits_since = error, request.waits_since or self._now()
        finally:
            self._engines.on_end(sent, self._now())

    async def _stream(self, request: _Request, sent: Sent) -> None:
        """Pass on the stream of an engine.

        Raises:
            EngineBusyError, EngineUnreachedError: the engine took nothing of the request.
            _BrokenError: it may have taken the request, and did not complete it.
        """
        forwarding = request.forwarding
        route = Route(engine_name(sent.engine), sent.predicted_seconds, sent.num_expected_tokens)
        body = AnswerRequest(
            segments=request.prompt.segments,
            samples=forwarding.begin(route, self._now()),
            tenant=request.tenant,
            salt=request.salt,
            grammar=request.grammar,
            only_own_chunks=request.only_own_chunks,
            may_place=not forwarding.has_placed,
        )
        has_begun = False
        try:
            async with contextlib.aclosing(self._client.answers(sent.engine, body)) as lines:
                async for events in lines:
                    if not has_begun:
                        has_begun, request.refusal, request.waits_since = True, None, None
                        self._note_begun(request)
                        reuse = next((one.first.reuse for one in events if one.first is not None), None)
                        self._engines.on_first_token(sent, self._now(), reuse)
                    self._deliver(request, forwarding.take(events, self._now()))
                    if forwarding.is_ended:
                        return
                    if forwarding.moves_because is not None:
                        raise _BrokenError(forwarding.moves_because)
        except (EngineLostError, WireError) as error:
            raise _BrokenError(error) from error
        raise _BrokenError(EngineUnavailableError("the engine closed the stream before the end of the answer"))

    def _cancel(self, request_id: RequestId) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        self._deliver(request, request.forwarding.cancel(request_id, self._now()))
        if request.forwarding.is_ended and request.task is not None:
            request.task.cancel()

    def _note_begun(self, request: _Request) -> None:
        self._num_unbegun -= not request.has_begun
        request.has_begun = True

    def _deliver(self, request: _Request, events: Iterable[TokenEvent]) -> None:
        for event in events:
            is_last = event.finish_reason is not None
            if is_last:
                self._requests.pop(event.request_id, None)
            try:
                request.listeners[event.request_id](event)
            except Exception:  # such as a closed event loop; the other samples go on
                logger.exception("the listener of %s failed", event.request_id)
                if not is_last:
                    request.listeners[event.request_id] = _ignore
                    self._thread.loop.call_soon(self._cancel, event.request_id)

    def _end(self, request: _Request, task: "asyncio.Task[None]") -> None:
        """Send the last events of a request whose task has ended, to the samples that have none."""
        error: Exception | None = None
        if task.cancelled():
            if self._thread.is_closed:
                error = EngineClosedError("the engine was closed before the answer was complete")
        elif (failure := task.exception()) is not None:
            if isinstance(failure, StillroomError):
                error = failure
            else:
                logger.error("generating an answer failed", exc_info=failure)
                error = EngineError(f"generation failed: {type(failure).__name__}; the log has the details")
        self._deliver(request, request.forwarding.end(self._now(), error))
        self._note_begun(request)

    def _now(self) -> float:
        return self._clock.monotonic()


def _ignore(event: TokenEvent) -> None:
    """Listener of a sample whose own listener failed."""


class _BrokenError(Exception):
    """An engine took a request and did not complete it. Raised and caught in this module only."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
