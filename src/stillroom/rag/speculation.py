"""Dynamic speculative pipelining (RAGCache 5.3, Algorithm 2): prefill of the likely documents during the search.

After each stage of a search, the prompt of its provisional list is submitted if the list has changed and the engine is
not busy. The previous prompt is cancelled and leaves the engine after the current step. Events of a speculative prompt
are held back until the search has ended. If the prompt is that of the final list, its events are then released;
otherwise it is cancelled and the right prompt submitted. So speculation changes no token, and KV computed for the
documents at the beginning of a wrong prompt is cached like any other.

Beyond the paper: stages that are seldom right are skipped, and where staged search does not pay, the search runs
without stages (`break_even`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from stillroom.rag.hops import Hop
from stillroom.telemetry.metrics import Metrics

Stages = Callable[[int], Iterator[SearchResult]]
"""Number of stages -> at most that many lists, of which the last is final."""
AttemptWith = Callable[[Sequence[ScoredChunk]], "Attempt"]
"""Chunks -> their prompt, with new request ids in each call."""


class Speculable(Protocol):
    """The part of `Backend` that speculation needs."""

    @property
    def may_speculate(self) -> bool: ...

    @property
    def load(self) -> Load: ...

    def start(
        self, prepared: PreparedPrompt, samples: Sequence[SampleRequest], listeners: Sequence[Listener]
    ) -> None: ...

    def cancel(self, request_id: RequestId) -> None: ...


class _HeldEvents:
    """A listener that holds events back until they are released to another one. Thread-safe."""

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
        """Pass the held events and all later ones to a listener. Held events are dated `now` or later, because the
        caller sees them only now."""
        with self._lock:
            for event in self._events:
                listener(event._replace(at=max(event.at, now)))
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
    """A search that has ended, and the prompt of its final list."""

    result: SearchResult
    ended_at: float
    """On the engine's clock."""
    attempt: Attempt
    report: SpeculationReport
    hops: tuple[Hop, ...] = ()
    """Of a question that was searched several times."""


class Speculator:
    """Searches questions and starts speculative prefills, for one engine. Thread-safe."""

    def __init__(self, backend: Speculable, config: SpeculationConfig, clock: Clock, metrics: Metrics) -> None:
        self._backend = backend
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._break_evens: dict[SearchMode, BreakEven] = {mode: BreakEven() for mode in ("hybrid", "dense", "sparse")}

    def find(self, stages: Stages, mode: SearchMode, attempt_with: AttemptWith) -> CompletedSearch:
        """Search; where it pays, start prefills during the search."""
        break_even = self._break_evens[mode]
        if self._config.mode == "off" or not self._backend.may_speculate:
            found = self._search(stages, attempt_with, SpeculationOutcome.OFF)
        elif self._config.mode == "auto" and not break_even.decide():
            found = self._search(stages, attempt_with, SpeculationOutcome.PLAIN, break_even)
        else:
            found = _SpeculationRun(self._backend, self._config, self._clock, break_even, attempt_with).search(stages)
        self._metrics.count_speculation(found.report.outcome, found.report.ahead_seconds)
        return found

    def _search(
        self,
        stages: Stages,
        attempt_with: AttemptWith,
        outcome: SpeculationOutcome,
        break_even: BreakEven | None = None,
    ) -> CompletedSearch:
        began = self._clock.monotonic()
        *_, result = stages(1)
        ended = self._clock.monotonic()
        if break_even is not None and result.search_seconds:  # 0 if the query cache had it
            break_even.note_plain(ended - began)
        report = SpeculationReport(
            outcome, break_even_seconds=None if break_even is None else break_even.break_even_seconds
        )
        return CompletedSearch(result, ended, attempt_with(result.results), report)


class _SpeculationRun:
    """Algorithm 2 for one question."""

    def __init__(
        self,
        backend: Speculable,
        config: SpeculationConfig,
        clock: Clock,
        break_even: BreakEven,
        attempt_with: AttemptWith,
    ) -> None:
        self._backend = backend
        self._config = config
        self._clock = clock
        self._break_even = break_even
        self._attempt_with = attempt_with
        self._current: Attempt | None = None
        self._stages_started: list[int] = []
        self._overlap = Overlap(0.0, 0.0)

    def search(self, stages: Stages) -> CompletedSearch:
        """Run all stages, starting prefills between them."""
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
            self._break_even.note_staged(
                self._overlap, [Stage(_ids(found) == _ids(result), ended - at) for found, at in lists[:-1]]
            )
        return CompletedSearch(result, ended, self._current, self._report(len(lists), ahead))

    def _replace(self, found: SearchResult, stage: int) -> None:
        """Lines 6 to 10: cancel the old prompt; start the new one if fewer than `max_prefill_batch` are pending."""
        num_own = self._drop()
        num_pending = self._backend.load.num_pending - num_own
        if num_pending >= self._config.max_prefill_batch or not self._break_even.is_promising(stage):
            return
        try:
            attempt = self._attempt_with(found.results)
            attempt.start(self._clock.monotonic())
        except StillroomError:  # raised again if the final list's prompt fails too
            return
        self._current = attempt
        self._stages_started.append(stage)

    def _drop(self) -> int:
        """Cancel the current prompt. Returns how many prompts (0 or 1) are thereby no longer pending."""
        attempt, self._current = self._current, None
        if attempt is None:
            return 0
        was_pending = attempt.is_pending
        cancelled_at = self._clock.monotonic()
        attempt.cancel(lambda event: self._break_even.note_stall(self._overlap, max(event.at - cancelled_at, 0.0)))
        return int(was_pending)

    def _report(self, num_stages: int, ahead: float) -> SpeculationReport:
        early = [stage for stage in self._stages_started if stage < num_stages - 1]  # the final list is none
        assert self._current is not None
        is_right = bool(early) and self._stages_started == early and self._current.started_at is not None
        outcome = SpeculationOutcome.NONE
        if early:
            outcome = SpeculationOutcome.RIGHT if is_right else SpeculationOutcome.WRONG
        return SpeculationReport(outcome, num_stages, len(early), ahead, self._break_even.break_even_seconds)


def _ids(found: SearchResult) -> list[int]:
    return [scored.chunk.chunk_id for scored in found.results]


def _ignore(event: TokenEvent) -> None:
    """Listener of a cancelled prompt."""
