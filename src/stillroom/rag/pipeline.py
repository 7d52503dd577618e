"""From a question to a running request: search, prompt, submit. The one place where search and generation meet."""

import asyncio
import queue
import uuid
from collections.abc import Sequence

from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.document import ScoredChunk
from stillroom.core.ids import RequestId, format_chunk_id
from stillroom.core.request import FinishReason, Request, SamplingParams
from stillroom.engine.async_engine import Listener
from stillroom.engine.engine import TokenEvent
from stillroom.errors import EmptyKnowledgeBaseError, UsageError
from stillroom.models.tokenizer import IncrementalDetokenizer
from stillroom.rag.answer import Answer, AskOptions, Source
from stillroom.rag.generator import Generator
from stillroom.rag.query_cache import QueryCache
from stillroom.rag.stream import AnswerCollector, AnswerStream, AsyncAnswerStream, Started
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.telemetry.metrics import Metrics


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

    def stream(self, question: str, options: AskOptions) -> AnswerStream:
        """Search and start generating; the pieces are read in the caller's thread.

        Raises:
            UsageError: the question is empty, an option is out of range, or the prompt does not fit the model.
            EmptyKnowledgeBaseError: there is nothing to search.
        """
        started, request = self._prepare(question, options)
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self._submit(request, events.put)
        return AnswerStream(self._collect(started), events, lambda: self._cancel(request.request_id))

    async def astream(self, question: str, options: AskOptions) -> AsyncAnswerStream:
        """The same for an event loop: the search runs in a thread. Raises as `stream`."""
        loop = asyncio.get_running_loop()
        started, request = await asyncio.to_thread(self._prepare, question, options)
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()

        def deliver(event: TokenEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        self._submit(request, deliver)
        return AsyncAnswerStream(self._collect(started), events, lambda: self._cancel(request.request_id))

    def _prepare(self, question: str, options: AskOptions) -> tuple[Started, Request]:
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
        )
        started = Started(
            request_id=request.request_id,
            arrival=arrival,
            retrieval_seconds=retrieved_at - arrival,
            sources=_sources(found[:num_sources]),
            num_prompt_tokens=prompt.num_tokens,
        )
        return started, request

    def _sampling(self, options: AskOptions, num_prompt_tokens: int) -> SamplingParams:
        """The question's own settings over the configured ones. A default max_tokens is cut to what the model has
        left."""
        defaults = self._config.generation
        room = max(1, self._generator.max_model_len - num_prompt_tokens)
        return SamplingParams(
            max_tokens=min(defaults.max_tokens, room) if options.max_tokens is None else options.max_tokens,
            temperature=defaults.temperature if options.temperature is None else options.temperature,
            top_p=defaults.top_p if options.top_p is None else options.top_p,
            seed=defaults.seed if options.seed is None else options.seed,
        )

    def _submit(self, request: Request, listener: Listener) -> None:
        def listen(event: TokenEvent) -> None:
            self._publish_load()
            if event.finish_reason is FinishReason.ABORTED:
                self._metrics.count_aborted()
            listener(event)

        self._generator.engine.submit(request, listen)

    def _cancel(self, request_id: RequestId) -> None:
        self._generator.engine.cancel(request_id)

    def _collect(self, started: Started) -> AnswerCollector:
        return AnswerCollector(started, IncrementalDetokenizer(self._generator.model.tokenizer), self._record)

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
