"""From a question to a running request: search, prompt, submit. The one place where search and generation meet."""

import asyncio
import queue
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.document import ScoredChunk
from stillroom.core.ids import RequestId, format_chunk_id
from stillroom.core.request import FinishReason, SamplingParams, seed_of_sample
from stillroom.engine.events import Listener, TokenEvent
from stillroom.errors import EmptyKnowledgeBaseError, UsageError
from stillroom.rag.answer import Answer, AskOptions, Source, trace_of
from stillroom.rag.backend import Backend, Draft, Sample
from stillroom.rag.query_cache import QueryCache
from stillroom.rag.stream import AnswerCollector, AnswerStream, AsyncAnswerStream, Started
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.telemetry.metrics import Metrics
from stillroom.telemetry.trace import TraceLog

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Sample:
    """One answer that is about to be generated."""

    draft: Draft
    sampling: SamplingParams
    collector: AnswerCollector
    cancel: Callable[[], None]
    priority: int
    deadline: float | None


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
        self._config = config
        self._metrics = metrics
        self._traces = traces
        self._clock = clock

    def streams(self, question: str, options: AskOptions, num_samples: int = 1) -> list[AnswerStream]:
        """Search once and start generating answers; the pieces are read in the caller's threads.

        Raises:
            UsageError: the question is empty, an option is out of range, or the prompt does not fit the model.
            EmptyKnowledgeBaseError: there is nothing to search.
            QueueFullError: as many questions wait as may.
        """
        samples = self._prepare(question, options, num_samples)
        queues: list[queue.SimpleQueue[TokenEvent]] = [queue.SimpleQueue() for _ in samples]
        self._submit(samples, [events.put for events in queues])
        return [
            AnswerStream(sample.collector, events, sample.cancel)
            for sample, events in zip(samples, queues, strict=True)
        ]

    async def astreams(self, question: str, options: AskOptions, num_samples: int = 1) -> list[AsyncAnswerStream]:
        """The same for an event loop: the search runs in a thread. Raises as `streams`."""
        return self._astreams(await asyncio.to_thread(self._prepare, question, options, num_samples))

    async def acontinue(self, prompt: str | Sequence[int], options: AskOptions) -> AsyncAnswerStream:
        """Continue a prompt as it is, without any search.

        Raises:
            UsageError: the prompt or an option is not possible.
        """
        arrival = self._clock.monotonic()
        draft = self._backend.draft_raw(prompt)
        return self._astreams(self._samples("", draft, options, arrival, arrival, [], 1))[0]

    def _astreams(self, samples: list["_Sample"]) -> list[AsyncAnswerStream]:
        loop = asyncio.get_running_loop()
        queues: list[asyncio.Queue[TokenEvent]] = [asyncio.Queue() for _ in samples]

        def deliver_to(events: asyncio.Queue[TokenEvent]) -> Listener:
            def deliver(event: TokenEvent) -> None:
                loop.call_soon_threadsafe(events.put_nowait, event)

            return deliver

        self._submit(samples, [deliver_to(events) for events in queues])
        return [
            AsyncAnswerStream(sample.collector, events, sample.cancel)
            for sample, events in zip(samples, queues, strict=True)
        ]

    def _prepare(self, question: str, options: AskOptions, num_samples: int) -> list["_Sample"]:
        if num_samples < 1:
            raise UsageError(f"n={num_samples}; it must be at least 1")
        arrival = self._clock.monotonic()
        if not question.strip():
            raise UsageError("the question is empty")
        if self._kb.num_chunks == 0:
            raise EmptyKnowledgeBaseError(
                "the knowledge base is empty; add documents first: stillroom add PATH --kb DIR"
            )
        defaults = self._config.search
        top_k = defaults.top_k if options.top_k is None else options.top_k
        found = self._search.search(question, options.mode or defaults.mode, top_k).results
        retrieved_at = self._clock.monotonic()
        chunks = [scored.chunk for scored in found]
        draft = self._backend.draft(chunks, question, self._room_for_prompt(options), options.json_schema)
        return self._samples(question, draft, options, arrival, retrieved_at, found, num_samples)

    def _room_for_prompt(self, options: AskOptions) -> int | None:
        limit = self._backend.max_model_len
        if limit is None:
            return None
        return limit - (options.max_tokens or min(self._config.generation.max_tokens, limit // 4))

    def _samples(  # noqa: PLR0913  all that is known of a question
        self,
        question: str,
        draft: Draft,
        options: AskOptions,
        arrival: float,
        retrieved_at: float,
        found: Sequence[ScoredChunk],
        num_samples: int,
    ) -> list["_Sample"]:
        by_id = {scored.chunk.chunk_id: scored for scored in found}
        started = Started(
            request_id=RequestId(f"req-{uuid.uuid4().hex[:16]}"),
            arrival=arrival,
            retrieval_seconds=retrieved_at - arrival,
            sources=_sources([by_id[chunk_id] for chunk_id in draft.chunk_ids]),
            num_prompt_tokens=draft.num_tokens,
        )
        return [self._sample(question, started, draft, options, index) for index in range(num_samples)]

    def _sample(self, question: str, started: Started, draft: Draft, options: AskOptions, index: int) -> "_Sample":
        """The `index`-th answer to a question: its own name and seed, and only the first computes the prompt."""
        sampling = self._sampling(options, draft.num_tokens)
        if index > 0:
            request_id = RequestId(f"{started.request_id}-{index}")
            sampling = replace(sampling, seed=seed_of_sample(sampling.seed, index))
            started = replace(started, request_id=request_id)
        stops = (options.stop,) if isinstance(options.stop, str) else options.stop
        if not all(stops):
            raise UsageError("stop holds an empty text, which is everywhere; leave it out")
        if options.deadline_seconds is not None and not 0 < options.deadline_seconds < float("inf"):
            raise UsageError(f"deadline_seconds={options.deadline_seconds}; it must be a positive number")
        collector = AnswerCollector(
            started, self._backend.tokenizer, stops, lambda answer: self._record(question, answer)
        )
        deadline = None if options.deadline_seconds is None else started.arrival + options.deadline_seconds
        cancel = partial(self._backend.cancel, started.request_id)
        return _Sample(draft, sampling, collector, cancel, options.priority, deadline)

    def _sampling(self, options: AskOptions, num_prompt_tokens: int | None) -> SamplingParams:
        """The question's own settings over the configured ones. A default max_tokens is cut to what the model has
        left."""
        defaults = self._config.generation
        limit = self._backend.max_model_len
        max_tokens = defaults.max_tokens
        if limit is not None and num_prompt_tokens is not None:
            max_tokens = min(max_tokens, max(1, limit - num_prompt_tokens))

        def chosen(own: T | None, default: T) -> T:
            return default if own is None else own

        return SamplingParams(
            max_tokens=chosen(options.max_tokens, max_tokens),
            min_tokens=options.min_tokens,
            temperature=chosen(options.temperature, defaults.temperature),
            top_k=chosen(options.sample_top_k, defaults.sample_top_k),
            top_p=chosen(options.top_p, defaults.top_p),
            min_p=chosen(options.min_p, defaults.min_p),
            repetition_penalty=chosen(options.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=chosen(options.presence_penalty, defaults.presence_penalty),
            frequency_penalty=chosen(options.frequency_penalty, defaults.frequency_penalty),
            logit_bias=options.logit_bias,
            logprobs=options.logprobs,
            seed=chosen(options.seed, defaults.seed),
        )

    def _submit(self, samples: list["_Sample"], listeners: Sequence[Listener]) -> None:
        def watched(sample: _Sample, listener: Listener) -> Listener:
            def listen(event: TokenEvent) -> None:
                self._publish_load()
                # an answer that ended at a stop string was counted then
                if event.finish_reason is FinishReason.ABORTED and sample.collector.answer is None:
                    self._metrics.count_aborted()
                listener(event)

            return listen

        samples[0].draft.start(
            [
                Sample(
                    sample.collector.started.request_id,
                    sample.sampling,
                    watched(sample, listener),
                    sample.priority,
                    sample.deadline,
                )
                for sample, listener in zip(samples, listeners, strict=True)
            ]
        )

    def _record(self, question: str, answer: Answer) -> None:
        self._traces.add(answer.request_id, self._clock.unix(), trace_of(question, self._backend.name, answer))
        self._metrics.observe_request(
            outcome=answer.finish_reason,
            retrieval_seconds=answer.timing.retrieval_seconds,
            ttft_seconds=answer.timing.ttft_seconds,
            tpot_seconds=answer.timing.tpot_seconds,
            total_seconds=answer.timing.total_seconds,
            num_prompt_tokens=answer.reuse.num_prompt_tokens,
            num_cached_tokens=answer.reuse.num_cached_tokens,
            num_generated_tokens=answer.num_generated_tokens,
        )

    def _publish_load(self) -> None:
        load = self._backend.load
        self._metrics.set_kv_blocks(load.num_free_blocks, load.num_blocks - load.num_free_blocks)
        self._metrics.set_requests(load.num_waiting, load.num_running)


def _sources(found: Sequence[ScoredChunk]) -> tuple[Source, ...]:
    return tuple(
        Source(
            document=scored.chunk.document_id,
            chunk_id=format_chunk_id(scored.chunk.chunk_id),
            text=scored.chunk.text,
            score=scored.score,
            scores=dict(scored.scores),
            position=position,
            heading=scored.chunk.heading,
            start_line=scored.chunk.start_line,
            end_line=scored.chunk.end_line,
        )
        for position, scored in enumerate(found, start=1)
    )
