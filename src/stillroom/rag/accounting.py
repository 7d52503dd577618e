"""What the metrics learn of an answer: counted where the engine ends it, so that each counts once, read to its end or
not."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from stillroom.core.request import FinishReason
from stillroom.engine.events import RemoteUsage, TokenEvent
from stillroom.errors import DeadlineExceededError, EngineClosedError, QueueFullError, UsageError
from stillroom.rag.stream import AnswerCollector, AnswerProgress
from stillroom.telemetry.metrics import Metrics

_ABORTED, _FAILED = "aborted", "failed"


class Account:
    """Of one answer. Hears of it in the engine's thread."""

    def __init__(self, metrics: Metrics, collector: AnswerCollector, *, is_first: bool, has_searched: bool) -> None:
        """
        Args:
            is_first: of the answers to a question, the one that counts what they have in common.
            has_searched: false for a prompt that is continued as it is.
        """
        self._metrics = metrics
        self._collector = collector
        self._is_first = is_first
        self._has_searched = has_searched
        self._progress = AnswerProgress(collector.started)

    def hear(self, event: TokenEvent) -> None:
        """The next event; the last one is counted."""
        self._progress.note(event)
        if event.finish_reason is None:
            return
        usage = event.usage or self._progress.usage()
        self._count_answer(usage, self._outcome(event))
        if self._is_first:
            self._count_question(usage)

    def _outcome(self, event: TokenEvent) -> str:
        answer = self._collector.answer
        if answer is not None:  # it ended at a stop string, of which the engine knows nothing
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
            self._metrics.observe_search(timing.retrieval_seconds)
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
    """The engine never hears of answers that are given up in here."""
    try:
        yield
    except (asyncio.CancelledError, DeadlineExceededError):
        for _ in range(num_answers):
            metrics.observe_answer(_ABORTED)
        raise


def _is_fault(error: Exception | None) -> bool:
    """Whether a request was given up for a reason that is neither its own nor that the engine closes or is full."""
    return error is not None and not isinstance(
        error, DeadlineExceededError | EngineClosedError | QueueFullError | UsageError
    )
