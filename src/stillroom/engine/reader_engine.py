"""The thread that reads for questions, several at once; the same interface as `async_engine`.

A reader computes an answer as a whole, so the thread needs no scheduler: it takes the questions that wait, reads their
chunks in one batch, and sends each answer in pieces. Every submitted request gets exactly one last event. How answers
are chosen: docs/reader.md
"""

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from stillroom.core.clock import Clock
from stillroom.core.document import Chunk
from stillroom.core.ids import RequestId
from stillroom.core.request import Admission, FinishReason, SampleRequest
from stillroom.engine.backlog import Backlog
from stillroom.engine.deadlines import Deadlines
from stillroom.engine.events import Listener, Quote, TokenEvent
from stillroom.errors import EngineClosedError, EngineError, StillroomError

logger = logging.getLogger(__name__)

_PIECE = re.compile(r"\s*\S+\s*")


@dataclass(frozen=True, slots=True)
class ReaderPrompt:
    """A question and the chunks to read for it, best first."""

    question: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class ReaderAnswer:
    """The answer to a `ReaderPrompt`."""

    text: str
    highlight: tuple[int, int] | None
    """Characters of `text` that answer the question; None if the chunks do not answer it."""
    confidence: float
    """Probability that the quoted sentence, or the best if none is quoted, holds the answer, in [0, 1]."""
    best: Quote | None = None
    """The best quote, also if its score is too low to be the answer; None if no chunk has words."""


Answerer = Callable[[Sequence[ReaderPrompt]], Sequence[ReaderAnswer]]
"""Answers several prompts. Each answer depends on its own prompt only."""


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A prompt with the samples that have not ended. The lock of the engine guards `samples`."""

    prompt: ReaderPrompt
    tenant: str
    priority: int
    samples: dict[RequestId, SampleRequest]


class ReaderEngine:
    """A running engine. Close it, or use it as a context manager."""

    def __init__(
        self,
        answer: Answerer,
        clock: Clock,
        *,
        max_waiting: int = 0,
        batch_size: int = 16,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            max_waiting: questions that may wait; 0 is no limit.
            batch_size: most chunks that are read together; a question with more is read alone.
            prepare: called in the thread before it reads.
        """
        self._answer = answer
        self._clock = clock
        self._batch_size = batch_size
        self._prepare = prepare
        self._changed = threading.Condition()
        # guarded by `_changed`
        self._waiting = _FairQueue()
        self._questions: dict[RequestId, _Question] = {}
        self._listeners: dict[RequestId, Listener] = {}
        self._cancelled: list[RequestId] = []
        self._deadlines = Deadlines(0)
        self._backlog = Backlog(max_waiting)
        self._num_waiting = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="stillroom-reader", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs: the engine was not closed and has not failed."""
        return not self._is_closed and self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        """Samples whose chunks are not being read yet."""
        return self._num_waiting

    @property
    def num_running(self) -> int:
        return max(0, len(self._questions) - self._num_waiting)

    def submit(
        self, prompt: ReaderPrompt, samples: Sequence[SampleRequest], listeners: Sequence[Listener], tenant: str = ""
    ) -> None:
        """Read for a question; the events of each sample go to its listener. All samples have the same answer.

        Args:
            tenant: tenants take turns; within a tenant the lowest priority number goes first.

        Raises:
            QueueFullError: the queue is full, and the tenant has its share of it.
            EngineClosedError: the engine was closed.
        """
        by_id = {sample.request_id: sample for sample in samples}
        question = _Question(prompt, tenant, samples[0].priority, by_id)
        with self._changed:
            if not self.is_alive:
                raise EngineClosedError("the engine is closed; open the knowledge base again")
            now = self._now()
            if not self._questions:
                self._backlog.begin(now)
            self._backlog.accept(tenant, 0, tuple, now)
            for sample, listener in zip(samples, listeners, strict=True):
                self._questions[sample.request_id] = question
                self._listeners[sample.request_id] = listener
                self._deadlines.begin(sample, now)
            self._num_waiting += len(samples)
            self._waiting.push(question)
            self._changed.notify()

    def cancel(self, request_id: RequestId) -> None:
        """Abort a request before the next batch; its last event says `aborted`. No effect if it has ended."""
        with self._changed:
            self._cancelled.append(request_id)
            self._changed.notify()

    def close(self) -> None:
        """Abort all requests and stop the thread after its batch. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> "ReaderEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        error: EngineError = EngineClosedError("the engine was closed before the answer was complete")
        try:
            self._prepare()
            while batch := self._next_batch():
                self._read(batch)
        except BaseException:  # every listener must get a last event
            logger.critical("the reader has failed; it answers no more questions", exc_info=True)
            error = EngineError("the reader has failed, the log says why; start Stillroom again")
        with self._changed:
            self._is_closed = True
            listeners = [(request_id, self._end(request_id)) for request_id in list(self._questions)]
        for request_id, listener in listeners:
            self._send(listener, self._aborted(request_id, error))

    def _next_batch(self) -> list[_Question]:
        """Wait for questions; empty to stop."""
        while True:
            with self._changed:
                ended = self._take_ended()
                if not ended:
                    if self._is_closed:
                        return []
                    if batch := self._take_batch():
                        return batch
                    pause = self._deadlines.next_at - self._now()
                    self._changed.wait(min(max(pause, 0.0), threading.TIMEOUT_MAX))
            self._send_all(ended)

    def _take_ended(self) -> list[tuple[Listener, TokenEvent]]:
        """Remove requests that were cancelled or are too late; returns the last event of each."""
        ended: list[tuple[RequestId, EngineError | None]] = [(request_id, None) for request_id in self._cancelled]
        self._cancelled.clear()
        ended += self._deadlines.pop_expired(self._now())
        return [
            (self._end(request_id), self._aborted(request_id, error))
            for request_id, error in ended
            if request_id in self._questions
        ]

    def _take_batch(self) -> list[_Question]:
        batch: list[_Question] = []
        num_chunks = 0
        while self._waiting:
            question = self._waiting.peek()
            num_chunks += len(question.prompt.chunks)
            if batch and num_chunks > self._batch_size:
                break
            self._waiting.remove(question)
            self._num_waiting -= len(question.samples)
            self._backlog.enter_scheduler(question.tenant)
            batch.append(question)
        return batch

    def _read(self, batch: Sequence[_Question]) -> None:
        began_at = self._now()
        answers = self._answers([question.prompt for question in batch])
        with self._changed:
            ended = self._take_ended()
            samples = [[] if self._is_closed else list(question.samples.values()) for question in batch]
        self._send_all(ended)
        for answer, wanted in zip(answers, samples, strict=True):
            for sample in wanted:
                self._deliver(sample, answer, began_at)

    def _answers(self, prompts: Sequence[ReaderPrompt]) -> "Sequence[ReaderAnswer | EngineError]":
        """Answer the prompts; if that fails, answer each alone, so that only those that fail alone have an error."""
        try:
            return self._answer(prompts)
        except Exception as error:
            logger.exception("reading for %d questions failed", len(prompts))
            if len(prompts) > 1:
                return [self._answers([prompt])[0] for prompt in prompts]
            if isinstance(error, EngineError):
                return [error]
            reason = str(error) if isinstance(error, StillroomError) else type(error).__name__
            return [EngineError(f"reading failed: {reason}; the log has the details")]

    def _deliver(self, sample: SampleRequest, answer: ReaderAnswer | EngineError, began_at: float) -> None:
        request_id = sample.request_id
        if isinstance(answer, EngineError):
            events = [self._aborted(request_id, answer)]
        else:
            events = _events(sample, answer, Admission(began_at, began_at), self._now())
        listener = self._listeners[request_id]
        for event in events:
            if event.finish_reason is not None:
                with self._changed:
                    self._end(request_id)
            if not self._send(listener, event):
                listener = _ignore

    def _end(self, request_id: RequestId) -> Listener:
        """Forget a request; returns its listener. Precondition: the lock is held, and the request has not ended."""
        question = self._questions.pop(request_id)
        self._deadlines.end(request_id)
        self._backlog.end(self._now())
        is_waiting = question in self._waiting
        del question.samples[request_id]
        self._num_waiting -= is_waiting
        if is_waiting and not question.samples:
            self._waiting.remove(question)
            self._backlog.enter_scheduler(question.tenant)
        return self._listeners.pop(request_id)

    def _send_all(self, events: Iterable[tuple[Listener, TokenEvent]]) -> None:
        for listener, event in events:
            self._send(listener, event)

    def _send(self, listener: Listener, event: TokenEvent) -> bool:
        """Return whether the listener took the event. Precondition: the lock is not held."""
        try:
            listener(event)
        except Exception:  # a broken listener (such as a closed event loop) must not stop the others
            logger.exception("the listener of %s failed", event.request_id)
            return False
        return True

    def _aborted(self, request_id: RequestId, error: EngineError | None) -> TokenEvent:
        return TokenEvent(request_id, None, FinishReason.ABORTED, self._now(), error)

    def _now(self) -> float:
        return self._clock.monotonic()


def _events(sample: SampleRequest, answer: ReaderAnswer, admission: Admission, at: float) -> list[TokenEvent]:
    """The answer as pieces, at most `max_tokens`; the last one ends the request."""
    pieces = _PIECE.findall(answer.text)
    kept = pieces[: sample.sampling.max_tokens]
    reason = FinishReason.STOP if len(kept) == len(pieces) else FinishReason.LENGTH
    return [
        TokenEvent(
            sample.request_id,
            None,
            reason if number == len(kept) else None,
            at,
            text=piece,
            admission=admission if number == 1 else None,
            highlight=answer.highlight,
            confidence=answer.confidence,
            best=answer.best,
        )
        for number, piece in enumerate(kept, start=1)
    ]


class _FairQueue:
    """Waiting questions: tenants in turn; within a tenant by priority, then by arrival."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, list[tuple[int, int, _Question]]] = OrderedDict()  # heaps
        self._members: set[_Question] = set()
        self._num_pushed = 0

    def __bool__(self) -> bool:
        return bool(self._members)

    def __contains__(self, question: _Question) -> bool:
        return question in self._members

    def push(self, question: _Question) -> None:
        self._num_pushed += 1
        self._members.add(question)
        heappush(self._by_tenant.setdefault(question.tenant, []), (question.priority, self._num_pushed, question))

    def peek(self) -> _Question:
        """The next question. Precondition: the queue is not empty."""
        heap = next(iter(self._by_tenant.values()))
        return heap[0][2]

    def remove(self, question: _Question) -> None:
        """Remove a member. Its tenant goes to the end of the turns if it was the next question."""
        self._members.remove(question)
        is_next = self.peek() is question
        heap = self._by_tenant[question.tenant]
        if is_next:
            heappop(heap)
            self._by_tenant.move_to_end(question.tenant)
        else:
            heap[:] = [entry for entry in heap if entry[2] is not question]
            heapify(heap)
        if not heap:
            del self._by_tenant[question.tenant]


def _ignore(event: TokenEvent) -> None:
    """Listener of a request whose own listener failed."""
