"""Compares sampled answers from placed KV with full prefills, while the engine is idle.

An audit runs an answer's prompt again, with the same sampling, and compares the first tokens: what is compared with
what says `audit_comparison`, what follows from it `reuse_level`.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.request import FinishReason, Request
from stillroom.core.reuse import PromptReuse
from stillroom.engine.audit_comparison import (
    NUM_TOKENS,
    Comparison,
    DocumentPrompt,
    Outcome,
    ReadChunks,
    may_have_placed,
)
from stillroom.engine.events import TokenEvent
from stillroom.engine.reuse_level import ReuseLevel
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions

_MAX_WAITING = 8


@dataclass(frozen=True, slots=True)
class AuditStats:
    num_audited: int
    num_disagreed: int
    """Answers that agree with no reference."""
    num_as_prompt: int
    """Answers that agree with a full prefill of their prompt."""
    num_as_documents: int
    """Answers that agree with a full prefill of their documents."""
    num_without_documents: int
    """Answers that were not compared with their documents: too long together, or changed meanwhile."""
    upper_bound: float
    """Bound on the share of answers that agree with no reference now; holds at all times with 95 % confidence."""
    options: AnywhereOptions
    is_suspended: bool
    """Whether answers place no KV; audits still do."""


@dataclass(slots=True)
class _Answer:
    request: Request
    token_ids: list[int] = field(default_factory=list)
    reuse: PromptReuse | None = None


class Audit:
    """Audits of one engine. Runs in the engine's thread."""

    def __init__(
        self,
        level: ReuseLevel,
        *,
        share: float,
        randomness: random.Random,
        document_prompt: DocumentPrompt | None = None,
    ) -> None:
        """
        Args:
            share: share of the answers with placed KV that is audited; while placing is suspended, of the answers that
                might have placed some.
            document_prompt: builds the prompt of an answer's documents; None: answers are compared with their own
                prompt's prefill only.
        """
        self._level = level
        self._share = share
        self._randomness = randomness
        self._document_prompt = document_prompt
        self._open: dict[RequestId, _Answer] = {}
        self._waiting: deque[Comparison] = deque(maxlen=_MAX_WAITING)
        self._running: Comparison | None = None
        self._num_audited = self._num_disagreed = 0
        self._num_as_prompt = self._num_as_documents = self._num_without_documents = 0

    @property
    def stats(self) -> AuditStats:
        """Read by any thread: the values may be of slightly different moments."""
        return AuditStats(
            self._num_audited,
            self._num_disagreed,
            self._num_as_prompt,
            self._num_as_documents,
            self._num_without_documents,
            self._level.upper_bound,
            self._level.options,
            self._level.is_suspended,
        )

    @property
    def is_suspended(self) -> bool:
        """Whether requests must place no KV now."""
        return self._level.is_suspended

    @property
    def stoppable_id(self) -> RequestId | None:
        """The running request if its steps may stop between two layers; None if there is none.

        The state of a request that places KV does not allow it.
        """
        return None if self._running is None or self._running.places else self._running.request.request_id

    def on_submit(self, request: Request) -> None:
        self._open[request.request_id] = _Answer(request)

    def observe(self, event: TokenEvent) -> bool:
        """Record an event; True if it belongs to an audit and so has no listener."""
        if self._running is not None and event.request_id == self._running.request.request_id:
            self._observe_run(self._running, event)
            return True
        answer = self._open.get(event.request_id)
        if answer is not None:
            if event.token_id is not None and len(answer.token_ids) < NUM_TOKENS:
                answer.token_ids.append(event.token_id)
            answer.reuse = event.reuse or answer.reuse
            if event.finish_reason is not None:
                self._close(answer, event.finish_reason)
        return False

    def next(self, read_chunks: ReadChunks) -> Request | None:
        """Return the next request to run for an audit; None if there is none, or one runs already."""
        while self._running is None and self._waiting:
            one = self._waiting.popleft()
            shadow = one.begin(read_chunks, self._document_prompt)
            if shadow is not None:
                self._running = one
                return shadow
            self._leave_out(one)
        return None

    def refuse(self) -> None:
        """The request that `next` returned can never run."""
        if self._running is not None:
            one, self._running = self._running, None
            self._leave_out(one)

    def interrupt(self) -> RequestId | None:
        """Put the running audit back into the queue; returns the request to abort, None if no audit runs."""
        if self._running is None:
            return None
        self._waiting.appendleft(self._running)
        return self.abandon()

    def abandon(self) -> RequestId | None:
        """Drop the running audit; returns the request to abort, None if no audit runs."""
        one, self._running = self._running, None
        return None if one is None else one.request.request_id

    def forget_chunks(self, existing: Callable[[set[ChunkId]], set[ChunkId]], salt: str) -> RequestId | None:
        """Drop audits of a tenant's prompts and documents with removed chunks.

        Args:
            existing: returns which of some chunks still exist.

        Returns:
            The request to abort; None if no audit of such chunks runs.
        """

        def is_current(one: Comparison) -> bool:
            chunk_ids = set(one.chunk_ids)
            return one.request.cache_salt != salt or existing(chunk_ids) == chunk_ids

        self._waiting = deque(filter(is_current, self._waiting), _MAX_WAITING)
        return None if self._running is None or is_current(self._running) else self.abandon()

    def _close(self, answer: _Answer, reason: FinishReason) -> None:
        del self._open[answer.request.request_id]
        reuse = answer.reuse
        if reuse is None or not answer.token_ids:
            return
        is_evidence = may_have_placed(reuse) if self._level.is_suspended else reuse.has_placed
        if is_evidence and self._randomness.random() < self._share:
            with_documents = self._document_prompt is not None
            tokens = answer.token_ids
            self._waiting.append(Comparison(answer.request, tokens, reuse, reason, with_documents=with_documents))

    def _observe_run(self, one: Comparison, event: TokenEvent) -> None:
        can_be_judged = one.observe(event)
        if event.finish_reason is None:
            return
        self._running = None
        if can_be_judged:
            self._go_on(one)

    def _leave_out(self, one: Comparison) -> None:
        if one.leave_out():
            self._num_without_documents += 1
            self._go_on(one)

    def _go_on(self, one: Comparison) -> None:
        """Let the next run of an audit wait before other audits, or count the audit after its last one."""
        if one.is_complete:
            self._count(one.outcome)
        else:
            self._waiting.appendleft(one)

    def _count(self, outcome: Outcome) -> None:
        self._num_audited += 1
        self._num_disagreed += not outcome.agrees
        self._num_as_prompt += outcome.agrees_with_prompt
        self._num_as_documents += bool(outcome.agrees_with_documents)
        if self._level.count(agrees=outcome.agrees):
            self._waiting.clear()  # answers at the old level are no evidence for the new one
            self._open.clear()
