"""From a question to a running request: search, prompt, submit. The one place where search and generation meet."""

import asyncio
import queue
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.document import ScoredChunk
from stillroom.core.ids import RequestId, format_chunk_id
from stillroom.core.request import FinishReason, Request, SamplingParams, seed_of_sample
from stillroom.engine.async_engine import Listener
from stillroom.engine.engine import TokenEvent
from stillroom.errors import EmptyKnowledgeBaseError, UsageError
from stillroom.rag.answer import Answer, AskOptions, Source
from stillroom.rag.generator import Generator
from stillroom.rag.query_cache import QueryCache
from stillroom.rag.stream import AnswerCollector, AnswerStream, AsyncAnswerStream, Started
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.telemetry.metrics import Metrics

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Sample:
    """One answer that is about to be generated."""

    request: Request
    collector: AnswerCollector
    cancel: Callable[[], None]


class Pipeline:
    """Answers questions from one knowledge base with one generator. Thread-safe."""

    def __init__(
        self,
        kb: KnowledgeBase,
        search: QueryCache,
        generator: Generator,
        config: StillroomConfig,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._kb = kb
        self._search = search
        self._generator = generator
        self._config = config
        self._metrics = metrics
        self._clock = clock

    def streams(self, question: str, options: AskOptions, num_samples: int = 1) -> list[AnswerStream]:
        """Search once and start generating answers; the pieces are read in the caller's threads.

        Raises:
            UsageError: the question is empty, an option is out of range, or the prompt does not fit the model.
            EmptyKnowledgeBaseError: there is nothing to search.
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
        loop = asyncio.get_running_loop()
        samples = await asyncio.to_thread(self._prepare, question, options, num_samples)
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
        schema = options.json_schema
        constraint = None if schema is None else self._generator.constraints.compile(schema)
        defaults = self._config.search
        top_k = defaults.top_k if options.top_k is None else options.top_k
        found = self._search.search(question, options.mode or defaults.mode, top_k).results
        retrieved_at = self._clock.monotonic()
        reserved = options.max_tokens or min(self._config.generation.max_tokens, self._generator.max_model_len // 4)
        prompt = self._generator.prompts.build(
            [scored.chunk for scored in found], question, self._generator.max_model_len - reserved
        )
        num_sources = sum(segment.chunk_id is not None for segment in prompt.segments)
        request = Request(
            request_id=RequestId(f"req-{uuid.uuid4().hex[:16]}"),
            prompt=prompt,
            sampling=self._sampling(options, prompt.num_tokens),
            stop_token_ids=self._generator.model.stop_token_ids,
            constraint=constraint,
        )
        started = Started(
            request_id=request.request_id,
            arrival=arrival,
            retrieval_seconds=retrieved_at - arrival,
            sources=_sources(found[:num_sources]),
            num_prompt_tokens=prompt.num_tokens,
        )
        return [self._sample(started, request, options, index) for index in range(num_samples)]

    def _sample(self, started: Started, request: Request, options: AskOptions, index: int) -> "_Sample":
        """The `index`-th answer to a question: its own name and seed, and only the first computes the prompt."""
        if index > 0:
            request_id = RequestId(f"{request.request_id}-{index}")
            seed = seed_of_sample(request.sampling.seed, index)
            request = replace(request, request_id=request_id, sampling=replace(request.sampling, seed=seed))
            started = replace(started, request_id=request_id, num_cached_tokens=started.num_prompt_tokens)
        stops = (options.stop,) if isinstance(options.stop, str) else options.stop
        if not all(stops):
            raise UsageError("stop holds an empty text, which is everywhere; leave it out")
        collector = AnswerCollector(started, self._generator.model.tokenizer, stops, self._record)
        return _Sample(request, collector, lambda: self._generator.engine.cancel(request.request_id))

    def _sampling(self, options: AskOptions, num_prompt_tokens: int) -> SamplingParams:
        """The question's own settings over the configured ones. A default max_tokens is cut to what the model has
        left."""
        defaults = self._config.generation
        room = max(1, self._generator.max_model_len - num_prompt_tokens)
        vocab_size = self._generator.model.decoder.spec.vocab_size
        unknown = [token_id for token_id in options.logit_bias if not 0 <= token_id < vocab_size]
        if unknown:
            raise UsageError(f"logit_bias names token {unknown[0]}; the model has tokens 0 to {vocab_size - 1}")

        def chosen(own: T | None, default: T) -> T:
            return default if own is None else own

        return SamplingParams(
            max_tokens=chosen(options.max_tokens, min(defaults.max_tokens, room)),
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

        first, *others = (
            (sample.request, watched(sample, listener)) for sample, listener in zip(samples, listeners, strict=True)
        )
        self._generator.engine.submit(*first, *others)

    def _record(self, answer: Answer) -> None:
        self._metrics.observe_request(
            outcome=answer.finish_reason,
            retrieval_seconds=answer.timing.retrieval_seconds,
            ttft_seconds=answer.timing.ttft_seconds,
            tpot_seconds=answer.timing.tpot_seconds,
            total_seconds=answer.timing.total_seconds,
            num_prompt_tokens=answer.reuse.num_prompt_tokens,
            num_cached_tokens=answer.reuse.num_cached_tokens,
            num_generated_tokens=len(answer.token_ids),
        )

    def _publish_load(self) -> None:
        engine = self._generator.engine
        self._metrics.set_kv_blocks(engine.num_free_blocks, engine.num_blocks - engine.num_free_blocks)
        self._metrics.set_requests(engine.num_waiting, engine.num_running)


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
