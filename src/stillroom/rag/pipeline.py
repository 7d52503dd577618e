"""Answers a question: search, prompt, submit. Search and generation meet here.

The walk of `POST /v1/chat/completions`:

1. The route (server/app.py) calls `Stillroom.astreams` (rag/stillroom.py), which applies the deadline and loads
   the pipeline with the first question (rag/pipeline_loader.py).
2. `Pipeline.astreams` runs `Pipeline._prepare` in a thread, which checks the question and its options.
3. `Speculator.find` (rag/speculation.py) iterates over `QuestionSearch.stages` (rag/question.py).
4. `QueryCache.search_staged` (rag/query_cache.py) returns a cached result, or calls `KnowledgeBase.search_staged`
   (retrieval/knowledge_base.py), which calls `HybridSearch.search_staged` (retrieval/hybrid.py).
5. `Backend.prepare_prompt` (backends/local.py) builds the prompt for the chunks found; `samples_of` its samples.
6. `Attempt.deliver` (rag/speculation.py) calls `Backend.start`, which submits one `Request` per sample to the engine.
7. The engine calls the listener for each token; `AnswerCollector.feed` (rag/stream.py) makes text and the `Answer`.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stillroom.backends.base import Backend, PreparedPrompt
from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.document import ScoredChunk
from stillroom.core.request import MaySee, SampleRequest
from stillroom.engine.deadlines import deadline_error
from stillroom.engine.events import Listener, TokenEvent
from stillroom.errors import EmptyKnowledgeBaseError, PromptTooLongError, UsageError
from stillroom.models.bundled_models import model_warnings
from stillroom.rag.accounting import Account, add_phase_spans, counting_aborted
from stillroom.rag.answer import NO_LIMIT, Answer, AskOptions, Source, SpeculationOutcome, SpeculationReport, trace_of
from stillroom.rag.answer_collector import AnswerCollector, AnswerStart, Cite
from stillroom.rag.citations import cite
from stillroom.rag.prompt_tokens import PromptTokenizer
from stillroom.rag.query_cache import QueryCache
from stillroom.rag.question import (
    QuestionSearch,
    check_options,
    history_without_search,
    no_room_error,
    nothing_found_error,
    samples_of,
    sources_of,
    stop_strings,
)
from stillroom.rag.speculation import Attempt, Speculator
from stillroom.rag.stream import AnswerStream, AsyncAnswerStream
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.telemetry.metrics import Metrics
from stillroom.telemetry.trace import TraceLog


@dataclass(frozen=True, slots=True)
class _PreparedAnswers:
    """A prompt, submitted or not, with a collector for each of its samples."""

    attempt: Attempt
    collectors: tuple[AnswerCollector, ...]
    has_searched: bool
    """False for a prompt that is continued without a search."""


class _Preparation:
    """Prepares answers in a thread, and cancels them if the caller has stopped waiting.

    The thread itself cannot be stopped. Cancelling needs no event loop, because the caller's loop may have ended.
    """

    def __init__(self, prepare: Callable[[], _PreparedAnswers]) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._prepared: _PreparedAnswers | None = None
        self._is_cancelled = False

    def run(self) -> _PreparedAnswers:
        """Runs in the thread."""
        prepared = self._prepare()
        with self._lock:
            self._prepared = prepared
            is_cancelled = self._is_cancelled
        if is_cancelled:
            prepared.attempt.cancel()
        return prepared

    def cancel(self) -> None:
        """Cancel what is prepared, now or as soon as it is."""
        with self._lock:
            self._is_cancelled = True
            prepared = self._prepared
        if prepared is not None:
            prepared.attempt.cancel()


class Pipeline:
    """Answers questions from one knowledge base with one backend. Thread-safe."""

    def __init__(  # noqa: PLR0913  its parts
        self,
        kb: KnowledgeBase,
        search: QueryCache,
        backend: Backend,
        config: StillroomConfig,
        metrics: Metrics,
        traces: TraceLog,
        clock: Clock,
    ) -> None:
        self._kb = kb
        self._search = search
        self._backend = backend
        self._speculator = Speculator(backend, config.speculation, clock, metrics)
        self._config = config
        self._metrics = metrics
        self._traces = traces
        self._clock = clock
        self._warnings = model_warnings(backend.name)
        self.tokens = PromptTokenizer(backend)
        self.knows_tools = backend.call_format is not None
        traces.trim()  # `trace.keep` may be lower than in the last session

    def streams(self, question: str, options: AskOptions, num_samples: int = 1) -> list[AnswerStream]:
        """Search once and start generating answers; the caller's threads read the pieces.

        Raises:
            UsageError: the question is empty, an option is out of range, or the prompt does not fit the model.
            EmptyKnowledgeBaseError: there is nothing to search.
            NothingFoundError: neither this search nor those of earlier turns found a document. Nothing is generated.
            QueueFullError: the engine's queue is full.
        """
        prepared = self._prepare(question, options, num_samples)
        queues: list[queue.SimpleQueue[TokenEvent]] = [queue.SimpleQueue() for _ in prepared.collectors]
        self._submit(prepared, [events.put for events in queues])
        return [
            AnswerStream(collector, events, self._cancel_of(collector))
            for collector, events in zip(prepared.collectors, queues, strict=True)
        ]

    async def astreams(
        self, question: str, options: AskOptions, num_samples: int, arrival: float
    ) -> list[AsyncAnswerStream]:
        """`streams` for an event loop: the search runs in a thread. Raises as `streams`.

        Args:
            arrival: when the question arrived, on the engine's clock. The caller enforces the deadline of the search by
                cancelling.
        """
        check_options(options)
        preparation = _Preparation(lambda: self._prepare(question, options, num_samples, arrival))
        try:
            with counting_aborted(self._metrics, num_samples):
                prepared = await asyncio.to_thread(preparation.run)
        except asyncio.CancelledError:
            preparation.cancel()
            raise
        return self._astreams(prepared)

    async def acontinue(
        self, prompt: str | Sequence[int], options: AskOptions, num_samples: int, arrival: float
    ) -> list[AsyncAnswerStream]:
        """Continue a prompt `num_samples` times, without a search. `arrival` as in `astreams`.

        Raises:
            UsageError: the prompt or an option is invalid.
        """
        check_options(options)
        with counting_aborted(self._metrics, num_samples):
            prepared = await asyncio.to_thread(self._backend.prepare_raw, prompt, options.json_schema)
        attempt = self._attempt(prepared, options, num_samples, arrival)
        report = SpeculationReport(SpeculationOutcome.OFF)
        return self._astreams(self._prepared("", attempt, options, arrival, arrival, (), report))

    def _astreams(self, prepared: _PreparedAnswers) -> list[AsyncAnswerStream]:
        loop = asyncio.get_running_loop()
        queues: list[asyncio.Queue[TokenEvent]] = [asyncio.Queue() for _ in prepared.collectors]

        def deliver_to(events: asyncio.Queue[TokenEvent]) -> Listener:
            def deliver(event: TokenEvent) -> None:
                loop.call_soon_threadsafe(events.put_nowait, event)

            return deliver

        self._submit(prepared, [deliver_to(events) for events in queues])
        return [
            AsyncAnswerStream(collector, events, self._cancel_of(collector))
            for collector, events in zip(prepared.collectors, queues, strict=True)
        ]

    def _cancel_of(self, collector: AnswerCollector) -> Callable[[], None]:
        return lambda: self._backend.cancel(collector.started.request_id)

    def _prepare(
        self, question: str, options: AskOptions, num_samples: int, arrival: float | None = None
    ) -> _PreparedAnswers:
        arrival = self._clock.monotonic() if arrival is None else arrival
        self._check(question, options, num_samples, arrival)
        self._backend.expect_question()
        if not options.search:
            return self._prepare_chat(question, options, num_samples, arrival)
        mode, top_k = options.mode or self._config.search.mode, options.top_k
        top_k = self._config.search.top_k if top_k is None else top_k
        search = QuestionSearch(self._search, question, options, mode, top_k)
        may_see, max_tokens = self._may_see(options.where), self._max_prompt_tokens(options)

        def attempt_with(found: Sequence[ScoredChunk]) -> Attempt:
            chunks = [scored.chunk for scored in found]
            prepared = self._backend.prepare_prompt(chunks, question, max_tokens, options.json_schema, search.history)
            return self._attempt(prepared, options, num_samples, arrival, may_see)

        found = self._speculator.find(search.stages, mode, attempt_with)
        prompt = found.attempt.prepared
        sources = sources_of(prompt.chunk_ids, found.result.results, search.history)
        if not sources:
            found.attempt.cancel()
            if found.result.results or any(turn.found for turn in search.history.turns):
                raise no_room_error(prompt.num_tokens, max_tokens)
            raise nothing_found_error(options.where, mode)
        return self._prepared(question, found.attempt, options, arrival, found.ended_at, sources, found.report)

    def _prepare_chat(self, question: str, options: AskOptions, num_samples: int, arrival: float) -> _PreparedAnswers:
        """A prompt without documents."""
        max_tokens, history = self._max_prompt_tokens(options), history_without_search(options)
        if options.tool_chat is not None:
            prepared = self._backend.prepare_tool_chat(options.tool_chat)
        else:
            prepared = self._backend.prepare_chat(question, max_tokens, options.json_schema, history)
        attempt = self._attempt(prepared, options, num_samples, arrival)
        report = SpeculationReport(SpeculationOutcome.OFF)
        return self._prepared("", attempt, options, arrival, arrival, (), report)

    def _check(self, question: str, options: AskOptions, num_samples: int, arrival: float) -> None:
        if num_samples < 1:
            raise UsageError(f"n={num_samples}; it must be at least 1")
        if not question.strip():
            raise UsageError("the question is empty")
        check_options(options)
        if options.deadline_seconds is not None and self._clock.monotonic() > arrival + options.deadline_seconds:
            raise deadline_error()  # it waited for a thread
        if options.search and self._kb.num_chunks == 0:
            raise EmptyKnowledgeBaseError(
                "the knowledge base is empty; add documents first: stillroom add PATH --kb DIR, or POST /v1/documents"
            )

    def _max_prompt_tokens(self, options: AskOptions) -> int | None:
        """Most tokens of a prompt that leaves room for the answer; None: no limit is known."""
        limit, most = self._backend.max_model_len, self._config.generation.max_prompt_tokens
        if limit is None:
            return most or None
        default = min(self._config.generation.max_tokens, limit // 4)
        room = limit - (options.max_tokens if options.max_tokens not in (None, 0, NO_LIMIT) else default)
        return min(room, most) if most else room

    def _may_see(self, where: str) -> MaySee | None:
        """Which documents' KV a question may be answered from: those that its filter allows now, not those that were
        allowed when the KV was computed. None for all."""
        if not where.strip() or not self._config.reuse.allows_any_position:  # exact KV has seen nothing but the prompt
            return None
        allowed = self._kb.allowed(where)
        return lambda chunk_ids: bool(allowed.has(list(chunk_ids)).all())

    def _attempt(
        self,
        prepared: PreparedPrompt,
        options: AskOptions,
        num_samples: int,
        arrival: float,
        may_see: MaySee | None = None,
    ) -> Attempt:
        """Raises PromptTooLongError: the prompt exceeds `generation.max_prompt_tokens`."""
        defaults = self._config.generation
        most = defaults.max_prompt_tokens
        if most and prepared.num_tokens is not None and prepared.num_tokens > most:
            raise PromptTooLongError(
                f"the prompt has {prepared.num_tokens} tokens; {most} are allowed (generation.max_prompt_tokens)"
            )
        deadline = None if options.deadline_seconds is None else arrival + options.deadline_seconds
        samples = samples_of(prepared, options, defaults, num_samples, deadline, may_see)
        return Attempt(self._backend, prepared, samples)

    def _prepared(  # noqa: PLR0913  what the collectors need
        self,
        question: str,
        attempt: Attempt,
        options: AskOptions,
        arrival: float,
        retrieved_at: float,
        sources: tuple[Source, ...],
        report: SpeculationReport,
    ) -> _PreparedAnswers:
        stops = stop_strings(options)

        def collector(sample: SampleRequest) -> AnswerCollector:
            started = AnswerStart(
                request_id=sample.request_id,
                arrival=arrival,
                retrieval_seconds=retrieved_at - arrival,
                sources=sources,
                num_prompt_tokens=attempt.prepared.num_tokens,
                speculation=report,
                warnings=self._warnings,
                call_format=attempt.prepared.call_format,
            )
            return AnswerCollector(
                started,
                self._backend.tokenizer,
                stops,
                lambda answer: self._record(question, answer, is_kept=options.search),
                attempt.prepared.continues,
                self._cite_for(question, options) if sources and self._config.generation.citations else None,
            )

        return _PreparedAnswers(attempt, tuple(map(collector, attempt.samples)), has_searched=bool(question))

    def _submit(self, prepared: _PreparedAnswers, listeners: Sequence[Listener]) -> None:
        def counted(index: int, collector: AnswerCollector, listener: Listener) -> Listener:
            account = Account(self._metrics, collector, is_first=index == 0, has_searched=prepared.has_searched)

            def listen(event: TokenEvent) -> None:
                self._publish_load()
                account.note(event)
                listener(event)

            return listen

        prepared.attempt.deliver(
            [
                counted(index, collector, listener)
                for index, (collector, listener) in enumerate(zip(prepared.collectors, listeners, strict=True))
            ],
            self._clock.monotonic(),
        )

    def _cite_for(self, question: str, options: AskOptions) -> Cite | None:
        """Return the function that finds citations. Answers in JSON have none: their text is not made of sentences."""
        if options.json_schema is not None:
            return None
        mode = options.mode or self._config.search.mode
        embed = None if mode == "sparse" else self._kb.embed  # a search by words alone does not load the embedder
        return lambda answer: cite(answer.text, answer.sources, embed, question)

    def _record(self, question: str, answer: Answer, *, is_kept: bool) -> None:
        if is_kept:
            self._traces.add(answer.request_id, self._clock.unix(), trace_of(question, self._backend.name, answer))
        add_phase_spans(answer, self._clock.unix(), self._backend.name)

    def _publish_load(self) -> None:
        load = self._backend.load
        self._metrics.set_kv_blocks(load.num_free_blocks, load.num_blocks - load.num_free_blocks)
        self._metrics.set_requests(load.num_waiting, load.num_running)
