"""Answers a question: search, prompt, submit. Search and generation meet here.

The walk of `POST /v1/chat/completions`:

1. The route (server/app.py) calls `Stillroom.astreams` (rag/stillroom.py), which applies the deadline and loads
   the pipeline with the first question (rag/pipeline_loader.py).
2. `Pipeline.astreams` runs `Pipeline._prepare` in a thread, which checks the question and its options.
3. `Speculator.find` (rag/speculation.py) iterates over `QuestionSearch.stages` (rag/question.py). With several hops,
   `HopSearch.find` (rag/hop_reading.py) searches and reads in turn instead.
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
from dataclasses import dataclass, replace

from stillroom.backends.base import Backend, PreparedPrompt
from stillroom.config.settings import SearchMode, StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.document import ScoredChunk, SearchResult
from stillroom.core.ids import DocumentId, RequestId
from stillroom.core.request import MaySee, SampleRequest
from stillroom.engine.deadlines import deadline_error
from stillroom.engine.events import Listener, TokenEvent
from stillroom.errors import EmptyKnowledgeBaseError, PromptTooLongError, UsageError
from stillroom.models.bundled_models import model_warnings
from stillroom.rag.accounting import Account, add_phase_spans, counting_aborted
from stillroom.rag.answer import NO_LIMIT, Answer, AskOptions, Source, SpeculationOutcome, SpeculationReport
from stillroom.rag.answer_collector import AnswerCollector, AnswerStart, Cite
from stillroom.rag.citations import cite
from stillroom.rag.hop_reading import Hold, HopSearch, hop_question
from stillroom.rag.hops import Hop
from stillroom.rag.prompt_tokens import PromptTokenizer
from stillroom.rag.query_cache import QueryCache
from stillroom.rag.question import (
    Asked,
    QuestionSearch,
    check_options,
    history_without_search,
    new_request_id,
    no_room_error,
    nothing_found_error,
    samples_of,
    sources_of,
    stop_strings,
)
from stillroom.rag.records import trace_of
from stillroom.rag.speculation import Attempt, CompletedSearch, Speculator
from stillroom.rag.stream import AnswerStream, AsyncAnswerStream
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.originals import Originals
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
    """Requests of a question that is prepared in a thread; cancels them if the caller has stopped waiting.

    The thread itself cannot be stopped. Cancelling needs no event loop, because the caller's loop may have ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancel_request: Callable[[], None] | None = None
        self._is_cancelled = False

    def hold(self, cancel_request: Callable[[], None]) -> None:
        """Take the function that cancels the latest request. Called in the thread."""
        with self._lock:
            self._cancel_request = cancel_request
            is_cancelled = self._is_cancelled
        if is_cancelled:
            cancel_request()

    def cancel(self) -> None:
        """Cancel the latest request, and those that follow as soon as they are submitted."""
        with self._lock:
            self._is_cancelled = True
            cancel_request = self._cancel_request
        if cancel_request is not None:
            cancel_request()


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
        self._originals = Originals(kb.corpus, config.documents)
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
        prepared = self._prepare(Asked(question, options, num_samples, self._clock.monotonic()))
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
        preparation = _Preparation()
        asked = Asked(question, options, num_samples, arrival)
        try:
            with counting_aborted(self._metrics, num_samples):
                prepared = await asyncio.to_thread(self._prepare, asked, preparation.hold)
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
        asked = Asked("", options, num_samples, arrival)
        return self._astreams(self._prepared(asked, self._unsearched(asked, prepared), ()))

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

    def _prepare(self, asked: Asked, hold: Hold = lambda cancel_request: None) -> _PreparedAnswers:
        """
        Args:
            hold: takes the cancellation of each request that is submitted here, and of the one that is returned.
        """
        question, options = asked.question, asked.options
        self._check(asked)
        self._backend.expect_question()
        if not options.search:
            return self._prepare_chat(asked)
        mode, top_k = options.mode or self._config.search.mode, options.top_k
        top_k = self._config.search.top_k if top_k is None else top_k
        search = QuestionSearch(self._search, question, options, mode, top_k)
        found = self._find(asked, search, mode, hold)
        hold(found.attempt.cancel)
        prompt = found.attempt.prepared
        sources = sources_of(prompt.chunk_ids, found.result.results, search.history)
        if not sources:
            found.attempt.cancel()
            if found.result.results or any(turn.found for turn in search.history.turns):
                raise no_room_error(prompt.num_tokens, self._max_prompt_tokens(options))
            raise nothing_found_error(options.where, mode)
        return self._prepared(asked, found, sources)

    def _find(self, asked: Asked, search: QuestionSearch, mode: SearchMode, hold: Hold) -> CompletedSearch:
        """Search, once or in several hops. Returns what was found with its request, which may be submitted already."""
        may_see = self._may_see(asked.options.where)

        def request(found: Sequence[ScoredChunk], asked: Asked, name: RequestId | None = None) -> Attempt:
            chunks, options = [scored.chunk for scored in found], asked.options
            history = replace(search.history, answer_start=options.answer_start)
            max_tokens = self._max_prompt_tokens(options)
            prepared = self._backend.prepare_prompt(chunks, asked.question, max_tokens, options.json_schema, history)
            return self._attempt(prepared, asked, may_see, name)

        num_hops = self._config.search.hops if asked.options.hops is None else asked.options.hops
        if num_hops == 1:
            return self._speculator.find(search.stages, mode, lambda found: request(found, asked))
        by = hop_question(self._backend, self._config.search.hop_question)
        hops = HopSearch(new_request_id(), asked, by, request, self._backend, self._clock, hold)
        return hops.find(num_hops, search.hop, self._count_hop)

    def _count_hop(self, hop: Hop) -> None:
        self._metrics.count_hop(
            hop.end,
            num_prompt_tokens=hop.num_prompt_tokens,
            num_cached_tokens=hop.num_cached_tokens,
            num_generated=hop.num_generated_tokens,
        )

    def _prepare_chat(self, asked: Asked) -> _PreparedAnswers:
        """A prompt without documents."""
        options = asked.options
        max_tokens, history = self._max_prompt_tokens(options), history_without_search(options)
        if options.tool_chat is not None:
            prepared = self._backend.prepare_tool_chat(options.tool_chat)
        else:
            prepared = self._backend.prepare_chat(asked.question, max_tokens, options.json_schema, history)
        return self._prepared(replace(asked, question=""), self._unsearched(asked, prepared), ())

    def _check(self, asked: Asked) -> None:
        if asked.num_samples < 1:
            raise UsageError(f"n={asked.num_samples}; it must be at least 1")
        if not asked.question.strip():
            raise UsageError("the question is empty")
        check_options(asked.options)
        if asked.deadline is not None and self._clock.monotonic() > asked.deadline:
            raise deadline_error()  # it waited for a thread
        if asked.options.search and self._kb.num_chunks == 0:
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
        asked: Asked,
        may_see: MaySee | None = None,
        name: RequestId | None = None,
    ) -> Attempt:
        """
        Args:
            name: request id; None: a new one.

        Raises:
            PromptTooLongError: the prompt exceeds `generation.max_prompt_tokens`.
        """
        defaults = self._config.generation
        most = defaults.max_prompt_tokens
        if most and prepared.num_tokens is not None and prepared.num_tokens > most:
            raise PromptTooLongError(
                f"the prompt has {prepared.num_tokens} tokens; {most} are allowed (generation.max_prompt_tokens)"
            )
        samples = samples_of(prepared, asked.options, defaults, asked.num_samples, asked.deadline, may_see, name)
        return Attempt(self._backend, prepared, samples)

    def _unsearched(self, asked: Asked, prepared: PreparedPrompt) -> CompletedSearch:
        """The request of a prompt without documents."""
        report = SpeculationReport(SpeculationOutcome.OFF)
        return CompletedSearch(SearchResult(()), asked.arrival, self._attempt(prepared, asked), report)

    def _prepared(self, asked: Asked, found: CompletedSearch, sources: tuple[Source, ...]) -> _PreparedAnswers:
        """
        Args:
            asked: with an empty question if nothing was searched.
        """
        question, options, attempt = asked.question, asked.options, found.attempt
        stops = stop_strings(options)

        def collector(sample: SampleRequest) -> AnswerCollector:
            started = AnswerStart(
                request_id=sample.request_id,
                arrival=asked.arrival,
                retrieval_seconds=found.ended_at - asked.arrival,
                sources=sources,
                num_prompt_tokens=attempt.prepared.num_tokens,
                speculation=found.report,
                warnings=self._warnings,
                call_format=attempt.prepared.call_format,
                hops=found.hops,
            )
            return AnswerCollector(
                started,
                self._backend.tokenizer,
                stops,
                lambda answer: self._record(question, answer, is_kept=options.search),
                attempt.prepared.continues,
                self._cite_for(question, options) if sources and self._config.generation.citations else None,
                self._warn,
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
        embed = (
            None if mode == "sparse" else self._kb.embed_sentences
        )  # a search by words alone does not load the embedder
        return lambda answer: cite(answer.text, answer.sources, embed, question)

    def _warn(self, answer: Answer) -> tuple[str, ...]:
        """Return warnings of cited documents whose file holds something else now."""
        return self._originals.warnings(DocumentId(one.document) for one in answer.citations if one.source)

    def _record(self, question: str, answer: Answer, *, is_kept: bool) -> None:
        if is_kept:
            self._traces.add(answer.request_id, self._clock.unix(), trace_of(question, self._backend.name, answer))
        add_phase_spans(answer, self._clock.unix(), self._backend.name)

    def _publish_load(self) -> None:
        load = self._backend.load
        self._metrics.set_kv_blocks(load.num_free_blocks, load.num_blocks - load.num_free_blocks)
        self._metrics.set_requests(load.num_waiting, load.num_running)
