"""`stillroom bench anywhere`: time to first token when chunks are reused in another order (Cache-Craft 5.4).

Prompts of the same few chunks in ever new orders, through the product's engine: in full, and with chunks placed from
device, host and disk at several recompute ratios. Then many shuffled questions over more chunks than a prompt has, to
see whether the gain lasts. A peer gets the same weights and prompts. How to read it: docs/chunk-reuse.md
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.bench.anywhere_peer import Peer
from stillroom.bench.anywhere_replies import ANSWER_TOKENS, SYSTEM_TOKENS, Answers, Ask, Reply, agreement
from stillroom.bench.environment import record_environment
from stillroom.bench.harness import Arm, Metrics, run_arms
from stillroom.bench.report import BenchResult
from stillroom.bench.runtime import Shape, write_checkpoint
from stillroom.config.settings import Dtype, ReuseConfig, RuntimeConfig
from stillroom.core.clock import SystemClock
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent
from stillroom.errors import UsageError
from stillroom.kvcache.placement import AnywhereOptions
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_decoder
from stillroom.rag.generator import build_engine
from stillroom.rag.kv_cache import KVCache, kv_shape

FULL = "full prefill"


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
        return SYSTEM_TOKENS + self.num_chunks * self.chunk_tokens + self.question_tokens


def run_anywhere(
    scope: Scope,
    work_dir: Path,
    *,
    shape: Shape | None = None,
    peers: Mapping[str, str] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Measure everything.

    Args:
        work_dir: where the checkpoint is kept between runs; KV is written beside it for a while.
        shape: of the model, random weights; None for 135 million parameters.
        peers: name (of `anywhere_worker.PEERS`) -> the Python that has it installed.

    Raises:
        UsageError: a peer is unknown, or cannot keep chunks of this length.
    """
    started = [Peer(name, python, work_dir, scope.chunk_tokens) for name, python in (peers or {}).items()]
    shape, environment = shape or Shape(), record_environment()
    folder = write_checkpoint(work_dir, shape, scope.dtype, scope.seed)
    decoder = load_decoder(folder, device="cpu", dtype=scope.dtype)
    start_with = [str(folder), scope.dtype, str(environment.num_threads)]
    answers, tables, notes, full_of = Answers(), {}, list[str](), dict[str, str]()
    with ExitStack() as stack:
        houses = stack.enter_context(_houses(decoder, scope, work_dir))
        arms = [Arm(FULL, _run(houses[FULL], scope, answers, FULL, None))]
        for tier in Tier:
            for ratio in scope.ratios:
                name = f"from {tier.label}, {ratio:.0%} computed again"
                options = AnywhereOptions(ratio, "question")
                arms.append(Arm(name, _run(houses[tier.label], scope, answers, name, options, tier)))
                full_of[name] = FULL
        for peer in started:
            on_progress(f"loading {peer.name}")
            try:
                peer.start(start_with, _bytes_of_all_prompts(decoder, scope))
            except UsageError as error:
                notes.append(f"{peer.name}: left out, {error}")
                continue
            stack.callback(peer.close)
            _keep_elsewhere(scope, peer.ask)
            full_name = f"{peer.name}, {FULL}"
            arms += [Arm(full_name, _run_peer(peer.ask_in_full, scope, answers, full_name))]
            arms += [Arm(peer.name, _run_peer(peer.ask, scope, answers, peer.name))]
            full_of[peer.name] = full_name
        samples = run_arms(
            arms, repeat=scope.repeat, on_run=lambda arm, at: on_progress(f"{arm}, run {at}"), only_own=True
        )
    tables["Answers beside a full prefill"] = answers.rows(full_of)
    if scope.num_lasting:
        on_progress(f"{scope.num_lasting} shuffled questions over {scope.num_documents} chunks")
        tables["Shuffled questions, by hundreds"] = _lasting(decoder, scope, work_dir)
        for peer in (peer for peer in started if peer.name in full_of):
            on_progress(f"{scope.num_lasting} shuffled questions to {peer.name}")
            try:
                peer.start(start_with, 2 * _lasting_bytes(decoder, scope))
                rows = _shuffled(scope, peer.ask, peer.ask_in_full, kept="tokens it had kept")
                tables[f"Shuffled questions to {peer.name}"] = rows
            except UsageError as error:
                notes.append(f"{peer.name}: shuffled questions left out, {error}")
            finally:
                peer.close()
    parameters = {
        "num_chunks": scope.num_chunks,
        "chunk_tokens": scope.chunk_tokens,
        "question_tokens": scope.question_tokens,
        "repeat": scope.repeat,
        "dtype": scope.dtype,
        "num_parameters": shape.layer_parameters + shape.vocab_size * shape.hidden_size,
    }
    return BenchResult("stillroom bench anywhere", environment, parameters, samples, FULL, notes=notes, tables=tables)


class _House:
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

    def ask(self, segments: Sequence[Segment]) -> Reply:
        self._num_requests += 1
        request = Request(
            request_id=RequestId(str(self._num_requests)),
            prompt=SegmentedPrompt(tuple(segments)),
            sampling=SamplingParams(max_tokens=ANSWER_TOKENS),
        )
        start, seconds = time.perf_counter(), 0.0
        self.engine.submit(request)
        events: list[TokenEvent] = []
        while self.engine.has_work:
            events += self.engine.step()
            seconds = seconds or (time.perf_counter() - start if events else 0.0)
        reuse = events[0].reuse
        assert reuse is not None
        token_ids = tuple(event.token_id for event in events if event.token_id is not None)
        sources = frozenset(segment.source for segment in reuse.segments[1:-1])
        return Reply(seconds, token_ids, reuse.num_cached_tokens, reuse.num_recomputed_tokens, sources)


def _build(decoder: Decoder, scope: Scope, reuse: ReuseConfig, folder: Path | None, num_tokens: int) -> _House:
    runtime = RuntimeConfig(
        kv_bytes=num_tokens * kv_shape(decoder).bytes_per_token, max_num_batched_tokens=scope.prompt_tokens
    )
    engine, cache = build_engine(decoder, runtime, SystemClock(), reuse=reuse, fingerprint=bytes(32), kv_folder=folder)
    return _House(engine, cache)


@contextmanager
def _houses(decoder: Decoder, scope: Scope, work_dir: Path) -> Iterator[dict[str, _House]]:
    """One for each tier that chunks come from, each with the chunks there, and one that keeps nothing."""
    room = 4 * (scope.prompt_tokens + 16 * (scope.num_chunks + 2))
    with tempfile.TemporaryDirectory(dir=work_dir) as scratch:
        anywhere = ReuseConfig(mode="anywhere", audit_share=0.0, load="always")
        houses = {
            FULL: _build(decoder, scope, ReuseConfig(mode="off"), None, room),
            Tier.DEVICE.label: _build(decoder, scope, anywhere, None, room),
            Tier.HOST.label: _build(decoder, scope, anywhere, None, room),
            Tier.DISK.label: _build(decoder, scope, replace(anywhere, host_bytes=0), Path(scratch), room),
        }
        for house in houses.values():
            house.allow(None)
            _keep_elsewhere(scope, house.ask)
        yield houses
        for house in houses.values():
            house.cache.close()


def _keep_elsewhere(scope: Scope, ask: Ask) -> None:
    """Each chunk behind another one, and none at its later place alone."""
    for number in range(scope.num_chunks):
        ask([_system(scope), _chunk(scope, scope.num_chunks), _chunk(scope, number), _question(scope, 0)])


def _prompt(scope: Scope, repetition: int) -> list[Segment]:
    """All chunks in an order of its own, the same for every arm."""
    order = np.random.default_rng([scope.seed, repetition + 100]).permutation(scope.num_chunks).tolist()
    return [_system(scope), *(_chunk(scope, number) for number in order), _question(scope, 1000 + repetition)]


def _run(
    house: _House,
    scope: Scope,
    answers: Answers,
    name: str,
    options: AnywhereOptions | None,
    tier: Tier | None = None,
) -> Callable[[int], Metrics]:
    def run(repetition: int) -> Metrics:
        house.allow(options)
        if tier not in (None, Tier.DEVICE):
            house.leave_device()
        reply = house.ask(_prompt(scope, repetition))
        assert reply.sources == {tier}, f"chunks came from {reply.sources}, not from {tier}"
        answers.add(name, repetition, reply)
        return {"ttft_seconds": reply.seconds, "recomputed_tokens": reply.num_recomputed}

    return run


def _run_peer(ask: Ask, scope: Scope, answers: Answers, name: str) -> Callable[[int], Metrics]:
    def run(repetition: int) -> Metrics:
        reply = ask(_prompt(scope, repetition))
        answers.add(name, repetition, reply)
        return {"ttft_seconds": reply.seconds, "kept_tokens": reply.num_cached}

    return run


def _bytes_of_all_prompts(decoder: Decoder, scope: Scope) -> int:
    """KV of all that a peer is asked before shuffled questions: it keeps a chunk once for each beginning before it."""
    num_prompts = scope.num_chunks + 1 + scope.repeat
    return num_prompts * scope.prompt_tokens * kv_shape(decoder).bytes_per_token


def _lasting_bytes(decoder: Decoder, scope: Scope) -> int:
    """KV of all documents, each once."""
    return scope.num_documents * scope.chunk_tokens * kv_shape(decoder).bytes_per_token


def _lasting(decoder: Decoder, scope: Scope, work_dir: Path) -> list[dict[str, Any]]:
    """Each question draws its chunks anew; device, host and disk together hold each chunk about twice."""
    total = _lasting_bytes(decoder, scope)
    with tempfile.TemporaryDirectory(dir=work_dir) as scratch:
        reuse = ReuseConfig(mode="anywhere", audit_share=0.0, host_bytes=total, disk_bytes=total)
        house = _build(decoder, scope, reuse, Path(scratch), 4 * scope.prompt_tokens + 600)
        off = _build(decoder, scope, ReuseConfig(mode="off"), None, 2 * scope.prompt_tokens)

        def ask_and_tend(segments: Sequence[Segment]) -> Reply:
            reply = house.ask(segments)
            while house.engine.tend():  # as between requests
                pass
            return reply

        rows = _shuffled(scope, ask_and_tend, off.ask)
        house.cache.close()
    return rows


def _shuffled(scope: Scope, ask: Ask, ask_in_full: Ask, kept: str = "tokens not computed") -> list[dict[str, Any]]:
    """A row for each hundred questions; every tenth is asked in full too."""
    rng = np.random.default_rng(scope.seed)
    rows: list[dict[str, Any]] = []
    found: list[Reply] = []
    pairs: list[tuple[Reply, Reply]] = []
    for number in range(scope.num_lasting):
        chosen = rng.choice(scope.num_documents, scope.num_chunks, replace=False).tolist()
        prompt = [_system(scope), *(_chunk(scope, one) for one in chosen), _question(scope, number)]
        found.append(ask(prompt))
        if number % 10 == 0:
            pairs.append((ask_in_full(prompt), found[-1]))
        if (number + 1) % 100 == 0 or number + 1 == scope.num_lasting:
            seconds = float(np.median([reply.seconds for reply in found]))
            full = float(np.median([reply.seconds for reply, _ in pairs]))
            num_cached = sum(reply.num_cached for reply in found)
            rows.append(
                {
                    "questions": f"to {number + 1}",
                    "full prefill, median s": f"{full:.3f}",
                    "median s": f"{seconds:.3f}",
                    "times faster": f"{full / seconds:.2f}",
                    kept: f"{num_cached / (len(found) * scope.prompt_tokens):.1%}",
                }
                | agreement(pairs)
            )
            found, pairs = [], []
    return rows


def _system(scope: Scope) -> Segment:
    return Segment(SegmentKind.SYSTEM, _tokens(scope, 0, 0, SYSTEM_TOKENS))


def _chunk(scope: Scope, number: int) -> Segment:
    return Segment(SegmentKind.CHUNK, _tokens(scope, 1, number, scope.chunk_tokens), ChunkId(number))


def _question(scope: Scope, number: int) -> Segment:
    return Segment(SegmentKind.QUESTION, _tokens(scope, 2, number, scope.question_tokens))


def _tokens(scope: Scope, kind: int, number: int, count: int) -> tuple[int, ...]:
    drawn = np.random.default_rng([scope.seed, kind, number + 1000]).integers(0, 250, count)
    return tuple(drawn.tolist())
