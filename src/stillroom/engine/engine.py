"""The step loop: scheduler decides, runner computes, events come out. Synchronous and single-threaded.

`async_engine` runs it in a thread of its own; tests run it by hand.
"""

import logging
from dataclasses import replace

from stillroom.core.clock import Clock
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, Request
from stillroom.engine.audit import Audit
from stillroom.engine.corpora import Corpora, Corpus, Existing
from stillroom.engine.deadlines import Deadlines
from stillroom.engine.events import TokenEvent
from stillroom.errors import DeviceLostError
from stillroom.runner.torch_runner import Runner
from stillroom.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_CATCH_UP_SECONDS = 1.0
"""At most so often it is noticed, while requests come, that other processes have removed documents."""


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
        self._deadlines = Deadlines(timeout_seconds)
        self._corpora = Corpora()
        self._caught_up_at = float("-inf")

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def pause(self) -> float:
        """Seconds in which a step would do nothing, unless something comes: requests wait for company."""
        until = self.scheduler.holds_until
        return 0.0 if until is None else max(0.0, min(until, self._deadlines.next_at) - self.clock.monotonic())

    def submit(self, request: Request, *samples: Request) -> None:
        """Queue a request, with further samples of the same prompt, which then is computed once.

        Raises:
            PromptTooLongError: it can never run.
            UsageError: there are more samples than can run at the same time.
        """
        now = self.clock.monotonic()
        if now - self._caught_up_at >= _CATCH_UP_SECONDS:
            self.catch_up()
        self._add(request, *samples, now=now)
        if self.audit is not None:
            self._interrupt_audit()
            for one in (request, *samples):
                self.audit.submitted(one)
        for one in (request, *samples):
            self._deadlines.begin(one, now)

    def cancel(self, request_id: RequestId) -> TokenEvent | None:
        """Forget a request; its blocks are free from now on. None if it had ended already, maybe in a step that failed
        afterwards, so that nobody heard of it."""
        event = TokenEvent(request_id, None, FinishReason.ABORTED, self.clock.monotonic())
        self._deadlines.end(request_id)
        if self.audit is not None:
            self.audit.hear(event)
        return event if self.scheduler.abort(request_id) else None

    def step(self) -> list[TokenEvent]:
        """Run one step; nothing if there is nothing to run.

        If the device's memory is lost in it (RAGCache 6), everybody starts again from what is kept elsewhere.
        """
        expired = self._expire()
        batch = self.scheduler.schedule(self.clock.monotonic())
        if batch is None:
            return expired
        began = self.clock.monotonic()
        try:
            result = self.runner.execute(batch)
        except DeviceLostError:
            logger.warning("the device's memory is lost; requests go on from what is kept on host and disk")
            self.scheduler.lose_device()
            self.runner.recover()  # last: nobody may take what is gone for KV
            return expired
        now = self.clock.monotonic()
        events = [
            TokenEvent(
                update.request_id,
                update.token_id,
                update.finish_reason,
                now,
                update.error,
                logprobs=update.logprobs,
                reuse=update.reuse,
                admission=update.admission,
            )
            for update in self.scheduler.update(batch, result, began)
        ]
        for event in events:
            if event.finish_reason is not None:
                self._deadlines.end(event.request_id)
        if self.audit is not None:
            events = [event for event in events if not self.audit.hear(event)]
        return expired + events

    def tend(self) -> bool:
        """Something useful in an idle moment; False if there is nothing left to do."""
        self.catch_up()
        if self.scheduler.kv.tend():
            return True
        shadow = None if self.audit is None else self.audit.next()
        if shadow is not None:
            self._add(shadow, now=0.0)
        return shadow is not None

    def follow(self, salt: str, corpus: Corpus) -> None:
        """The requests of this salt are about these documents, which may have changed: of chunks that are gone nothing
        is kept from the next `catch_up` on. From any thread."""
        self._corpora.follow(salt, corpus)

    def leave(self, salt: str) -> None:
        """Do not ask these documents any more, as from this method's return. From any thread."""
        self._corpora.leave(salt)

    def catch_up(self) -> None:
        """Forget the chunks that are gone."""
        self._caught_up_at = self.clock.monotonic()
        self._corpora.catch_up(self._forget_chunks, self._forget_all)

    def give_up_audit(self) -> None:
        """A step failed, and whoever listens is told; nobody listens to an audit."""
        running = None if self.audit is None else self.audit.give_up()
        if running is not None:
            self.scheduler.abort(running)

    def check_integrity(self) -> None:
        """Every block is accounted for; see `Scheduler.check_integrity`."""
        self.scheduler.check_integrity()

    def _add(self, request: Request, *samples: Request, now: float) -> None:
        """Queue. Documents may have been removed: some since they were found for the prompt, others that only kept KV
        has seen."""
        self.scheduler.add(request, *samples, now=now)
        chunk_ids = {segment.chunk_id for segment in request.prompt.segments if segment.chunk_id is not None}
        if not self._corpora.check(request.cache_salt, chunk_ids):
            self.catch_up()

    def _forget_chunks(self, existing: Existing, salt: str) -> None:
        self.scheduler.forget_chunks(existing, salt)
        self._forget_audits(existing, salt)

    def _forget_all(self, salt: str) -> None:
        self.scheduler.forget_owner(salt)
        self._forget_audits(lambda _: set(), salt)

    def _forget_audits(self, existing: Existing, salt: str) -> None:
        running = None if self.audit is None else self.audit.forget_chunks(existing, salt)
        if running is not None:
            self.scheduler.abort(running)

    def _interrupt_audit(self) -> None:
        """Audits are for idle moments."""
        running = None if self.audit is None else self.audit.interrupt()
        if running is not None:
            self.scheduler.abort(running)

    def _expire(self) -> list[TokenEvent]:
        """Requests that took too long are started again or given up, waiting or running."""
        events = []
        for request_id, error in self._deadlines.take_late(self.clock.monotonic()):
            if error is None:
                self.scheduler.restart(request_id)
                continue
            event = self.cancel(request_id)
            if event is not None:
                events.append(replace(event, error=error))
        return events
