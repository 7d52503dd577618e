"""The step loop: the scheduler decides, the runner computes, token events come out. Synchronous and single-threaded.

`async_engine` runs it in a thread; tests call it directly.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from stillroom.core.batch import Batch, StepResult, StepStopped
from stillroom.core.clock import Clock
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import owner_of
from stillroom.core.request import FinishReason, LookupCounts, Request
from stillroom.engine.audit import Audit
from stillroom.engine.auditing import Auditing
from stillroom.engine.corpora import Corpora, CorpusView, Existing
from stillroom.engine.deadlines import Deadlines
from stillroom.engine.events import TokenEvent
from stillroom.engine.isolation import Isolation, Suspects
from stillroom.engine.preparation import OnPrepared, PreparingQueue
from stillroom.engine.recovery import Recovery
from stillroom.errors import DeviceLostError, EngineError, StillroomError
from stillroom.kvcache.tree.provenance import MAX_SEEN
from stillroom.runner.device_errors import first_line, is_device_loss
from stillroom.runner.torch_runner import Runner
from stillroom.scheduler.scheduler import Scheduler
from stillroom.scheduler.sequence_update import SequenceUpdate

logger = logging.getLogger(__name__)

_CATCH_UP_SECONDS = 1.0
"""Shortest time between two checks, while requests come, whether other processes have removed documents."""
_IDLE_CATCH_UP_SECONDS = 2.0
"""The same while the engine is idle."""


class Engine:
    """Requests in, token events out, one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        timeout_seconds: float = 0.0,
        audit: Audit | None = None,
        preparation: PreparingQueue | None = None,
    ) -> None:
        """
        Args:
            timeout_seconds: time limit of a request, after which it starts again once and then ends; 0 is no limit.
            audit: audit of answers from placed KV, if any.
            preparation: when preparing prompts run; None: as soon as the engine is idle.
        """
        self._preparation = preparation or PreparingQueue(0.0)
        self.should_stop: Callable[[], bool] | None = None
        """Whether a step of idle work shall end before its last layer, because a command waits."""
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.num_failed_steps = 0
        self._recovery = Recovery(lambda: self.runner.recover(), clock)
        self._isolation = Isolation(lambda batch: self.runner.execute(batch), scheduler.kv.pool.block_size)
        self._suspects = Suspects()
        self._events: list[TokenEvent] = []  # not returned yet
        self._deadlines = Deadlines(timeout_seconds)
        self._corpora = Corpora()
        self.auditing = Auditing(audit, scheduler, self._corpora)
        self._caught_up_at = float("-inf")

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._events)

    @property
    def device_problem(self) -> str | None:
        """Why the device cannot be used now; None if it can. Thread-safe."""
        return self._recovery.problem

    @property
    def num_device_losses(self) -> int:
        """Thread-safe."""
        return self._recovery.num_losses

    @property
    def lookup_counts(self) -> LookupCounts:
        """Prompt lookup of all requests. Thread-safe."""
        return self.scheduler.proposer.accounts.counts

    @property
    def retry_in(self) -> float | None:
        """Seconds until `do_idle_work` may recover a lost device, prepare documents, or drop KV of documents that other
        processes removed; None if there is nothing of this to wait for."""
        at = self._preparation.begins_at if self._recovery.problem is None else self._recovery.retry_at
        if self._recovery.problem is None and self._corpora.has_any:
            catch_up_at = self._caught_up_at + _IDLE_CATCH_UP_SECONDS
            at = catch_up_at if at is None else min(at, catch_up_at)
        return None if at is None else max(0.0, at - self.clock.monotonic())

    @property
    def pause(self) -> float:
        """Seconds for which `step` would do nothing while the batch waits for more requests."""
        until = self.scheduler.delayed_until
        return 0.0 if until is None else max(0.0, min(until, self._deadlines.next_at) - self.clock.monotonic())

    def check_device(self) -> None:
        """Raise DeviceLostError if the device is lost and not yet recovered. Thread-safe."""
        self._recovery.check()

    def submit(self, request: Request, *samples: Request) -> None:
        """Queue a request with further samples of the same prompt, which is computed once.

        Raises:
            PromptTooLongError: the request can never run.
            UsageError: there are more samples than can run at the same time.
            DeviceLostError: as `check_device`.
        """
        self.check_device()
        now = self.clock.monotonic()
        if now - self._caught_up_at >= _CATCH_UP_SECONDS:
            self.catch_up()
        self._interrupt_preparation(now)
        self._add(*map(self.auditing.restricted, (request, *samples)), now=now)
        self.auditing.on_submit(request, *samples)
        for one in (request, *samples):
            self._deadlines.begin(one, now)

    def expect_question(self) -> None:
        """Interrupt the preparing prompt: a question is being searched for, and its prompt follows."""
        self._interrupt_preparation(self.clock.monotonic())

    def prepare(self, request: Request, on_end: OnPrepared) -> None:
        """Compute a preparing prompt while the engine is idle, after those before it."""
        self._preparation.offer(request, on_end)

    def cancel_preparing(self, request_id: RequestId) -> None:
        """End a preparing prompt; what it has computed is kept. No effect if it has ended."""
        if self._preparation.cancel(request_id, EngineError("preparing was cancelled")):
            self.scheduler.abort(request_id)

    def cancel(self, request_id: RequestId) -> TokenEvent | None:
        """End a request and free its blocks; returns its last event.

        None if the request had ended, perhaps in a step that failed before its events were returned.
        """
        event, is_here, _ = self._end(request_id)
        return event if is_here else None

    def step(self) -> list[TokenEvent]:
        """Run one step, if there is anything to run; returns its events.

        If the device is lost, requests resume from their tokens and from KV on host and disk (RAGCache 6); if it cannot
        be recovered, they end with a DeviceLostError. If the step fails otherwise, the requests at fault end.
        """
        self._events += self._expire()
        if self._recovery.problem is None:
            try:
                with self._handling_device_loss():
                    self._step()
            except BaseException:
                self.num_failed_steps += 1
                raise
        return self.take_events()

    def take_events(self) -> list[TokenEvent]:
        """Return the events that `step` has not returned, for a caller whose `step` raised."""
        events, self._events = self._events, []
        return events

    def do_idle_work(self) -> bool:
        """Do one piece of background work, such as recovering a lost device; False if there is none."""
        if self._recovery.problem is not None:
            self._recovery.retry()
            return self._recovery.problem is None
        is_done = True  # if the device was lost, and recovered
        with self._handling_device_loss():
            is_done = self._do_idle_work()
        return is_done

    def follow(self, salt: str, corpus: CorpusView) -> None:
        """Set the corpus of a salt's requests; the next `catch_up` drops KV of its removed chunks. Thread-safe."""
        self._corpora.follow(salt, corpus)

    def unfollow(self, salt: str) -> bool:
        """Stop reading a corpus: it is not read after this call. Thread-safe.

        Returns:
            Whether the corpus was removed; then call `forget` in the engine's thread.
        """
        return self._corpora.unfollow(salt)

    def forget(self, salt: str) -> None:
        """Drop all kept KV of a salt's requests."""
        with self._handling_device_loss():
            self._forget_all(salt)

    def catch_up(self) -> None:
        """Drop kept KV of removed chunks."""
        self._caught_up_at = self.clock.monotonic()
        with self._handling_device_loss():
            named = self._forget_shared if self.scheduler.kv.shares_kv else None
            self._corpora.catch_up(self._forget_chunks, self._forget_all, named)

    def abandon_audit(self) -> None:
        """Abort and drop the running audit, after a step failed."""
        self.auditing.abandon()

    def abandon_preparation(self, error: Exception) -> None:
        """Abort and end the preparing prompts, after a step failed or because the engine stops."""
        running = self._preparation.abandon(error)
        if running is not None:
            self.scheduler.abort(running)

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()

    @contextmanager
    def _handling_device_loss(self) -> Iterator[None]:
        """Handle an error that says that the device is lost; other errors are raised."""
        try:
            yield
        except Exception as error:
            if not is_device_loss(error):
                raise
            self._lose_device(error)

    def _lose_device(self, error: BaseException) -> None:
        """Drop the KV on the device, then recover the device; in this order, so that lost KV is never used."""
        logger.warning("the device is lost: %s; requests resume from KV on host and disk", first_line(error))
        for request_id in self.scheduler.lose_device():
            text = "the model's device was lost; this answer was computed from placed KV and cannot be resumed exactly"
            self._fail(request_id, DeviceLostError(f"{text}: ask again"))
        blamed = self._suspects.blame(self._isolation.take_executing())
        for request_id in blamed:
            self._fail(request_id, DeviceLostError("the model's device was lost twice while this request ran"))
        if blamed:
            self._recovery.end_streak()
        if not self._recovery.lose(error):
            for request_id in self.scheduler.request_ids:
                self._fail(request_id, DeviceLostError(self._recovery.problem))

    def _step(self) -> None:
        batch = self.scheduler.schedule(self.clock.monotonic())
        if batch is None:
            return
        if len(batch.sequences) == 1 and batch.sequences[0].request_id in self._stoppable_ids:
            batch = replace(batch, should_stop=self.should_stop)
        began = self.clock.monotonic()
        try:
            batch, result = self._execute(batch)
        except StepStopped:
            self._isolation.take_executing()
            return
        now = self.clock.monotonic()
        updates = self.scheduler.update(batch, result, began, now)
        self._recovery.end_streak()
        self._events += self._events_of(updates, now)

    def _execute(self, batch: Batch) -> tuple[Batch, StepResult]:
        """Run a batch; returns the part of it that ran. The other requests end or start again."""
        outcome = self._isolation.execute(batch, one_by_one=self._suspects.are_in(batch))
        self.num_failed_steps += bool(outcome.failed or outcome.interrupted)
        failed = dict(outcome.failed)
        for request_id in self._suspects.blame(outcome.interrupted):
            failed[request_id] = outcome.interrupted.pop(request_id)
        for request_id in outcome.interrupted:
            self.scheduler.restart(request_id)
        for request_id, error in failed.items():
            logger.error("%s failed", request_id, exc_info=error)
            self._fail(request_id, EngineError(f"generation failed: {first_line(error)}"))
        return outcome.batch, outcome.result

    def _events_of(self, updates: Iterable[SequenceUpdate], now: float) -> Iterator[TokenEvent]:
        for update in updates:
            event = TokenEvent(
                update.request_id,
                update.token_id,
                update.finish_reason,
                now,
                update.error,
                logprobs=update.logprobs,
                reuse=update.reuse,
                admission=update.admission,
                lookup=update.lookup,
            )
            self._suspects.clear(event.request_id)
            if event.finish_reason is not None:
                self._deadlines.end(event.request_id)
            if self._preparation.observe(event):
                continue
            if self.auditing.observe(event):
                continue
            if event.finish_reason is not None:
                self._preparation.busy_until = now
            yield event

    def _do_idle_work(self) -> bool:
        self.catch_up()
        if self.scheduler.kv.store_next():
            return True
        return self.auditing.begin(lambda one: self._add(one, now=0.0)) or self._begin_preparing()

    def _begin_preparing(self) -> bool:
        """Start the preparing prompt that waits, or end it once its KV is stored as far as it fits; False if there is
        nothing to do now."""
        if self._preparation.is_computed:
            self._preparation.end()
            return True
        request = self._preparation.next(self.clock.monotonic())
        if request is None:
            return False
        try:
            if self.scheduler.has_to_prepare(request):
                self._add(request, now=0.0)
            else:
                self._preparation.end(is_computed=False)
        except StillroomError as error:  # no room in the budget, or in the KV pool
            self._preparation.end(error)
        return True

    def _interrupt_preparation(self, now: float) -> None:
        """Abort the preparing prompt, to run again when the engine is idle."""
        self._preparation.busy_until = now
        running = self._preparation.interrupt()
        if running is not None:
            self.scheduler.abort(running)

    def _fail(self, request_id: RequestId, error: Exception) -> None:
        """End a request with an error; its last event is among those of this step."""
        event, is_here, is_own = self._end(request_id, error)
        if is_here and not is_own:
            self._events.append(event)

    def _end(self, request_id: RequestId, error: Exception | None = None) -> tuple[TokenEvent, bool, bool]:
        """Abort a request; returns its last event, whether it was still known, and whether it was the engine's own: an
        audit or a preparing prompt."""
        event = TokenEvent(request_id, None, FinishReason.ABORTED, self.clock.monotonic(), error)
        self._deadlines.end(request_id)
        self._suspects.clear(request_id)
        is_own = self._preparation.observe(event) or self.auditing.observe(event)
        return event, self.scheduler.abort(request_id), is_own

    @property
    def _stoppable_ids(self) -> tuple[RequestId | None, ...]:
        """The requests of which a step may stop before its last layer, because other work came."""
        return self._preparation.running_id, self.auditing.stoppable_id

    def _add(self, request: Request, *samples: Request, now: float) -> None:
        """Queue a request, and drop KV of documents that were removed since the last `catch_up`."""
        chunk_ids = {segment.chunk_id for segment in request.prompt.segments if segment.chunk_id is not None}
        if chunk_ids and request.may_place and self.scheduler.kv.uses_prepared:
            before = self._corpora.chunks_before(request.cache_salt, chunk_ids, MAX_SEEN)
            request, *samples_with = (replace(one, before=before) for one in (request, *samples))
            samples = tuple(samples_with)
        self.scheduler.add(request, *samples, now=now)
        if not self._corpora.check(request.cache_salt, chunk_ids):
            self.catch_up()

    def _forget_chunks(self, existing: Existing, salt: str) -> None:
        self.scheduler.forget_chunks(existing, salt)
        self.auditing.forget(existing, salt)

    def _forget_shared(self, removed: Collection[ChunkId], salt: str) -> None:
        if removed:
            self.scheduler.kv.forget_shared(owner_of(salt), removed)

    def _forget_all(self, salt: str) -> None:
        self.scheduler.forget_owner(salt)
        self.scheduler.kv.forget_shared(owner_of(salt), None)
        self.auditing.forget(lambda _: set(), salt)

    def _expire(self) -> list[TokenEvent]:
        """Restart or end the requests whose deadline has passed; returns the events of those that end."""
        events = []
        for request_id, error in self._deadlines.pop_expired(self.clock.monotonic()):
            if error is None:
                self.scheduler.restart(request_id)
                continue
            event = self.cancel(request_id)
            if event is not None:
                events.append(event._replace(error=error))
        return events
