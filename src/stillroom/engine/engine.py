"""The step loop: scheduler decides, runner computes, events come out. Synchronous and single-threaded.

`async_engine` runs it in a thread of its own; tests run it by hand.
"""

import logging
from dataclasses import dataclass

from stillroom.core.clock import Clock
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, Request
from stillroom.engine.audit import Audit
from stillroom.engine.events import TokenEvent
from stillroom.errors import DeviceLostError, RequestTimeoutError
from stillroom.runner.torch_runner import Runner
from stillroom.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Deadline:
    at: float
    is_last: bool = False


class Engine:
    """Requests in, token events out, one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        timeout_seconds: float = 0.0,
        audit: Audit | None = None,
    ) -> None:
        """
        Args:
            timeout_seconds: how long a request may take before it is started again, and again before it is given up;
                0 is no limit.
            audit: of answers from placed KV; None: nobody looks.
        """
        self.audit = audit
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self._timeout = timeout_seconds
        self._deadlines: dict[RequestId, _Deadline] = {}  # those of the first start first

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, request: Request, *samples: Request) -> None:
        """Queue a request, with further samples of the same prompt, which then is computed once.

        Raises:
            PromptTooLongError: it can never run.
            UsageError: there are more samples than can run at the same time.
        """
        self.scheduler.add(request, *samples)
        if self.audit is not None:
            self._interrupt_audit()
            for one in (request, *samples):
                self.audit.submitted(one)
        if self._timeout:
            deadline = self.clock.monotonic() + self._timeout
            self._deadlines |= {one.request_id: _Deadline(deadline) for one in (request, *samples)}

    def cancel(self, request_id: RequestId) -> TokenEvent | None:
        """Forget a request; its blocks are free from now on. None if it had ended already."""
        if not self.scheduler.abort(request_id):
            return None
        self._deadlines.pop(request_id, None)
        event = TokenEvent(request_id, None, FinishReason.ABORTED, self.clock.monotonic())
        if self.audit is not None:
            self.audit.hear(event)
        return event

    def step(self) -> list[TokenEvent]:
        """Run one step; nothing if there is nothing to run.

        If the device's memory is lost in it (RAGCache 6), everybody starts again from what is kept elsewhere.
        """
        expired = self._expire()
        batch = self.scheduler.schedule()
        if batch is None:
            return expired
        try:
            result = self.runner.execute(batch)
        except DeviceLostError:
            logger.warning("the device's memory is lost; requests go on from what is kept on host and disk")
            self.runner.recover()
            self.scheduler.lose_device()
            return expired
        now = self.clock.monotonic()
        events = [
            TokenEvent(
                update.request_id,
                update.token_id,
                update.finish_reason,
                now,
                logprobs=update.logprobs,
                reuse=update.reuse,
            )
            for update in self.scheduler.update(batch, result)
        ]
        for event in events:
            if event.finish_reason is not None:
                self._deadlines.pop(event.request_id, None)
        if self.audit is not None:
            events = [event for event in events if not self.audit.hear(event)]
        return expired + events

    def tend(self) -> bool:
        """Something useful in an idle moment; False if there is nothing left to do."""
        if self.scheduler.kv.tend():
            return True
        shadow = None if self.audit is None else self.audit.next()
        if shadow is not None:
            self.scheduler.add(shadow)
        return shadow is not None

    def give_up_audit(self) -> None:
        """A step failed, and whoever listens is told; nobody listens to an audit."""
        running = None if self.audit is None else self.audit.give_up()
        if running is not None:
            self.scheduler.abort(running)

    def check_integrity(self) -> None:
        """Every block is accounted for; see `Scheduler.check_integrity`."""
        self.scheduler.check_integrity()

    def _interrupt_audit(self) -> None:
        """Audits are for idle moments."""
        running = None if self.audit is None else self.audit.interrupt()
        if running is not None:
            self.scheduler.abort(running)

    def _expire(self) -> list[TokenEvent]:
        """Requests that took too long: started again the first time (RAGCache 6), given up the second."""
        now = self.clock.monotonic()
        late = [request_id for request_id, deadline in self._deadlines.items() if deadline.at <= now]
        events = []
        for request_id in late:
            deadline = self._deadlines[request_id]
            if not deadline.is_last:
                self._deadlines[request_id] = _Deadline(now + self._timeout, is_last=True)
                self.scheduler.restart(request_id)
                continue
            event = self.cancel(request_id)
            assert event is not None
            error = RequestTimeoutError(
                f"the request took longer than {self._timeout:g} s, twice; "
                "ask for less (top_k, max_tokens) or raise runtime.request_timeout_s"
            )
            events.append(TokenEvent(request_id, None, event.finish_reason, event.at, error))
        return events
