"""The engine's thread: submits requests from any thread or event loop, and bounds how many may wait.

Only the engine's thread touches the scheduler; other threads talk to it through a queue of commands. Every submitted
request gets exactly one last event: a finish, a cancellation or the engine's failure. Failures are caught as
`BaseException`, because panics of libraries written in Rust are no `Exception`.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, LookupCounts, Request
from stillroom.engine.backlog import Backlog
from stillroom.engine.corpora import CorpusView
from stillroom.engine.engine import Engine
from stillroom.engine.events import Listener, TokenEvent
from stillroom.engine.preparation import OnPrepared
from stillroom.errors import EngineClosedError, EngineError

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 1.0
"""Time between two calls of `before_step` while the engine is idle."""


class AsyncEngine:
    """A running engine. Close it, or use it as a context manager."""

    def __init__(self, engine: Engine, max_waiting: int = 0, before_step: Callable[[], object] | None = None) -> None:
        """
        Args:
            max_waiting: requests that may wait; 0 is no limit.
            before_step: called in the engine's thread before each step, and every second while the engine is idle.
        """
        self._engine = engine
        self._before_step = before_step
        self._backlog = Backlog(max_waiting)
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        engine.should_stop = lambda: not self._commands.empty()
        self._listeners: dict[RequestId, Listener] = {}
        self._closing = threading.Lock()  # orders every submit before, or after, the final None
        self._is_closed = False
        self.on_step: Callable[[Engine], object] | None = None
        """Called in the engine's thread before each step; must return quickly."""
        self.has_failed = False
        """Whether the thread ended with an error. Its record of what is on the device may be wrong then."""
        self._thread = threading.Thread(target=self._run, name="stillroom-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs: the engine was not closed and has not failed."""
        return not self._is_closed and self._thread.is_alive()

    @property
    def device_problem(self) -> str | None:
        """Why the device cannot be used now; None if it can."""
        return self._engine.device_problem

    @property
    def num_device_losses(self) -> int:
        return self._engine.num_device_losses

    @property
    def num_failed_steps(self) -> int:
        return self._engine.num_failed_steps

    @property
    def lookup_counts(self) -> LookupCounts:
        return self._engine.lookup_counts

    @property
    def num_blocks(self) -> int:
        return self._engine.scheduler.kv.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that are free, or that hold kept KV which no request uses."""
        return self._engine.scheduler.kv.num_free_blocks

    @property
    def has_work(self) -> bool:
        """Whether a step is running or follows, preparing ones included."""
        return self._engine.scheduler.has_work

    @property
    def num_waiting(self) -> int:
        return self._engine.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self._engine.scheduler.num_running

    @property
    def num_prefilling(self) -> int:
        return self._engine.scheduler.num_prefilling

    def submit(self, request: Request, listener: Listener, *samples: tuple[Request, Listener]) -> None:
        """Start a request with further samples of the same prompt; the events of each go to its listener.

        Raises:
            PromptTooLongError: the request can never run.
            UsageError: there are more samples than can run at the same time.
            QueueFullError: the queue is full, and the tenant has its share of it.
            EngineClosedError: the engine was closed.
            DeviceLostError: the device is lost and not yet recovered.
        """
        self._engine.check_device()
        self._engine.scheduler.check(request, 1 + len(samples))
        now = self._engine.clock.monotonic()

        def start() -> None:
            if not self._listeners:
                self._backlog.begin(now)
            listeners = {one.request_id: listen for one, listen in ((request, listener), *samples)}
            self._listeners.update(listeners)
            try:
                self._engine.submit(request, *(one for one, _ in samples))
            except EngineError as error:
                self._abort(listeners, error)
            except BaseException as error:  # such as no thread or no memory
                logger.exception("%s could not be started", request.request_id)
                self._abort(listeners, EngineError(f"the request could not be started: {error}"))
            finally:
                self._backlog.enter_scheduler(request.cache_salt)

        with self._closing:
            if self._is_closed:
                raise EngineClosedError("the engine is closed; open the knowledge base again")
            scheduler = self._engine.scheduler
            self._backlog.accept(request.cache_salt, self.num_waiting, lambda: scheduler.waiting_tenants, now)
            self._commands.put(start)

    def cancel(self, request_id: RequestId) -> None:
        """Abort a request before the next step; its last event says `aborted`. No effect if it has ended."""

        def stop() -> None:
            if request_id in self._listeners:
                self._abort([request_id])

        self._commands.put(stop)

    def prepare(self, request: Request, on_end: OnPrepared) -> None:
        """Compute a preparing prompt while the engine is idle, after those before it.

        Raises:
            EngineClosedError: the engine was closed.
        """
        with self._closing:
            if self._is_closed:
                raise EngineClosedError("the engine is closed; open the knowledge base again")
            self._commands.put(lambda: self._engine.prepare(request, on_end))

    def cancel_preparing(self, request_id: RequestId) -> None:
        """End a preparing prompt; what it has computed is kept. No effect if it has ended."""
        self._commands.put(lambda: self._engine.cancel_preparing(request_id))

    def run(self, command: Callable[[Engine], object]) -> None:
        """Run a command in the engine's thread between two steps; ignored if the engine is closed."""
        self._commands.put(lambda: command(self._engine))

    def documents_changed(self, salt: str, corpus: CorpusView) -> None:
        """Drop kept KV of removed documents, now and after later changes.

        Args:
            salt: cache salt of the tenant's requests.
            corpus: the tenant's documents.
        """
        self._engine.follow(salt, corpus)
        self.run(Engine.catch_up)

    def unfollow(self, salt: str) -> None:
        """Stop reading a tenant's corpus: it is not read after this call. If it was removed, its KV is dropped."""
        if self._engine.unfollow(salt):
            self.run(lambda engine: engine.forget(salt))

    def close(self) -> None:
        """Abort all requests and stop the thread. Idempotent."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._commands.put(None)
        self._thread.join()

    def __enter__(self) -> "AsyncEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        error: EngineError = EngineClosedError("the engine was closed before the answer was complete")
        try:
            self._serve()
        except BaseException:
            logger.critical("the engine has failed; it answers no more requests", exc_info=True)
            error = EngineError("the engine has failed, the log says why; start Stillroom again")
            with self._closing:
                self._is_closed = self.has_failed = True
            while not self._commands.empty():  # requests submitted before the failure have listeners too
                self._carry_out(self._commands.get())
        self._abort(list(self._listeners), error)
        self._engine.abandon_preparation(error)
        self._engine.catch_up()  # KV that is still to be stored must not include removed documents

    def _serve(self) -> None:
        while self._take_commands():
            self._carry_out(self._before_step)
            self._carry_out(None if self.on_step is None else partial(self.on_step, self._engine))
            try:
                events = self._engine.step()
            except BaseException as error:  # every listener must get a last event
                logger.exception("a step failed; its requests are aborted")
                for event in self._engine.take_events():
                    self._dispatch(event)
                failed = EngineError(f"generation failed: {error}")
                self._engine.abandon_audit()
                self._engine.abandon_preparation(failed)
                self._abort(list(self._listeners), failed)
                self._engine.check_integrity()  # an engine with wrong block accounting must not continue
                continue
            for event in events:
                self._dispatch(event)

    def _take_commands(self) -> bool:
        """Run the commands since the last step, waiting for one if there is no work; False to stop."""
        pause = self._engine.pause
        while True:
            try:
                is_idle = not self._engine.has_work
                may_wait = not self._do_idle_work() if is_idle else pause > 0
                command = self._next_command(may_wait, self._engine.retry_in if is_idle else pause)
            except queue.Empty:
                if is_idle:
                    continue
                return True
            if command is None:
                return False
            self._carry_out(command)
            pause = 0.0  # the command may have filled the batch

    def _next_command(self, may_wait: bool, seconds: float | None) -> Callable[[], object] | None:
        """Return the next command, calling `before_step` every second while it waits.

        Args:
            seconds: longest wait; None is no limit.

        Raises:
            queue.Empty: there is none.
        """
        while may_wait and self._before_step is not None and (seconds is None or seconds > _IDLE_SECONDS):
            with suppress(queue.Empty):
                return self._commands.get(True, _IDLE_SECONDS)
            self._carry_out(self._before_step)
            seconds = None if seconds is None else seconds - _IDLE_SECONDS
        return self._commands.get(may_wait, seconds)

    def _carry_out(self, command: Callable[[], object] | None) -> None:
        if command is None:
            return
        try:
            command()
        except BaseException:  # a command has no listener, and other requests must still be answered
            logger.exception("a command failed")

    def _do_idle_work(self) -> bool:
        """Do one piece of background work, unless a command waits; returns whether there may be more."""
        if not self._commands.empty():
            return True
        try:
            return self._engine.do_idle_work()
        except BaseException:  # the next request must still be answered
            logger.exception("background work failed")
            return False

    def _dispatch(self, event: TokenEvent) -> None:
        is_last = event.finish_reason is not None
        if is_last:
            self._backlog.end(event.at)
        listeners = self._listeners
        # a request that could not be cancelled may send events after its last one
        listener = listeners.pop(event.request_id, _ignore) if is_last else listeners.get(event.request_id, _ignore)
        try:
            listener(event)
        except Exception:  # a broken listener (such as a closed event loop) must not stop the others
            logger.exception("the listener of %s failed", event.request_id)
            if not is_last:
                listeners.pop(event.request_id)
                listeners[event.request_id] = _ignore
                self.cancel(event.request_id)

    def _abort(self, request_ids: Iterable[RequestId], error: EngineError | None = None) -> None:
        now = self._engine.clock.monotonic()
        for request_id in request_ids:
            try:
                self._engine.cancel(request_id)
            except BaseException:  # its listener still gets a last event
                logger.exception("%s could not be cancelled", request_id)
            self._dispatch(TokenEvent(request_id, None, FinishReason.ABORTED, now, error))


def _ignore(event: TokenEvent) -> None:
    """Listener of a request whose own listener failed or got its last event."""
