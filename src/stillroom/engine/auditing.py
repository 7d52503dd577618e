"""Runs the audits of an engine between its requests. If the audit itself fails, auditing stops and answers go on."""

import logging
from collections.abc import Callable
from dataclasses import replace

from stillroom.core.ids import RequestId
from stillroom.core.request import Request
from stillroom.engine.audit import Audit
from stillroom.engine.corpora import Corpora, Existing
from stillroom.engine.events import TokenEvent
from stillroom.errors import PromptTooLongError
from stillroom.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Auditing:
    """The audits of one engine, if it has any. Only the engine's thread calls it."""

    def __init__(self, audit: Audit | None, scheduler: Scheduler, corpora: Corpora) -> None:
        self.audit = audit
        self._scheduler = scheduler
        self._corpora = corpora
        self._stays_suspended = False

    @property
    def stoppable_id(self) -> RequestId | None:
        """As `Audit.stoppable_id`."""
        return None if self.audit is None else self.audit.stoppable_id

    def restricted(self, request: Request) -> Request:
        """Return a request as it may run now: without placing while that is suspended."""
        is_suspended = self._stays_suspended if self.audit is None else self.audit.is_suspended
        return replace(request, may_place=False) if is_suspended else request

    def on_submit(self, *requests: Request) -> None:
        """Follow submitted requests, given without restrictions, and let the running audit wait for them.

        Requests that another engine began are not audited: nothing is placed for them.
        """
        if self.audit is not None:
            self._abort(self.audit.interrupt())
            for request in requests:
                if not request.generated:
                    self.audit.on_submit(request)

    def begin(self, add: Callable[[Request], None]) -> bool:
        """Begin the next run of an audit; returns whether there was one.

        Args:
            add: queues a request. Raises PromptTooLongError if it can never run.
        """
        if self.audit is None:
            return False
        try:
            shadow = self.audit.next(self._corpora.chunks)
        except Exception:
            self._stop()
            return False
        if shadow is None:
            return False
        try:
            add(shadow)
        except PromptTooLongError:  # an answer's documents may be longer than its prompt
            self.audit.refuse()
        return True

    def observe(self, event: TokenEvent) -> bool:
        """Record an event; returns whether it belongs to an audit."""
        if self.audit is None:
            return False
        try:
            return self.audit.observe(event)
        except Exception:
            self._stop()
            return False

    def forget(self, existing: Existing, salt: str) -> None:
        """Drop audits of a tenant's removed chunks."""
        if self.audit is not None:
            self._abort(self.audit.forget_chunks(existing, salt))

    def abandon(self) -> None:
        """Abort and drop the running audit."""
        if self.audit is not None:
            self._abort(self.audit.abandon())

    def _abort(self, request_id: RequestId | None) -> None:
        if request_id is not None:
            self._scheduler.abort(request_id)

    def _stop(self) -> None:
        """Stop auditing after an error. Placing stays suspended if it is."""
        assert self.audit is not None
        logger.exception("the audit of placed KV failed; nothing is audited until the next start")
        self._stays_suspended = self.audit.is_suspended
        self.abandon()
        self.audit = None
