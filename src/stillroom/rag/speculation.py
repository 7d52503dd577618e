"""Dynamic speculative pipelining (RAGCache 5.3, Algorithm 2): the model begins to read the likely documents while the
search goes on.

After each stage of a search the prompt of its provisional list is submitted, if the list has changed and the engine is
not busy; the one before is cancelled, and leaves the engine after the step under way. Events of such a prompt are held
back until the search has ended. Then it is either the right one, and its tokens so far are released at once, or it is
cancelled and the right one submitted. So a wrong guess changes no token; and what was computed of documents at the
beginning of a wrong prompt is kept like that of any other, and serves the right one.

Beyond the paper: a stage is skipped that is seldom right, and where searching in stages does not pay at all, the search
runs in one go (`break_even`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Protocol

from stillroom.backends.base import Load, PreparedPrompt
from stillroom.config.settings import SearchMode, SpeculationConfig
from stillroom.core.clock import Clock
from stillroom.core.document import ScoredChunk, SearchResult
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, SampleRequest
from stillroom.engine.events import Listener, TokenEvent
from stillroom.errors import StillroomError
from stillroom.rag.answer import SpeculationOutcome, SpeculationReport
from stillroom.rag.break_even import BreakEven, Overlap, Stage
from stillroom.telemetry.metrics import Metrics

Stages = Callable[[int], Iterator[SearchResult]]
"""Number of stages -> at most so many lists, of which the last is the answer."""


class Speculable(Protocol):
    """Of a `Backend`: what decides."""

    @property
    def may_speculate(self) -> bool: ...

    @property
    def load(self) -> Load: ...

    def start(
        self, prepared: PreparedPrompt, samples: Sequence[SampleRequest], listeners: Sequence[Listener]
    ) -> None: ...

    def cancel(self, request_id: RequestId) -> None: ...


class _HeldEvents:
    """A listener that keeps events until it is known where they go. Thread-safe."""

    def __init__(self) -> None:
        self.has_token = False
        self._lock = Lock()
        self._events: list[TokenEvent] = []
        self._listener: Listener | None = None

    def __call__(self, event: TokenEvent) -> None:
        self.has_token = True
        with self._lock:
            if self._listener is None:
                self._events.append(event)
                return
        self._listener(event)

    def release(self, listener: Listener, now: float) -> None:
        """Whoever waits sees nothing before `now`, so the events say."""
        with self._lock:
            for event in self._events:
                listener(replace(event, at=max(event.at, now)))
            self._events.clear()
            self._listener = listener


class Attempt:
    """A prompt with the samples wanted of it. It is submitted at most once, and its events are held back until
    `deliver`."""

    def __init__(self, backend: Speculable, prepared: PreparedPrompt, samples: Sequence[SampleRequest]) -> None:
        self.prepared = prepared
        self.samples = tuple(samples)
        self.started_at: float | None = None
        """When it was submitted, on the engine's clock; None before."""
        self._backend = backend
        self._held = [_HeldEvents() for _ in samples]

    @property
    def is_pending(self) -> bool:
        """Submitted, and still without its first token."""
        return self.started_at is not None and not self._held[0].has_token

    def start(self, now: float) -> None:
        """Submit it. Raises as `Backend.start`."""
        self._backend.start(self.prepared, self.samples, self._held)
        self.started_at = now

    def deliver(self, listeners: Sequence[Listener], now: float) -> None:
        """Pass its events to these listeners, the held ones at once. Submits the prompt unless that was done."""
        for held, listener in zip(self._held, listeners, strict=True):
            held.release(listener, now)
        if self.started_at is None:
            self.start(now)

    def cancel(self, on_end: Listener = lambda event: None) -> None:
        """Cancel it if it was submitted. `on_end` gets the first sample's last event if that says `aborted`."""
        if self.started_at is None:
            return

        def listen(event: TokenEvent) -> None:
            if event.finish_reason is FinishReason.ABORTED:
                on_end(event)

        for held in self._held:
            held.release(listen if held is self._held[0] else _ignore, self.started_at)
        for sample in self.samples:
            self._backend.cancel(sample.request_id)


@dataclass(frozen=True, slots=True)
class CompletedSearch:
    """A search that has ended, and the prompt for what it found."""

    result: SearchResult
    ended_at: float
    """When the search had ended, on the engine's clock."""
    attempt: Attempt
    report: SpeculationReport


class Speculator:
    """Decides what is begun early, for all questions of one engine. Thread-safe."""

    def __init__(self, backend: Speculable, config: SpeculationConfig, clock: Clock, metrics: Metrics) -> None:
        self._backend = backend
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._books: dict[SearchMode, BreakEven] = {mode: BreakEven() for mode in ("hybrid", "dense", "sparse")}

    def find(
        self, stages: Stages, mode: SearchMode, attempt_with: Callable[[Sequence[ScoredChunk]], Attempt]
    ) -> CompletedSearch:
        """Search, and begin with the answer meanwhile where that pays.

        Args:
            attempt_with: the prompt for a list of chunks; each gets request ids of its own.
        """
        accounting = self._books[mode]
        if self._config.mode == "off" or not self._backend.may_speculate:
            found = self._search(stages, attempt_with, SpeculationOutcome.OFF)
        elif self._config.mode == "auto" and not accounting.decide():
            found = self._search(stages, attempt_with, SpeculationOutcome.PLAIN, accounting)
        else:
            found = _SpeculationRun(self._backend, self._config, self._clock, accounting, attempt_with).search(stages)
        self._metrics.count_speculation(found.report.outcome, found.report.ahead_seconds)
        return found

    def _search(
        self,
        stages: Stages,
        attempt_with: Callable[[Sequence[ScoredChunk]], Attempt],
        outcome: SpeculationOutcome,
        accounting: BreakEven | None = None,
    ) -> CompletedSearch:
        began = self._clock.monotonic()
        *_, result = stages(1)
        ended = self._clock.monotonic()
        if accounting is not None and result.search_seconds:  # none of the query cache
            accounting.note_plain(ended - began)
        report = SpeculationReport(
            outcome, break_even_seconds=None if accounting is None else accounting.break_even_seconds
        )
        return CompletedSearch(result, ended, attempt_with(result.results), report)


class _SpeculationRun:
    """Algorithm 2 for one question."""

    def __init__(
        self,
        backend: Speculable,
        config: SpeculationConfig,
        clock: Clock,
        accounting: BreakEven,
        attempt_with: Callable[[Sequence[ScoredChunk]], Attempt],
    ) -> None:
        self._backend = backend
        self._config = config
        self._clock = clock
        self._books = accounting
        self._attempt_with = attempt_with
        self._current: Attempt | None = None
        self._stages_started: list[int] = []
        self._overlap = Overlap(0.0, 0.0)

    def search(self, stages: Stages) -> CompletedSearch:
        """All stages, then what is known by their end."""
        began = self._clock.monotonic()
        lists: list[tuple[SearchResult, float]] = []
        try:
            for stage, found in enumerate(stages(self._config.num_stages)):
                has_changed = not lists or _ids(found) != _ids(lists[-1][0])
                lists.append((found, self._clock.monotonic()))
                if has_changed:
                    self._replace(found, stage)
        except BaseException:
            self._drop()
            raise
        ended = self._clock.monotonic()
        result, _ = lists[-1]
        if self._current is None:
            self._current = self._attempt_with(result.results)
        ahead = 0.0 if self._current.started_at is None else ended - self._current.started_at
        if result.search_seconds:
            self._overlap.search_seconds, self._overlap.gained_seconds = ended - began, ahead
            self._books.note_staged(
                self._overlap, [Stage(_ids(found) == _ids(result), ended - at) for found, at in lists[:-1]]
            )
        return CompletedSearch(result, ended, self._current, self._report(len(lists), ahead))

    def _replace(self, found: SearchResult, stage: int) -> None:
        """Lines 6 to 10: the old prompt is cancelled, the new one begun if fewer than `max_prefill_batch` wait."""
        num_own = self._drop()
        num_pending = self._backend.load.num_pending - num_own
        if num_pending >= self._config.max_prefill_batch or not self._books.is_promising(stage):
            return
        try:
            attempt = self._attempt_with(found.results)
            attempt.start(self._clock.monotonic())
        except StillroomError:  # it is the final list's to say so
            return
        self._current = attempt
        self._stages_started.append(stage)

    def _drop(self) -> int:
        """Cancel the prompt under way; returns how many then are pending no more."""
        attempt, self._current = self._current, None
        if attempt is None:
            return 0
        was_pending = attempt.is_pending
        cancelled_at = self._clock.monotonic()
        attempt.cancel(lambda event: self._books.note_stall(self._overlap, max(event.at - cancelled_at, 0.0)))
        return int(was_pending)

    def _report(self, num_stages: int, ahead: float) -> SpeculationReport:
        early = [stage for stage in self._stages_started if stage < num_stages - 1]  # the last list is no guess
        assert self._current is not None
        is_right = bool(early) and self._stages_started == early and self._current.started_at is not None
        outcome = SpeculationOutcome.NONE
        if early:
            outcome = SpeculationOutcome.RIGHT if is_right else SpeculationOutcome.WRONG
        return SpeculationReport(outcome, num_stages, len(early), ahead, self._books.break_even_seconds)


def _ids(found: SearchResult) -> list[int]:
    return [scored.chunk.chunk_id for scored in found.results]


def _ignore(event: TokenEvent) -> None:
    """Nobody wants it."""
