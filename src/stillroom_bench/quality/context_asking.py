"""Asks questions with KV that was prepared in a given context, by an engine of its own."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from stillroom.answer_quality.answer_metrics import exact_match
from stillroom.backends.assembly import KVCache
from stillroom.backends.engine_building import build_engine, load_configured
from stillroom.backends.prompt_builder import PromptBuilder, format_for
from stillroom.config.settings import PrepareConfig, ReuseConfig, RuntimeConfig
from stillroom.core.clock import SystemClock
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom_bench.quality.context_questions import Before, ContextQuestion, Place


class ContextAsker:
    """An engine whose kept KV is made anew for each question and context."""

    def __init__(self, model: str, dtype: Literal["float32", "bfloat16"], max_tokens: int, bits: int = 16) -> None:
        """
        Args:
            max_tokens: of an answer.
            bits: of each number of prepared KV while it is on the host.

        Raises:
            ModelError: the model cannot be loaded.
        """
        runtime = RuntimeConfig(model=model, device="cpu", dtype=dtype, max_num_batched_tokens=8192)
        self.model = load_configured(runtime)
        self._prompts = PromptBuilder(self.model.tokenizer, format_for(self.model.tokenizer))
        reuse = ReuseConfig(mode="prepared", load="always", disk_bytes=0)
        self._cache: KVCache
        self._engine: Engine
        self._engine, self._cache = build_engine(
            self.model.decoder,
            runtime,
            SystemClock(),
            reuse=reuse,
            fingerprint=self.model.fingerprint,
            profile=linear_profile(1e-3, 1e-4, 1e-7),
            prepare=PrepareConfig(idle_s=0.0, layer_ms=1e6, bits=bits),
        )
        self._max_tokens = max_tokens
        self._num_requests = 0

    @contextmanager
    def placing(self, options: AnywhereOptions | None) -> Iterator[None]:
        """Reuse kept chunks like this; all are forgotten at the end."""
        self._cache.manager.allow_anywhere(options)
        yield
        assert self._cache.tree is not None
        self._cache.tree.forget_chunks(lambda chunk_id: False)

    def prepare(
        self, question: ContextQuestion, places: Sequence[Place], before: Before
    ) -> dict[ChunkId, tuple[ChunkId, ...]]:
        """Prepare the chunks at these places; return what each has in view."""
        found = {}
        for place in places:
            context = [question.chunk(other) for other in before(question, place)]
            chunk = question.chunk(place)
            found[chunk.chunk_id] = tuple(one.chunk_id for one in context)
            self._run([*context, chunk], "", 1, prepares=frozenset({chunk.chunk_id}))
        return found

    def leave_device(self) -> None:
        """Move all kept KV to the host."""
        assert self._cache.tree is not None
        assert self._cache.tree.make_room(self._cache.manager.pool.num_blocks)

    def ask(
        self, question: ContextQuestion, places: Sequence[Place], before: Mapping[ChunkId, tuple[ChunkId, ...]]
    ) -> bool:
        """Whether the answer from the chunks at these places, in this order, is right.

        Args:
            before: what `prepare` returned.
        """
        chunks = [question.chunk(place) for place in places]
        token_ids = self._run(chunks, question.question, self._max_tokens, before=before)
        return bool(exact_match(self.model.tokenizer.decode(token_ids), [question.answer]))

    def _run(
        self,
        chunks: Sequence[Chunk],
        question: str,
        max_tokens: int,
        *,
        before: Mapping[ChunkId, tuple[ChunkId, ...]] | None = None,
        prepares: frozenset[ChunkId] = frozenset(),
    ) -> list[int]:
        self._num_requests += 1
        request = Request(
            request_id=RequestId(f"q{self._num_requests}"),
            prompt=self._prompts.build(chunks, question, None),
            sampling=SamplingParams(max_tokens=max_tokens),
            stop_token_ids=self.model.stop_token_ids,
            before=before or {},
            prepares=prepares,
        )
        self._engine.scheduler.add(request)
        events = []
        while self._engine.has_work:
            events += self._engine.step()
        return [event.token_id for event in events if event.token_id is not None]
