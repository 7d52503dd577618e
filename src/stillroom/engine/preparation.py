"""Runs preparing prompts (`Request.prepares`) while the engine is idle; a question interrupts them.

An interrupted prompt goes on when the engine is idle: the chunks that it has completed are kept, and it begins behind
them as long as they stay on the device.
"""

import logging
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, Request
from stillroom.engine.events import TokenEvent
from stillroom.errors import EngineError

logger = logging.getLogger(__name__)


class OnPrepared(Protocol):
    """Called once, in the engine's thread, when all that a prompt prepares is kept, or with the reason why not."""

    def __call__(self, error: Exception | None, *, is_computed: bool) -> None:
        """
        Args:
            is_computed: False if everything was kept already.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Task:
    request: Request
    on_end: OnPrepared


class PreparingQueue:
    """The preparing prompts of one engine, one after the other. Only the engine's thread calls it."""

    def __init__(self, idle_seconds: float) -> None:
        """
        Args:
            idle_seconds: the engine must have been idle for this long before a prompt begins.
        """
        self._idle_seconds = idle_seconds
        self.busy_until = float("-inf")
        """When the last question came or ended, in seconds on the engine's clock."""
        self._tasks: deque[_Task] = deque()
        self._is_running = False
        self.is_computed = False
        """Whether the first prompt is computed, and ends as soon as its KV is stored."""

    @property
    def begins_at(self) -> float | None:
        """When the next prompt may begin, in seconds on the engine's clock; None if none waits."""
        if not self._tasks or self._is_running:
            return None
        return float("-inf") if self.is_computed else self.busy_until + self._idle_seconds

    @property
    def running_id(self) -> RequestId | None:
        """The preparing prompt that runs; None if none does."""
        return self._tasks[0].request.request_id if self._is_running else None

    def offer(self, request: Request, on_end: OnPrepared) -> None:
        """Queue a prompt."""
        assert request.prepares
        self._tasks.append(_Task(request, on_end))

    def next(self, now: float) -> Request | None:
        """Return the prompt to run now; None if there is none, one runs already, or the engine was busy just now."""
        begins_at = self.begins_at
        if begins_at is None or now < begins_at or self.is_computed:
            return None
        self._is_running = True
        return self._tasks[0].request

    def interrupt(self) -> RequestId | None:
        """Let the running prompt wait again; return the request to abort, None if no prompt runs."""
        if not self._is_running:
            return None
        self._is_running = False
        return self._tasks[0].request.request_id

    def end(self, error: Exception | None = None, *, is_computed: bool = True) -> None:
        """End the first prompt, with an error or because all of it is kept."""
        self._is_running = self.is_computed = False
        self._report(self._tasks.popleft(), error, is_computed=is_computed)

    def cancel(self, request_id: RequestId, error: Exception) -> bool:
        """End a prompt with an error, if it is known; return whether it ran, and so must be aborted."""
        task = next((one for one in self._tasks if one.request.request_id == request_id), None)
        if task is None:
            return False
        is_first = task is self._tasks[0]
        was_running = self._is_running and is_first
        if is_first:
            self._is_running = self.is_computed = False
        self._tasks.remove(task)
        self._report(task, error)
        return was_running

    def abandon(self, error: Exception) -> RequestId | None:
        """End all prompts with an error; return the request to abort, None if no prompt runs."""
        running = self.interrupt()
        while self._tasks:
            self.end(error)
        return running

    def observe(self, event: TokenEvent) -> bool:
        """Record an event; True if it belongs to a preparing prompt and so has no listener."""
        if not self._tasks or event.request_id != self._tasks[0].request.request_id:
            return False
        if self._is_running and event.finish_reason is not None:
            self._is_running = False
            if event.error is not None or event.finish_reason is FinishReason.ABORTED:
                self.end(event.error or EngineError("preparing was aborted"))
            else:
                self.is_computed = True
        return True

    def _report(self, task: _Task, error: Exception | None, *, is_computed: bool = True) -> None:
        try:
            task.on_end(error, is_computed=is_computed)
        except Exception:  # the thread that waits for it is gone
            logger.exception("the end of a preparing prompt could not be reported")
