"""The engine in a thread of its own, so that any thread or event loop can submit and listen.

All state of the scheduler is touched by that one thread only; others talk to it through a queue of commands. Every
submitted request gets exactly one last event, whatever happens: a finish, a cancellation or the engine's own failure.
Failures are caught as `BaseException`: libraries written in Rust panic with one that is no `Exception`.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable

from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, Request
from stillroom.engine.backlog import Backlog
from stillroom.engine.corpora import CorpusView
from stillroom.engine.engine import Engine
from stillroom.engine.events import Listener, TokenEvent
from stillroom.errors import EngineClosedError, EngineError

logger = logging.getLogger(__name__)


class AsyncEngine:
    """A running engine. Close it, or use it as a context manager."""

    def __init__(self, engine: Engine, max_waiting: int = 0) -> None:
        """
        Args:
            max_waiting: requests that may wait; 0 is no limit.
        """
        self._engine = engine
        self._backlog = Backlog(max_waiting)
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._listeners: dict[RequestId, Listener] = {}
        self._closing = threading.Lock()  # orders every submit before, or after, the final None
        self._is_closed = False
        self.has_failed = False
        """Whether its thread has ended by an error. What it says is on the device may be something else."""
        self._thread = threading.Thread(target=self._run, name="stillroom-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs: it was not closed, and has not failed."""
        return not self._is_closed and self._thread.is_alive()

    @property
    def device_problem(self) -> str | None:
        """Why it takes no requests for now; None if its device can be used."""
        return self._engine.device_problem

    @property
    def num_device_losses(self) -> int:
        return self._engine.num_device_losses

    @property
    def num_failed_steps(self) -> int:
        return self._engine.num_failed_steps

    @property
    def num_blocks(self) -> int:
        return self._engine.scheduler.kv.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Those that can be had: free, or kept and in nobody's use."""
        return self._engine.scheduler.kv.num_free_blocks

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
        """Start a request, with further samples of the same prompt; the events of each go to its listener.

        Raises:
            PromptTooLongError: it can never run.
            UsageError: there are more samples than can run at the same time.
            QueueFullError: as many requests wait as may, and its tenant has its share of them.
            EngineClosedError: the engine was closed.
            DeviceLostError: the device is lost, and could not be recovered yet.
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
            except BaseException as error:  # no thread for it, say, or no memory
                logger.exception("%s could not be started", request.request_id)
                self._abort(listeners, EngineError(f"the request could not be started: {error}"))
            finally:
                self._backlog.hand_over(request.cache_salt)

        with self._closing:
            if self._is_closed:
                raise EngineClosedError("the engine is closed; open the knowledge base again")
            scheduler = self._engine.scheduler
            self._backlog.accept(request.cache_salt, self.num_waiting, lambda: scheduler.waiting_tenants, now)
            self._commands.put(start)

    def cancel(self, request_id: RequestId) -> None:
        """Stop a request at the next step; its last event says `aborted`. Harmless if it has ended."""

        def stop() -> None:
            if request_id in self._listeners:
                self._abort([request_id])

        self._commands.put(stop)

    def run(self, command: Callable[[Engine], object]) -> None:
        """Do something with the engine between two steps; nothing if it is closed."""
        self._commands.put(lambda: command(self._engine))

    def documents_changed(self, salt: str, corpus: CorpusView) -> None:
        """The documents of this salt's requests are these, and may have changed: nothing is kept of what is gone."""
        self._engine.follow(salt, corpus)
        self.run(Engine.catch_up)

    def leave(self, salt: str) -> None:
        """Do not ask these documents any more, as from this method's return. If they are gone, nothing of them is
        kept."""
        if self._engine.leave(salt):
            self.run(lambda engine: engine.forget(salt))

    def close(self) -> None:
        """Abort what runs and stop the thread. Idempotent."""
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
            logger.critical("the engine has failed; it answers nothing more", exc_info=True)
            error = EngineError("the engine has failed, the log says why; start Stillroom again")
            with self._closing:
                self._is_closed = self.has_failed = True
            while not self._commands.empty():  # whoever came before has a listener too
                self._carry_out(self._commands.get())
        self._abort(list(self._listeners), error)
        self._engine.catch_up()  # what is still to be stored must not hold what is gone

    def _serve(self) -> None:
        while self._take_commands():
            try:
                events = self._engine.step()
            except BaseException as error:  # a failed step must not strand those who wait for its tokens
                logger.exception("a step failed; its requests are aborted")
                for event in self._engine.take_events():
                    self._dispatch(event)
                self._engine.give_up_audit()
                self._abort(list(self._listeners), EngineError(f"generation failed: {error}"))
                self._engine.check_integrity()  # an engine that does not know who has which block must not go on
                continue
            for event in events:
                self._dispatch(event)

    def _take_commands(self) -> bool:
        """Carry out what was asked since the last step, waiting for something if there is nothing to do yet; False to
        stop."""
        pause = self._engine.pause
        while True:
            try:
                is_idle = not self._engine.has_work
                may_wait = not self._tend() if is_idle else pause > 0
                command = self._commands.get(may_wait, self._engine.retry_in if is_idle else pause)
            except queue.Empty:
                if is_idle:
                    continue
                return True
            if command is None:
                return False
            self._carry_out(command)
            pause = 0.0  # what came may be what was waited for

    def _carry_out(self, command: Callable[[], object] | None) -> None:
        if command is None:
            return
        try:
            command()
        except BaseException:  # it has no listener, and others must still be answered
            logger.exception("a command failed")

    def _tend(self) -> bool:
        """One piece of work that nobody waits for, if nobody waits for anything else."""
        if not self._commands.empty():
            return True
        try:
            return self._engine.tend()
        except BaseException:  # the next request must still be answered
            logger.exception("work in an idle moment failed")
            return False

    def _dispatch(self, event: TokenEvent) -> None:
        is_last = event.finish_reason is not None
        if is_last:
            self._backlog.end(event.at)
        listeners = self._listeners
        # one that could not be cancelled may go on, and has been told that it ended
        listener = listeners.pop(event.request_id, _ignore) if is_last else listeners.get(event.request_id, _ignore)
        try:
            listener(event)
        except Exception:  # one broken listener (a closed event loop, say) must not stop the others
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
            except BaseException:  # its listener is told all the same
                logger.exception("%s could not be cancelled", request_id)
            self._dispatch(TokenEvent(request_id, None, FinishReason.ABORTED, now, error))


def _ignore(event: TokenEvent) -> None:
    """Stands in for a listener that failed or has heard its last, until its request has ended."""
