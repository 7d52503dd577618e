"""From a question to a running request: search, prompt, submit. The one place where search and generation meet."""

import asyncio
import queue
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from stillroom.backends.base import Backend, PreparedPrompt
from stillroom.backends.conversation import alternate, around, history_of
from stillroom.config.settings import SearchMode, StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.document import ScoredChunk, SearchResult
from stillroom.core.ids import RequestId
from stillroom.core.request import MaySee, SampleRequest, SamplingParams, seed_of_sample
from stillroom.engine.deadlines import deadline_error
from stillroom.engine.events import Listener, TokenEvent
from stillroom.errors import (
    EmptyKnowledgeBaseError,
    NothingFoundError,
    PromptTooLongError,
    UsageError,
)
from stillroom.rag.accounting import Account, counting_aborted
from stillroom.rag.answer import NO_LIMIT, Answer, AskOptions, Source, SpeculationOutcome, SpeculationReport, trace_of
from stillroom.rag.query_cache import QueryCache
from stillroom.rag.sources import sources_of
from stillroom.rag.speculation import Attempt, Speculator
from stillroom.rag.stream import AnswerCollector, AnswerStream, AsyncAnswerStream, Started
from stillroom.retrieval.filters.language import parse_filter
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.telemetry.metrics import Metrics
from stillroom.telemetry.spans import current_span
from stillroom.telemetry.trace import TraceLog

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A prompt whose answers are about to be generated, or are already, unheard."""

    attempt: Attempt
    collectors: tuple[AnswerCollector, ...]
    """One per answer."""
    has_searched: bool


class _Preparing:
    """What a thread prepares for somebody who may leave meanwhile: the thread cannot be stopped, what it began can. It
    needs no event loop for that, which may end with whoever leaves."""

    def __init__(self, prepare: Callable[[], _Prepared], discard: Callable[[_Prepared], None]) -> None:
        self._prepare = prepare
        self._discard = discard
        self._lock = threading.Lock()
        self._prepared: _Prepared | None = None
        self._has_left = False

    def run(self) -> _Prepared:
        """In the thread."""
        prepared = self._prepare()
        with self._lock:
            self._prepared = prepared
            is_wanted = not self._has_left
        if not is_wanted:
            self._discard(prepared)
        return prepared

    def leave(self) -> None:
        """Nobody takes what comes, or has come."""
        with self._lock:
            self._has_left = True
            prepared = self._prepared
        if prepared is not None:
            self._discard(prepared)


class Pipeline:
    """Answers questions from one knowledge base with one backend. Thread-safe."""

    def __init__(  # noqa: PLR0913  its parts
        self,
        kb: KnowledgeBase,
        search: QueryCache,
        backend: Backend,
        speculator: Speculator,
        config: StillroomConfig,
        metrics: Metrics,
        traces: TraceLog,
        clock: Clock,
    ) -> None:
        self._kb = kb
        self._search = search
        self._backend = backend
        self._speculator = speculator
        self._config = config
        self._metrics = metrics
        self._traces = traces
        self._clock = clock
        traces.trim()  # `trace.keep` may be less than it was

    def streams(self, question: str, options: AskOptions, num_samples: int = 1) -> list[AnswerStream]:
        """Search once and start generating answers; the pieces are read in the caller's threads.

        Raises:
            UsageError: the question is empty, an option is out of range, or the prompt does not fit the model.
            EmptyKnowledgeBaseError: there is nothing to search.
            NothingFoundError: neither this search nor those of earlier turns found a document. Nothing is generated.
            QueueFullError: as many questions wait as may.
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
        """The same for an event loop: the search runs in a thread. Raises as `streams`.

        Args:
            arrival: when the question came, on the engine's clock. The caller keeps the deadline by cancelling.
        """
        _check(options)
        preparing = _Preparing(
            lambda: self._prepare(question, options, num_samples, arrival),
            lambda prepared: prepared.attempt.cancel(),
        )
        try:
            with counting_aborted(self._metrics, num_samples):
                prepared = await asyncio.to_thread(preparing.run)
        except asyncio.CancelledError:
            preparing.leave()
            raise
        return self._astreams(prepared)

    async def acontinue(
        self, prompt: str | Sequence[int], options: AskOptions, num_samples: int, arrival: float
    ) -> list[AsyncAnswerStream]:
        """Continue a prompt as it is, without any search; so many times. `arrival` as of `astreams`.

        Raises:
            UsageError: the prompt or an option is not possible.
        """
        _check(options)
        with counting_aborted(self._metrics, num_samples):
            prepared = await asyncio.to_thread(self._backend.prepare_raw, prompt, options.json_schema)
        self._check_length(prepared)
        attempt = Attempt(self._backend, prepared, self._samples(prepared, options, arrival, num_samples))
        report = SpeculationReport(SpeculationOutcome.OFF)
        return self._astreams(self._prepared("", attempt, options, arrival, arrival, (), report))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """What tokens read as, without special ones.

        Raises:
            UsageError: a token is none of the model's, or the model is elsewhere.
        """
        if self._backend.tokenizer is None:
            raise UsageError("an engine elsewhere has the tokenizer; give the prompt as text")
        self._backend.prepare_raw(token_ids)  # refuses what is no token
        return self._backend.tokenizer.decode(token_ids)

    def _astreams(self, prepared: _Prepared) -> list[AsyncAnswerStream]:
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

    def _prepare(self, question: str, options: AskOptions, num_samples: int, arrival: float | None = None) -> _Prepared:
        if num_samples < 1:
            raise UsageError(f"n={num_samples}; it must be at least 1")
        arrival = self._clock.monotonic() if arrival is None else arrival
        if not question.strip():
            raise UsageError("the question is empty")
        _check(options)
        if options.deadline_seconds is not None and self._clock.monotonic() > arrival + options.deadline_seconds:
            raise deadline_error()  # it waited for a thread
        if self._kb.num_chunks == 0:
            raise EmptyKnowledgeBaseError(
                "the knowledge base is empty; add documents first: stillroom add PATH --kb DIR"
            )
        defaults = self._config.search
        top_k = defaults.top_k if options.top_k is None else options.top_k
        mode = options.mode or defaults.mode

        def search(text: str) -> Sequence[ScoredChunk]:
            return self._search.search(text, mode, top_k, options.where).results

        def stages(num_stages: int) -> Iterator[SearchResult]:
            for found in self._search.search_staged(question, mode, top_k, num_stages, options.where):
                yield replace(found, results=alternate(found.results, found_around, top_k)) if found_around else found

        history = history_of(options.history, options.system, search, top_k)
        history = replace(history, answer_start=options.answer_start)
        found_around = around(options.history, question, search)
        may_see = self._may_see(options.where)
        room = self._room_for_prompt(options)

        def attempt_with(found: Sequence[ScoredChunk]) -> Attempt:
            chunks = [scored.chunk for scored in found]
            prepared = self._backend.prepare_prompt(chunks, question, room, options.json_schema, history)
            self._check_length(prepared)
            return Attempt(self._backend, prepared, self._samples(prepared, options, arrival, num_samples, may_see))

        found = self._speculator.find(stages, mode, attempt_with)
        sources = sources_of(found.attempt.prepared.chunk_ids, found.result.results, history)
        if not sources:
            found.attempt.cancel()
            was_found = bool(found.result.results) or any(turn.found for turn in history.turns)
            raise (
                _no_room(found.attempt.prepared, self._room_for_prompt(options))
                if was_found
                else _nothing_found(options.where, mode)
            )
        return self._prepared(question, found.attempt, options, arrival, found.ended_at, sources, found.report)

    def _room_for_prompt(self, options: AskOptions) -> int | None:
        limit, most = self._backend.max_model_len, self._config.generation.max_prompt_tokens
        if limit is None:
            return most or None
        default = min(self._config.generation.max_tokens, limit // 4)
        room = limit - (options.max_tokens if options.max_tokens not in (None, 0, NO_LIMIT) else default)
        return min(room, most) if most else room

    def _check_length(self, prepared: PreparedPrompt) -> None:
        most = self._config.generation.max_prompt_tokens
        if most and prepared.num_tokens is not None and prepared.num_tokens > most:
            raise PromptTooLongError(
                f"the prompt has {prepared.num_tokens} tokens; {most} are allowed (generation.max_prompt_tokens)"
            )

    def _may_see(self, where: str) -> MaySee | None:
        """Which documents' KV a question may be answered from: those that its filter allows now, not those that it
        allowed when the KV was computed. None for all."""
        if not where.strip() or not self._config.reuse.allows_any_position:  # a prefix has seen nothing but the prompt
            return None
        allowed = self._kb.allowed(where)
        return lambda chunk_ids: bool(allowed.has(list(chunk_ids)).all())

    def _samples(
        self,
        prepared: PreparedPrompt,
        options: AskOptions,
        arrival: float,
        num_samples: int,
        may_see: MaySee | None = None,
    ) -> list[SampleRequest]:
        """The answers to a prompt: each has its own name and seed, and only the first computes the prompt."""
        name = RequestId(f"req-{uuid.uuid4().hex[:16]}")
        sampling = self._sampling(options, prepared.max_answer_tokens)
        deadline = None if options.deadline_seconds is None else arrival + options.deadline_seconds
        first = SampleRequest(
            request_id=name, sampling=sampling, priority=options.priority, deadline=deadline, may_see=may_see
        )
        others = (
            replace(
                first,
                request_id=RequestId(f"{name}-{index}"),
                sampling=replace(sampling, seed=seed_of_sample(sampling.seed, index)),
            )
            for index in range(1, num_samples)
        )
        return [first, *others]

    def _prepared(  # noqa: PLR0913  all that is known of a question
        self,
        question: str,
        attempt: Attempt,
        options: AskOptions,
        arrival: float,
        retrieved_at: float,
        sources: tuple[Source, ...],
        report: SpeculationReport,
    ) -> _Prepared:
        stops = _stops(options)

        def collector(sample: SampleRequest) -> AnswerCollector:
            started = Started(
                request_id=sample.request_id,
                arrival=arrival,
                retrieval_seconds=retrieved_at - arrival,
                sources=sources,
                num_prompt_tokens=attempt.prepared.num_tokens,
                speculation=report,
            )
            return AnswerCollector(
                started,
                self._backend.tokenizer,
                stops,
                lambda answer: self._record(question, answer),
                attempt.prepared.continues,
            )

        return _Prepared(attempt, tuple(collector(sample) for sample in attempt.samples), has_searched=bool(question))

    def _sampling(self, options: AskOptions, max_answer_tokens: int | None) -> SamplingParams:
        """The question's own settings over the configured ones. A default max_tokens is cut to what there is room for.

        -1 is what clients of vLLM and llama.cpp send for no limit, no `top_k`, a random seed.
        """
        defaults = self._config.generation
        top_k = options.sample_top_k

        def chosen(own: T | None, default: T) -> T:
            return default if own is None else own

        return SamplingParams(
            max_tokens=_num_answer_tokens(options.max_tokens, defaults.max_tokens, max_answer_tokens),
            min_tokens=options.min_tokens,
            temperature=chosen(options.temperature, defaults.temperature),
            top_k=0 if top_k == -1 else chosen(top_k, defaults.sample_top_k),
            top_p=chosen(options.top_p, defaults.top_p),
            min_p=chosen(options.min_p, defaults.min_p),
            repetition_penalty=chosen(options.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=chosen(options.presence_penalty, defaults.presence_penalty),
            frequency_penalty=chosen(options.frequency_penalty, defaults.frequency_penalty),
            logit_bias=options.logit_bias,
            logprobs=options.logprobs,
            seed=secrets.randbits(63) if options.seed == -1 else chosen(options.seed, defaults.seed),
        )

    def _submit(self, prepared: _Prepared, listeners: Sequence[Listener]) -> None:
        def watched(index: int, collector: AnswerCollector, listener: Listener) -> Listener:
            account = Account(self._metrics, collector, is_first=index == 0, has_searched=prepared.has_searched)

            def listen(event: TokenEvent) -> None:
                self._publish_load()
                account.hear(event)
                listener(event)

            return listen

        prepared.attempt.deliver(
            [
                watched(index, collector, listener)
                for index, (collector, listener) in enumerate(zip(prepared.collectors, listeners, strict=True))
            ],
            self._clock.monotonic(),
        )

    def _record(self, question: str, answer: Answer) -> None:
        self._traces.add(answer.request_id, self._clock.unix(), trace_of(question, self._backend.name, answer))
        _trace(answer, self._clock.unix(), self._backend.name)

    def _publish_load(self) -> None:
        load = self._backend.load
        self._metrics.set_kv_blocks(load.num_free_blocks, load.num_blocks - load.num_free_blocks)
        self._metrics.set_requests(load.num_waiting, load.num_running)


def _num_answer_tokens(asked: int | None, default: int, most: int | None) -> int:
    """Most tokens of an answer.

    Args:
        most: what there is room for; None: not known.

    Raises:
        UsageError: all that there is room for is asked for, and that is not known.
    """
    if asked is None:
        return default if most is None else min(default, most)
    if asked != NO_LIMIT:
        return asked
    if most is None:
        raise UsageError("max_tokens=-1: this engine does not say how much room it has; name a number of tokens")
    return most


def _no_room(prepared: PreparedPrompt, room: int | None) -> PromptTooLongError:
    return PromptTooLongError(
        f"no document that was found fits beside the {prepared.num_tokens} tokens of the rest of the prompt: beside "
        f"the answer there is room for {max(room or 0, 0)} tokens; lower max_tokens, shorten the question, or raise "
        "generation.max_prompt_tokens"
    )


def _nothing_found(where: str, mode: SearchMode) -> NothingFoundError:
    allowed = f"of those that the filter allows ({where.strip()})" if where.strip() else "of the knowledge base"
    remedy = "change or leave out the filter" if where.strip() else "ask in other words"
    if mode == "sparse":
        remedy += ", or search by meaning too (mode hybrid)"
    return NothingFoundError(f"no document {allowed} was found for the question, so nothing was generated; {remedy}")


def _check(options: AskOptions) -> None:
    """Before anything is searched or begun."""
    if options.where.strip():
        parse_filter(options.where)
    if not all(_stops(options)):
        raise UsageError("stop holds an empty text, which is everywhere; leave it out")
    if options.deadline_seconds is not None and not 0 < options.deadline_seconds < float("inf"):
        raise UsageError(f"deadline_seconds={options.deadline_seconds}; it must be a positive number")


def _trace(answer: Answer, ended_at: float, model: str) -> None:
    """The answer's phases, below the span of the request that it is for, if there is one."""
    span = current_span()
    if span is None:
        return
    timing = answer.timing
    seconds = {"retrieval": timing.retrieval_seconds, "decode": timing.total_seconds - timing.ttft_seconds}
    for name in ("queue", "load", "prefill"):
        phase = getattr(timing, f"{name}_seconds")
        if phase is not None:
            seconds[name] = phase
    if timing.queue_seconds is None:  # an engine elsewhere: all until the first token is one
        seconds["prefill"] = timing.ttft_seconds - timing.retrieval_seconds
    attributes = {
        "stillroom.request_id": answer.request_id,
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": answer.reuse.num_prompt_tokens,
        "gen_ai.usage.output_tokens": answer.num_generated_tokens,
        "stillroom.cached_tokens": answer.reuse.num_cached_tokens,
    }
    span.add_phases(ended_at - timing.total_seconds, seconds, attributes)


def _stops(options: AskOptions) -> Sequence[str]:
    return (options.stop,) if isinstance(options.stop, str) else options.stop
