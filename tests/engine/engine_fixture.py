"""`EngineFixture`: an engine with its KV cache on a tiny model, its questions and its oracle."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from stillroom.backends.assembly import KVCache
from stillroom.backends.engine_building import build_engine
from stillroom.config.settings import PrepareConfig, ReuseConfig, RuntimeConfig, TokenSelector
from stillroom.core.batch import Batch, StepResult
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.core.reuse import PromptReuse
from stillroom.engine.audit_comparison import DocumentPrompt
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent
from stillroom.kvcache.tree.cost_model import CostProfile, linear_profile
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvstore.files import size_on_disk
from stillroom.models.causal_model import CausalModel
from tests.fakes import ManualClock

BLOCK = 8
PROFILE = linear_profile(1e-3, 1e-4, 1e-7)
"""A profile without loading costs, so that all kept KV is used."""


class EngineFixture:
    """The engine and cache of one process over a folder of kept KV."""

    def __init__(  # noqa: PLR0913  one parameter per size
        self,
        decoder: CausalModel,
        folder: Path | None,
        *,
        blocks: int = 40,
        host_tokens: int = 80,
        disk_records: int = 12,
        timeout: float = 0.0,
        profile: CostProfile = PROFILE,
        bits: int = 16,
        document_prompt: DocumentPrompt | None = None,
        prompt_lookup: int = 0,
        **changes: Any,
    ) -> None:
        """
        Args:
            disk_records: disk budget, in records of 10 tokens.
            bits: of each number of prepared KV on host and disk.
            changes: fields of the reuse configuration.
        """
        spec = decoder.spec
        self.bytes_per_token = per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
        config = RuntimeConfig(
            block_size=BLOCK,
            kv_bytes=blocks * BLOCK * per_token,
            max_num_seqs=6,
            max_num_batched_tokens=33,
            request_timeout_s=timeout,
            prompt_lookup=prompt_lookup,
        )
        host_bytes, disk_bytes = host_tokens * per_token, disk_records * size_on_disk(10 * per_token)
        reuse = ReuseConfig(host_bytes=host_bytes, disk_bytes=disk_bytes, tail_blocks=1, **changes)
        self.clock = ManualClock()
        self.engine: Engine
        self.cache: KVCache
        self.engine, self.cache = build_engine(
            decoder,
            config,
            self.clock,
            reuse=reuse,
            fingerprint=b"m" * 32,
            profile=profile,
            kv_folder=folder,
            prepare=PrepareConfig(bits=bits),
            document_prompt=document_prompt,
        )
        self.step_seconds = 0.25
        self.waits_for_tier = True
        """Whether a step begins when the threads of a shared tier are idle."""
        self.num_computed = 0
        self._execute = self.engine.runner.execute
        self.engine.runner.execute = self._counting  # type: ignore[method-assign]
        self.tokens: dict[RequestId, list[int]] = {}
        self.last: dict[RequestId, TokenEvent] = {}
        self.reuse: dict[RequestId, PromptReuse] = {}

    def _counting(self, batch: Batch) -> StepResult:
        self.num_computed += sum(entry.num_scheduled_tokens for entry in batch.sequences)
        return self._execute(batch)

    @property
    def tree(self) -> KnowledgeTree:
        assert self.cache.tree is not None
        return self.cache.tree

    def submit(self, *group: Request) -> None:
        for one in group:
            self.tokens[one.request_id] = []
        self.engine.submit(*group)

    def step(self) -> None:
        self.clock.advance(self.step_seconds)
        if self.waits_for_tier and self.cache.tiers is not None and self.cache.tiers.shared is not None:
            assert self.cache.tiers.shared.settle()
        for event in self.engine.step():
            if event.token_id is not None:
                self.tokens[event.request_id].append(event.token_id)
            if event.reuse is not None:
                self.reuse.setdefault(event.request_id, event.reuse)
            if event.finish_reason is not None:
                self.last[event.request_id] = event
        self.engine.check_integrity()

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    def run(self, one: Request) -> tuple[list[int], PromptReuse]:
        self.submit(one)
        self.finish()
        return self.tokens[one.request_id], self.reuse[one.request_id]


def question(name: str, *documents: int, tail: int = 3, max_tokens: int = 6) -> Request:
    """Return a request; document d has its own tokens, 3 + 5d mod 17 of them."""
    segments = [Segment(SegmentKind.SYSTEM, (3, 4, 5, 6, 7))]
    for document in documents:
        ids = tuple(10 + (document * 31 + i * 7) % 280 for i in range(3 + 5 * document % 17))
        segments.append(Segment(SegmentKind.CHUNK, ids, ChunkId(document)))
    segments.append(Segment(SegmentKind.QUESTION, tuple(20 + i % 5 for i in range(tail))))
    return Request(
        request_id=RequestId(name),
        prompt=SegmentedPrompt(tuple(segments)),
        sampling=SamplingParams(max_tokens=max_tokens),
        stop_token_ids=frozenset({1}),
    )


class Oracle:
    """Answers each distinct prompt alone, in an engine without reuse."""

    def __init__(self, decoder: CausalModel) -> None:
        config = RuntimeConfig(block_size=BLOCK, kv_bytes=2**22, max_num_batched_tokens=512)
        self._engine, _ = build_engine(decoder, config, ManualClock())
        self._known: dict[tuple[int, ...], list[int]] = {}

    def answer(self, request: Request) -> list[int]:
        prompt = request.prompt.token_ids
        if prompt not in self._known:
            longest = replace(request, request_id=RequestId("oracle"), sampling=SamplingParams(max_tokens=8))
            self._engine.submit(longest)
            found = []
            while self._engine.has_work:
                found += [event.token_id for event in self._engine.step() if event.token_id is not None]
            self._known[prompt] = found
        return self._known[prompt][: request.sampling.max_tokens]


def without(gone: ChunkId, chunk_ids: set[ChunkId]) -> set[ChunkId]:
    return chunk_ids - {gone}


def damage(folder: Path, randomness: random.Random) -> None:
    """Flip a bit anywhere in a record, or cut it short."""
    records = sorted(folder.rglob("*.kv"))
    if not records:
        return
    path = randomness.choice(records)
    content = bytearray(path.read_bytes())
    if randomness.random() < 0.3:
        content = content[: randomness.randrange(len(content))]
    else:
        content[randomness.randrange(len(content))] ^= 1 << randomness.randrange(8)
    path.write_bytes(content)


def anywhere_fixture(
    decoder: CausalModel,
    folder: Path | None = None,
    *,
    ratio: float = 0.3,
    selector: TokenSelector = "question",
    blocks: int = 60,
    host_tokens: int = 400,
    **changes: Any,
) -> EngineFixture:
    """Return an engine that places chunks from copies of other positions, wherever it has one."""
    return EngineFixture(
        decoder,
        folder,
        blocks=blocks,
        host_tokens=host_tokens,
        disk_records=60,
        mode="anywhere",
        load="always",  # with a ratio of 1 placing saves nothing
        recompute_ratio=ratio,
        token_selector=selector,
        **changes,
    )
