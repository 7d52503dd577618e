"""Engine fixture, prompts and replies of `bench anywhere` and `bench preloading`.

A prompt is a system prompt, chunks and a question of random tokens, the same for every arm and run.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.backends.assembly import KVCache, kv_shape
from stillroom.backends.engine_building import build_engine
from stillroom.config.settings import PrepareConfig, ReuseConfig, RuntimeConfig
from stillroom.core.clock import SystemClock
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.models.causal_model import CausalModel
from stillroom_bench.experiments.experiment_options import SYSTEM_TOKENS, AnywhereBenchOptions

ANSWER_TOKENS = 4


@dataclass(frozen=True, slots=True)
class PromptReply:
    """The reply to one prompt."""

    seconds: float
    """Time to first token."""
    token_ids: tuple[int, ...]
    num_cached: int
    """Prompt tokens that were not computed; for a peer, all cached tokens, including recomputed ones."""
    num_recomputed: int = 0
    sources: frozenset[Tier | None] = frozenset()
    """Tiers that the chunks were loaded from."""


Ask = Callable[[Sequence[Segment]], PromptReply]


@dataclass(slots=True)
class Answers:
    """Replies of each arm, to compare with those of a full prefill by the same runtime."""

    found: dict[str, dict[int, PromptReply]] = field(default_factory=dict)

    def add(self, arm: str, repetition: int, reply: PromptReply) -> None:
        if repetition >= 0:
            self.found.setdefault(arm, {})[repetition] = reply

    def rows(self, references: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return a row of agreement per arm.

        Args:
            references: arm -> arm that answers the same prompts with a full prefill.
        """
        return [
            {"arm": arm} | agreement([(self.found[full][at], reply) for at, reply in self.found[arm].items()])
            for arm, full in references.items()
        ]


def agreement(pairs: Sequence[tuple[PromptReply, PromptReply]]) -> dict[str, str]:
    """Count the replies whose first token, and those whose every token, equals the full prefill's."""
    first = sum(full.token_ids[0] == reply.token_ids[0] for full, reply in pairs)
    whole = sum(full.token_ids == reply.token_ids for full, reply in pairs)
    return {"same first token": f"{first} of {len(pairs)}", f"same {ANSWER_TOKENS} tokens": f"{whole} of {len(pairs)}"}


class BenchEngine:
    """An engine with its KV cache that answers one prompt at a time."""

    def __init__(self, engine: Engine, cache: KVCache) -> None:
        self.engine, self.cache = engine, cache
        self._num_requests = 0

    def allow(self, options: AnywhereOptions | None) -> None:
        self.cache.manager.allow_anywhere(options)

    def evict_from_device(self) -> None:
        """Evict all cached KV from the device to the tier below."""
        if self.cache.tree is not None:
            self.cache.tree.make_room(self.cache.manager.pool.num_blocks)

    def ask(self, segments: Sequence[Segment]) -> PromptReply:
        start = time.perf_counter()
        self.submit(segments)
        return self.finish(start)

    def finish_idle_work(self) -> None:
        """Store KV on disk and compute preparing prompts until nothing is left to do while the engine is idle."""
        while self.engine.do_idle_work() or self.engine.has_work:
            self.engine.step()

    def submit(self, segments: Sequence[Segment], num_tokens: int = ANSWER_TOKENS) -> None:
        """Submit a prompt without running a step."""
        self._num_requests += 1
        request = Request(
            request_id=RequestId(str(self._num_requests)),
            prompt=SegmentedPrompt(tuple(segments)),
            sampling=SamplingParams(max_tokens=num_tokens),
        )
        self.engine.submit(request)

    def finish(self, start: float) -> PromptReply:
        """Run the only remaining request to its end; its time to first token is measured from `start`."""
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


def build_fixture(  # noqa: PLR0913  plain values, given once
    decoder: CausalModel,
    options: AnywhereBenchOptions,
    reuse: ReuseConfig,
    folder: Path | None,
    num_tokens: int,
    *,
    max_num_seqs: int = 32,
    profile: CostProfile | None = None,
    prepare: PrepareConfig | None = None,
) -> BenchEngine:
    """Build an engine with device memory for `num_tokens` tokens of KV; without a cost profile it measures one."""
    runtime = RuntimeConfig(
        kv_bytes=num_tokens * kv_shape(decoder).bytes_per_token,
        max_num_batched_tokens=options.prompt_tokens,
        max_num_seqs=max_num_seqs,
    )
    engine, cache = build_engine(
        decoder,
        runtime,
        SystemClock(),
        reuse=reuse,
        fingerprint=bytes(32),
        profile=profile,
        kv_folder=folder,
        prepare=prepare,
    )
    return BenchEngine(engine, cache)


def cache_in_other_context(options: AnywhereBenchOptions, ask: Ask) -> None:
    """Compute the KV of each chunk behind an additional chunk, so that no later prompt has it as an exact prefix."""
    for number in range(options.num_chunks):
        ask([system(options), chunk(options, options.num_chunks), chunk(options, number), question(options, 0)])


def shuffled_prompt(options: AnywhereBenchOptions, repetition: int) -> list[Segment]:
    """Return a prompt of all chunks in an order that depends on the repetition, the same for every arm."""
    order = np.random.default_rng([options.seed, repetition + 100]).permutation(options.num_chunks).tolist()
    return [system(options), *(chunk(options, number) for number in order), question(options, 1000 + repetition)]


def system(options: AnywhereBenchOptions) -> Segment:
    """The first segment of every prompt."""
    return Segment(SegmentKind.SYSTEM, _tokens(options, 0, 0, SYSTEM_TOKENS))


def chunk(options: AnywhereBenchOptions, number: int) -> Segment:
    return Segment(SegmentKind.CHUNK, _tokens(options, 1, number, options.chunk_tokens), ChunkId(number))


def question(options: AnywhereBenchOptions, number: int) -> Segment:
    return Segment(SegmentKind.QUESTION, _tokens(options, 2, number, options.question_tokens))


def _tokens(options: AnywhereBenchOptions, kind: int, number: int, count: int) -> tuple[int, ...]:
    drawn = np.random.default_rng([options.seed, kind, number + 1000]).integers(0, 250, count)
    return tuple(drawn.tolist())
