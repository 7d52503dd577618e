"""An engine that keeps chunks, and the prompts it is asked, for `bench anywhere` and `bench preloading`.

A prompt is a system prompt, chunks and a question of drawn tokens, the same for every arm and run.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stillroom.backends.assembly import KVCache, kv_shape
from stillroom.backends.local import build_engine
from stillroom.config.settings import ReuseConfig, RuntimeConfig
from stillroom.core.clock import SystemClock
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.models.decoder import Decoder
from stillroom_bench.experiments.anywhere_replies import ANSWER_TOKENS, SYSTEM_TOKENS, Ask, PromptReply
from stillroom_bench.experiments.experiment_options import AnywhereScope


class EngineFixture:
    """An engine, its cache, and a number for each request."""

    def __init__(self, engine: Engine, cache: KVCache) -> None:
        self.engine, self.cache = engine, cache
        self._num_requests = 0

    def allow(self, options: AnywhereOptions | None) -> None:
        self.cache.manager.allow_anywhere(options)

    def leave_device(self) -> None:
        """Everything that is kept goes one tier down."""
        if self.cache.tree is not None:
            self.cache.tree.make_room(self.cache.manager.pool.num_blocks)

    def ask(self, segments: Sequence[Segment]) -> PromptReply:
        start = time.perf_counter()
        self.submit(segments)
        return self.finish(start)

    def submit(self, segments: Sequence[Segment], num_tokens: int = ANSWER_TOKENS) -> None:
        """Ask for so many tokens, and do nothing yet."""
        self._num_requests += 1
        request = Request(
            request_id=RequestId(str(self._num_requests)),
            prompt=SegmentedPrompt(tuple(segments)),
            sampling=SamplingParams(max_tokens=num_tokens),
        )
        self.engine.submit(request)

    def finish(self, start: float) -> PromptReply:
        """Of the only request that is left, with the time since `start` to its first token."""
        seconds = 0.0
        events: list[TokenEvent] = []
        while self.engine.has_work:
            events += self.engine.step()
            seconds = seconds or (time.perf_counter() - start if events else 0.0)
        reuse = events[0].reuse
        assert reuse is not None
        token_ids = tuple(event.token_id for event in events if event.token_id is not None)
        sources = frozenset(segment.source for segment in reuse.segments[1:-1])
        return PromptReply(seconds, token_ids, reuse.num_cached_tokens, reuse.num_recomputed_tokens, sources)


def build_house(  # noqa: PLR0913  plain values, given once
    decoder: Decoder,
    scope: AnywhereScope,
    reuse: ReuseConfig,
    folder: Path | None,
    num_tokens: int,
    *,
    max_num_seqs: int = 32,
    profile: CostProfile | None = None,
) -> EngineFixture:
    """An engine that keeps KV of so many tokens on the device; without a profile it measures one."""
    runtime = RuntimeConfig(
        kv_bytes=num_tokens * kv_shape(decoder).bytes_per_token,
        max_num_batched_tokens=scope.prompt_tokens,
        max_num_seqs=max_num_seqs,
    )
    engine, cache = build_engine(
        decoder, runtime, SystemClock(), reuse=reuse, fingerprint=bytes(32), profile=profile, kv_folder=folder
    )
    return EngineFixture(engine, cache)


def keep_elsewhere(scope: AnywhereScope, ask: Ask) -> None:
    """Each chunk behind another one, and none at its later place alone."""
    for number in range(scope.num_chunks):
        ask([system(scope), chunk(scope, scope.num_chunks), chunk(scope, number), question(scope, 0)])


def shuffled_prompt(scope: AnywhereScope, repetition: int) -> list[Segment]:
    """All chunks in an order of its own, the same for every arm."""
    order = np.random.default_rng([scope.seed, repetition + 100]).permutation(scope.num_chunks).tolist()
    return [system(scope), *(chunk(scope, number) for number in order), question(scope, 1000 + repetition)]


def system(scope: AnywhereScope) -> Segment:
    """The first segment of every prompt."""
    return Segment(SegmentKind.SYSTEM, _tokens(scope, 0, 0, SYSTEM_TOKENS))


def chunk(scope: AnywhereScope, number: int) -> Segment:
    return Segment(SegmentKind.CHUNK, _tokens(scope, 1, number, scope.chunk_tokens), ChunkId(number))


def question(scope: AnywhereScope, number: int) -> Segment:
    return Segment(SegmentKind.QUESTION, _tokens(scope, 2, number, scope.question_tokens))


def _tokens(scope: AnywhereScope, kind: int, number: int, count: int) -> tuple[int, ...]:
    drawn = np.random.default_rng([scope.seed, kind, number + 1000]).integers(0, 250, count)
    return tuple(drawn.tolist())
