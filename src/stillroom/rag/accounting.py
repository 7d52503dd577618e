"""Counts answers in the metrics and adds their phases to the trace span.

An answer is counted when the engine ends it, so it counts once, whether the caller reads it to its end or not.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from stillroom.core.request import FinishReason
from stillroom.engine.events import RemoteUsage, TokenEvent
from stillroom.errors import DeadlineExceededError, EngineClosedError, QueueFullError, UsageError
from stillroom.rag.answer import Answer
from stillroom.rag.answer_collector import AnswerCollector, AnswerProgress
from stillroom.telemetry.metrics import Metrics
from stillroom.telemetry.spans import current_span

_ABORTED, _FAILED = "aborted", "failed"


class Account:
    """Counts one answer. `note` runs in the engine's thread."""

    def __init__(self, metrics: Metrics, collector: AnswerCollector, *, is_first: bool, has_searched: bool) -> None:
        """
        Args:
            is_first: whether this answer also counts what all answers to the question share, such as the search.
            has_searched: False for a prompt that is continued without a search.
        """
        self._metrics = metrics
        self._collector = collector
        self._is_first = is_first
        self._has_searched = has_searched
        self._progress = AnswerProgress(collector.started)

    def note(self, event: TokenEvent) -> None:
        """Take the next event; the last one is counted."""
        self._progress.note(event)
        if event.finish_reason is None:
            return
        usage = event.usage or self._progress.usage()
        self._count_answer(usage, self._outcome(event))
        if self._is_first:
            self._count_question(usage)

    def _outcome(self, event: TokenEvent) -> str:
        answer = self._collector.answer
        if answer is not None:  # it ended at a stop string, which the engine does not know
            return answer.finish_reason
        if event.finish_reason is FinishReason.ABORTED:
            return _FAILED if _is_fault(event.error) else _ABORTED
        return str(event.finish_reason)

    def _count_answer(self, usage: RemoteUsage, outcome: str) -> None:
        timing = self._progress.timing(usage.num_generated_tokens)
        self._metrics.observe_answer(
            outcome,
            num_generated_tokens=usage.num_generated_tokens,
            tpot_seconds=timing.tpot_seconds,
            total_seconds=None if outcome in (_ABORTED, _FAILED) else timing.total_seconds,
        )

    def _count_question(self, usage: RemoteUsage) -> None:
        timing = self._progress.timing(usage.num_generated_tokens)
        if self._has_searched:
            self._metrics.observe_retrieval(timing.retrieval_seconds)
        if self._progress.first_at is None:
            return
        self._metrics.observe_prompt(
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            ttft_seconds=timing.ttft_seconds if usage.num_generated_tokens else None,
            phase_seconds={
                "queue": timing.queue_seconds,
                "load": timing.load_seconds,
                "prefill": timing.prefill_seconds,
            },
        )


@contextmanager
def counting_aborted(metrics: Metrics, num_answers: int) -> Iterator[None]:
    """Count the answers as aborted if the body is cancelled or too late: they never reach the engine."""
    try:
        yield
    except (asyncio.CancelledError, DeadlineExceededError):
        for _ in range(num_answers):
            metrics.observe_answer(_ABORTED)
        raise


def _is_fault(error: Exception | None) -> bool:
    """Whether a request failed for another reason than the request itself, a closed engine or a full queue."""
    return error is not None and not isinstance(
        error, DeadlineExceededError | EngineClosedError | QueueFullError | UsageError
    )


def add_phase_spans(answer: Answer, ended_at: float, model: str) -> None:
    """Add the answer's phases to the span of the current HTTP request, if there is one.

    Args:
        ended_at: seconds since 1970.
    """
    span = current_span()
    if span is None:
        return
    timing = answer.timing
    seconds = {"retrieval": timing.retrieval_seconds, "decode": timing.total_seconds - timing.ttft_seconds}
    for name in ("queue", "load", "prefill"):
        phase = getattr(timing, f"{name}_seconds")
        if phase is not None:
            seconds[name] = phase
    if timing.queue_seconds is None:  # a server reports no phases: all until the first token counts as prefill
        seconds["prefill"] = timing.ttft_seconds - timing.retrieval_seconds
    attributes = {
        "stillroom.request_id": answer.request_id,
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": answer.reuse.num_prompt_tokens,
        "gen_ai.usage.output_tokens": answer.num_generated_tokens,
        "stillroom.cached_tokens": answer.reuse.num_cached_tokens,
    }
    span.add_phases(ended_at - timing.total_seconds, seconds, attributes)
