"""`stillroom bench anywhere`: time to first token when chunks are reused in another order (Cache-Craft 5.4).

Prompts of the same few chunks in ever new orders, through the product's engine: in full, and with chunks placed from
device, host and disk at several recompute ratios. Then many shuffled questions over more chunks than a prompt has, to
see whether the gain lasts. How to read it: docs/chunk-reuse.md
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.bench.environment import record_environment
from stillroom.bench.harness import Arm, Metrics, Samples, run_arms
from stillroom.bench.report import BenchResult
from stillroom.bench.runtime import Shape, write_checkpoint
from stillroom.config.settings import Dtype, ReuseConfig, RuntimeConfig
from stillroom.core.clock import SystemClock
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.core.reuse import PromptReuse
from stillroom.engine.engine import Engine
from stillroom.kvcache.cost_model import CostProfile
from stillroom.kvcache.placement import AnywhereOptions
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_decoder
from stillroom.rag.generator import build_engine
from stillroom.rag.kv_cache import KVCache, kv_shape

FULL = "full prefill"
_SYSTEM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Scope:
    """Sizes."""

    num_chunks: int = 5
    chunk_tokens: int = 200
    question_tokens: int = 32
    ratios: tuple[float, ...] = (0.0, 0.15, 0.3)
    num_lasting: int = 0
    """Shuffled questions of the second part; 0 leaves it out."""
    num_documents: int = 300
    """Chunks that these are over."""
    dtype: Dtype = "bfloat16"
    repeat: int = 10
    seed: int = 0

    @property
    def prompt_tokens(self) -> int:
        return _SYSTEM_TOKENS + self.num_chunks * self.chunk_tokens + self.question_tokens


def run_anywhere(
    scope: Scope, work_dir: Path, *, shape: Shape | None = None, on_progress: Callable[[str], None] = lambda _: None
) -> BenchResult:
    """Measure everything.

    Args:
        work_dir: where the checkpoint is kept between runs; KV is written beside it for a while.
        shape: of the model, random weights; None for 135 million parameters.
    """
    shape = shape or Shape()
    decoder = load_decoder(write_checkpoint(work_dir, shape, scope.dtype, scope.seed), device="cpu", dtype=scope.dtype)
    samples, tables = Samples(), {}
    with _houses(decoder, scope, work_dir) as houses:
        arms = [Arm(FULL, _ask(houses[FULL], scope, None))]
        for tier in Tier:
            for ratio in scope.ratios:
                name = f"from {tier.label}, {ratio:.0%} computed again"
                arms.append(Arm(name, _ask(houses[tier.label], scope, AnywhereOptions(ratio, "question"), tier)))
        samples = run_arms(
            arms, repeat=scope.repeat, on_run=lambda arm, at: on_progress(f"{arm}, run {at}"), only_own=True
        )
    if scope.num_lasting:
        on_progress(f"{scope.num_lasting} shuffled questions over {scope.num_documents} chunks")
        tables["Shuffled questions, by hundreds"] = _lasting(decoder, scope, work_dir)
    parameters = {
        "num_chunks": scope.num_chunks,
        "chunk_tokens": scope.chunk_tokens,
        "question_tokens": scope.question_tokens,
        "repeat": scope.repeat,
        "dtype": scope.dtype,
        "num_parameters": shape.layer_parameters + shape.vocab_size * shape.hidden_size,
    }
    return BenchResult("stillroom bench anywhere", record_environment(), parameters, samples, FULL, tables=tables)


class House:
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

    def ask(self, segments: Sequence[Segment]) -> tuple[float, PromptReuse]:
        """Seconds to the first token, and what was reused."""
        start = time.perf_counter()
        self.submit(segments)
        return self.finish(start)

    def submit(self, segments: Sequence[Segment]) -> None:
        """Ask for one token."""
        self._num_requests += 1
        request = Request(
            request_id=RequestId(str(self._num_requests)),
            prompt=SegmentedPrompt(tuple(segments)),
            sampling=SamplingParams(max_tokens=1),
        )
        self.engine.submit(request)

    def finish(self, start: float) -> tuple[float, PromptReuse]:
        """Seconds since `start` to the token of the only request that is left, and what was reused."""
        events = []
        while self.engine.has_work:
            events += self.engine.step()
        seconds = time.perf_counter() - start
        reuse = events[0].reuse
        assert reuse is not None
        return seconds, reuse


def build_house(  # noqa: PLR0913  plain values, given once
    decoder: Decoder,
    scope: Scope,
    reuse: ReuseConfig,
    folder: Path | None,
    num_tokens: int,
    *,
    max_num_seqs: int = 32,
    profile: CostProfile | None = None,
) -> House:
    """An engine that keeps KV of so many tokens on the device; without a profile it measures one."""
    runtime = RuntimeConfig(
        kv_bytes=num_tokens * kv_shape(decoder).bytes_per_token,
        max_num_batched_tokens=scope.prompt_tokens,
        max_num_seqs=max_num_seqs,
    )
    engine, cache = build_engine(
        decoder, runtime, SystemClock(), reuse=reuse, fingerprint=bytes(32), profile=profile, kv_folder=folder
    )
    return House(engine, cache)


@contextmanager
def _houses(decoder: Decoder, scope: Scope, work_dir: Path) -> Iterator[dict[str, House]]:
    """One for each tier that chunks come from, each with the chunks there, and one that keeps nothing."""
    room = 4 * (scope.prompt_tokens + 16 * (scope.num_chunks + 2))
    with tempfile.TemporaryDirectory(dir=work_dir) as scratch:
        anywhere = ReuseConfig(mode="anywhere", audit_share=0.0, load="always")
        houses = {
            FULL: build_house(decoder, scope, ReuseConfig(mode="off"), None, room),
            Tier.DEVICE.label: build_house(decoder, scope, anywhere, None, room),
            Tier.HOST.label: build_house(decoder, scope, anywhere, None, room),
            Tier.DISK.label: build_house(decoder, scope, replace(anywhere, host_bytes=0), Path(scratch), room),
        }
        for house in houses.values():
            house.allow(None)
            for number in range(scope.num_chunks):  # each behind another one, and none at its later place alone
                house.ask([system(scope), chunk(scope, scope.num_chunks), chunk(scope, number), question(scope, 0)])
        yield houses
        for house in houses.values():
            house.cache.close()


def _ask(
    house: House, scope: Scope, options: AnywhereOptions | None, tier: Tier | None = None
) -> Callable[[int], Metrics]:
    def run(repetition: int) -> Metrics:
        order = np.random.default_rng([scope.seed, repetition + 100]).permutation(scope.num_chunks).tolist()
        house.allow(options)
        if tier not in (None, Tier.DEVICE):
            house.leave_device()
        chunks = [chunk(scope, number) for number in order]
        seconds, reuse = house.ask([system(scope), *chunks, question(scope, 1000 + repetition)])
        sources = {segment.source for segment in reuse.segments[1:-1]}
        assert sources == {tier}, f"chunks came from {sources}, not from {tier}"
        return {"ttft_seconds": seconds, "recomputed_tokens": reuse.num_recomputed_tokens}

    return run


def _lasting(decoder: Decoder, scope: Scope, work_dir: Path) -> list[dict[str, Any]]:
    """Each question draws its chunks anew; device, host and disk together hold each chunk about twice."""
    per_token = kv_shape(decoder).bytes_per_token
    total = scope.num_documents * scope.chunk_tokens * per_token
    with tempfile.TemporaryDirectory(dir=work_dir) as scratch:
        reuse = ReuseConfig(mode="anywhere", audit_share=0.0, host_bytes=total, disk_bytes=total)
        house = build_house(decoder, scope, reuse, Path(scratch), 4 * scope.prompt_tokens + 600)
        off = build_house(decoder, scope, ReuseConfig(mode="off"), None, 2 * scope.prompt_tokens)
        rng = np.random.default_rng(scope.seed)
        rows, full = [], []
        found: list[tuple[float, PromptReuse]] = []
        for number in range(scope.num_lasting):
            chosen = rng.choice(scope.num_documents, scope.num_chunks, replace=False).tolist()
            prompt = [system(scope), *(chunk(scope, one) for one in chosen), question(scope, number)]
            found.append(house.ask(prompt))
            while house.engine.tend():  # as between requests
                pass
            if number % 10 == 0:
                full.append(off.ask(prompt)[0])
            if (number + 1) % 100 == 0 or number + 1 == scope.num_lasting:
                seconds = np.median([one for one, _ in found])
                num_tokens = len(found) * scope.prompt_tokens
                rows.append(
                    {
                        "questions": f"to {number + 1}",
                        "full prefill, median s": f"{np.median(full):.3f}",
                        "median s": f"{seconds:.3f}",
                        "times faster": f"{np.median(full) / seconds:.2f}",
                        "tokens not computed": f"{sum(one.num_cached_tokens for _, one in found) / num_tokens:.1%}",
                    }
                )
                found, full = [], []
        house.cache.close()
    return rows


def system(scope: Scope) -> Segment:
    """The first segment of every prompt."""
    return Segment(SegmentKind.SYSTEM, _tokens(scope, 0, 0, _SYSTEM_TOKENS))


def chunk(scope: Scope, number: int) -> Segment:
    """Of random tokens, always the same ones for a number."""
    return Segment(SegmentKind.CHUNK, _tokens(scope, 1, number, scope.chunk_tokens), ChunkId(number))


def question(scope: Scope, number: int) -> Segment:
    """The last segment, of random tokens."""
    return Segment(SegmentKind.QUESTION, _tokens(scope, 2, number, scope.question_tokens))


def _tokens(scope: Scope, kind: int, number: int, count: int) -> tuple[int, ...]:
    drawn = np.random.default_rng([scope.seed, kind, number + 1000]).integers(0, 250, count)
    return tuple(drawn.tolist())
