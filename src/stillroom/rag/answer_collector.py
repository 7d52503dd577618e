"""Turns the token events of one answer into text, times and reports, and with the last event into an `Answer`."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stillroom.backends.tool_chat import CallFormat
from stillroom.core.batch import TokenLogprobs
from stillroom.core.ids import RequestId, format_chunk_id
from stillroom.core.kv import Tier
from stillroom.core.request import Admission, FinishReason, LookupCounts
from stillroom.core.reuse import PromptReuse, Variant
from stillroom.engine.events import Quote, RemoteUsage, Route, TokenEvent
from stillroom.errors import RequestAbortedError
from stillroom.models.tokenizer import IncrementalDetokenizer, Tokenizer
from stillroom.rag.answer import (
    Answer,
    Citation,
    ReuseReport,
    SegmentReport,
    Source,
    SpeculationOutcome,
    SpeculationReport,
    Timing,
    TokenScore,
    VariantReport,
)
from stillroom.rag.hops import Hop
from stillroom.rag.stop_matcher import StopMatcher

logger = logging.getLogger(__name__)

Cite = Callable[[Answer], tuple[Citation, ...]]
Warn = Callable[[Answer], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """Facts of an answer that are known before its first token."""

    request_id: RequestId
    arrival: float
    """When the question arrived, on the engine's clock."""
    retrieval_seconds: float
    sources: tuple[Source, ...]
    num_prompt_tokens: int | None
    """None: the last event tells it."""
    speculation: SpeculationReport = SpeculationReport(SpeculationOutcome.OFF)
    warnings: tuple[str, ...] = ()
    call_format: CallFormat | None = None
    """How the answer writes a call of a tool."""
    hops: tuple[Hop, ...] = ()


class AnswerProgress:
    """Counts and times of an answer, from its events so far."""

    def __init__(self, started: AnswerStart) -> None:
        self._started = started
        self.num_pieces = 0
        """Tokens, or pieces of text from the reader or a server elsewhere."""
        self.reuse: PromptReuse | None = None
        """Set with the first token; stays None if the engine is a server elsewhere."""
        self.first_at: float | None = None
        """Time of the first token, on the engine's clock."""
        self._last_at = started.arrival
        self.lookup = LookupCounts()
        self.route: Route | None = None
        self._admission: Admission | None = None

    def note(self, event: TokenEvent) -> None:
        if event.finish_reason is FinishReason.ABORTED:
            return
        self.num_pieces += event.token_id is not None or bool(event.text)
        self._last_at = event.at
        if self.first_at is None:
            self.first_at = event.at
        self.reuse = event.reuse or self.reuse
        self.lookup = event.lookup or self.lookup
        self._admission = self._admission or event.admission
        self.route = event.route or self.route

    def usage(self) -> RemoteUsage:
        """Counts for engines that send no usage. A piece of text from a server is usually one token."""
        num_cached = self.reuse.num_cached_tokens if self.reuse else 0
        return RemoteUsage(self._started.num_prompt_tokens or 0, num_cached, self.num_pieces)

    def timing(self, num_generated_tokens: int) -> Timing:
        """Times until the last event, `aborted` excluded. A token of speculation counts from the end of the search on,
        because no caller can get it earlier."""
        started = self._started
        retrieved_at = started.arrival + started.retrieval_seconds
        at = max(self._last_at, retrieved_at)
        first = at if self.first_at is None else max(self.first_at, retrieved_at)
        return Timing(
            retrieval_seconds=started.retrieval_seconds,
            ttft_seconds=first - started.arrival,
            tpot_seconds=(at - first) / (num_generated_tokens - 1) if num_generated_tokens > 1 else 0.0,
            total_seconds=at - started.arrival,
            **_phases(self._admission, retrieved_at, first),
        )


class AnswerCollector:
    """Turns token events into pieces of text and, at the end, into an `Answer`."""

    def __init__(  # noqa: PLR0913  its parts
        self,
        started: AnswerStart,
        tokenizer: Tokenizer | None,
        stops: Sequence[str],
        on_finish: Callable[[Answer], None],
        continues: Sequence[int] = (),
        cite: Cite | None = None,
        warn: Warn | None = None,
    ) -> None:
        """
        Args:
            tokenizer: None if the events hold text.
            on_finish: gets the answer when it is complete.
            continues: the last tokens of the text that the answer continues.
            cite: finds the citations of the finished answer, in `complete`; None adds none.
            warn: the same, of warnings about the documents that it cites.
        """
        self.started = started
        self.answer: Answer | None = None
        self.scores: list[TokenScore] = []
        """Log probabilities of the tokens so far, if the request wants them."""
        self.best: Quote | None = None
        """See `TokenEvent.best`."""
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, continues)
        self._matcher = StopMatcher(stops)
        self._on_finish = on_finish
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._progress = AnswerProgress(started)
        self._highlight: tuple[int, int] | None = None
        self._confidence: float | None = None
        self._cite, self._warn = cite, warn
        self._completing = threading.Lock()
        self._is_complete = False

    @property
    def needs_time(self) -> bool:
        """Whether `complete` may take some tens of milliseconds."""
        return self._cite is not None and self.answer is not None and not self._is_complete

    def feed(self, event: TokenEvent) -> str:
        """Return the text that this event completes. At a stop string the answer has all its text.

        Raises:
            EngineError: the request failed or was cancelled.
        """
        if event.finish_reason is FinishReason.ABORTED:
            raise event.error or RequestAbortedError(f"{event.request_id} was cancelled")
        self._progress.note(event)
        self._highlight, self._confidence, self.best = event.highlight, event.confidence, event.best
        piece = self._text(event)
        self._pieces.append(piece)
        reason = FinishReason.STOP if self._matcher.is_matched else event.finish_reason
        if reason is not None:
            self.answer = self._finish(reason, event.usage or self._progress.usage())
            if self._cite is None:
                self.complete()
        return piece

    def complete(self, *, cites: bool = True) -> None:
        """Add the citations to a finished answer and pass it on, once. Not part of `feed`, so that no text waits for
        it. Thread-safe.

        Args:
            cites: False leaves the citations out.
        """
        with self._completing:
            if self.answer is None or self._is_complete:
                return
            self._is_complete = True
            if self._cite is not None and cites:
                try:
                    self.answer = replace(self.answer, citations=self._cite(self.answer))
                    if self._warn is not None:
                        warnings = (*self.answer.warnings, *self._warn(self.answer))
                        self.answer = replace(self.answer, warnings=warnings)
                except Exception:
                    logger.exception(
                        "citations or warnings of %s cannot be found; its text is complete", self.answer.request_id
                    )
            self._on_finish(self.answer)

    def _text(self, event: TokenEvent) -> str:
        piece = event.text
        if event.token_id is not None and self._detokenizer is not None:
            self._token_ids.append(event.token_id)
            piece = self._detokenizer.push([event.token_id])
            if event.logprobs is not None:
                self.scores.append(self._score(event.token_id, event.logprobs))
        if event.finish_reason is None:
            return self._matcher.push(piece)
        rest = "" if self._detokenizer is None else self._detokenizer.flush()
        return self._matcher.push(piece + rest) + self._matcher.flush()

    def _score(self, token_id: int, found: TokenLogprobs) -> TokenScore:
        assert self._tokenizer is not None, "a server elsewhere sends no log probabilities"
        tokenizer = self._tokenizer

        def score(one: int, logprob: float, top: tuple[TokenScore, ...] = ()) -> TokenScore:
            utf8 = tokenizer.token_bytes(one)
            return TokenScore(one, utf8.decode("utf-8", errors="replace"), tuple(utf8), logprob, top)

        return score(token_id, found.logprob, tuple(score(one, logprob) for one, logprob in found.top))

    def _finish(self, reason: FinishReason, usage: RemoteUsage) -> Answer:
        text = "".join(self._pieces)
        return Answer(
            request_id=self.started.request_id,
            text=text,
            token_ids=tuple(self._token_ids),
            finish_reason=reason.value,
            sources=self.started.sources,
            timing=self._progress.timing(usage.num_generated_tokens),
            reuse=_reuse_report(usage, self._progress.reuse),
            num_generated_tokens=usage.num_generated_tokens,
            logprobs=tuple(self.scores) if self.scores else None,
            speculation=self.started.speculation,
            lookup=self._progress.lookup,
            highlight=_within(self._highlight, len(text)),
            confidence=self._confidence,
            warnings=self.started.warnings,
            hops=self.started.hops,
            route=self._progress.route,
        )


def _within(span: tuple[int, int] | None, length: int) -> tuple[int, int] | None:
    """The part of a span in a text that `max_tokens` or a stop string has cut; None if nothing is left of it."""
    return None if span is None or span[0] >= length else (span[0], min(span[1], length))


def _phases(admission: Admission | None, searched_at: float, first_at: float) -> dict[str, float]:
    """Phases between search and first token. Phases that began during the search count from its end."""
    if admission is None:
        return {}
    admitted_at = max(admission.admitted_at, searched_at)
    began_at = max(admission.began_at, admitted_at)
    return {
        "queue_seconds": admitted_at - searched_at,
        "load_seconds": began_at - admitted_at,
        "prefill_seconds": first_at - began_at,
    }


def _reuse_report(usage: RemoteUsage, reuse: PromptReuse | None) -> ReuseReport:
    if reuse is None:
        return ReuseReport(usage.num_prompt_tokens, usage.num_cached_tokens)
    segments = tuple(
        SegmentReport(
            kind=str(segment.kind),
            chunk_id=None if segment.chunk_id is None else format_chunk_id(segment.chunk_id),
            num_tokens=segment.num_tokens,
            source="computed" if segment.source is None else segment.source.label,
            reason=str(segment.reason),
            num_recomputed=segment.num_recomputed,
            variant=None if segment.variant is None else _variant_report(segment.variant),
        )
        for segment in reuse.segments
    )
    return ReuseReport(
        usage.num_prompt_tokens,
        usage.num_cached_tokens,
        num_recomputed_tokens=reuse.num_recomputed_tokens,
        num_device_tokens=reuse.num_tokens_from(Tier.DEVICE),
        num_host_tokens=reuse.num_tokens_from(Tier.HOST),
        num_disk_tokens=reuse.num_tokens_from(Tier.DISK),
        num_network_tokens=reuse.num_tokens_from(Tier.NETWORK),
        load_seconds=reuse.load_seconds,
        saved_seconds=reuse.saved_seconds,
        recompute_ratio=reuse.recompute_ratio,
        segments=segments,
    )


def _variant_report(variant: Variant) -> VariantReport:
    behind = tuple(None if chunk_id is None else format_chunk_id(chunk_id) for chunk_id in variant.behind)
    return VariantReport(**variant._asdict() | {"behind": behind})
