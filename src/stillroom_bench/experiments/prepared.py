"""`stillroom bench prepared`: time to first token of questions that were never asked, over prepared documents.

Each question reads chunks of several documents, drawn anew. Compared are a full prefill, exact reuse whose best chunk
was prepared, and chunks that were prepared in their document's context, on the device, on the host and on disk, in 16,
8 and 4 bits a number. Also measured is what preparing costs. How to read it: docs/prepared.md
"""

import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.config.settings import PrepareConfig, ReuseConfig
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt
from stillroom.core.request import Request, SamplingParams
from stillroom.errors import PreparedFullError
from stillroom.models.causal_model import CausalModel
from stillroom.models.loader import load_own_decoder
from stillroom_bench.experiments.anywhere_engine import (
    Answers,
    BenchEngine,
    build_fixture,
    chunk,
    question,
    system,
)
from stillroom_bench.experiments.experiment_options import AnywhereBenchOptions, PreparedBenchOptions
from stillroom_bench.experiments.prepared_beside import beside_preparing
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import device_name, record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, run_arms
from stillroom_bench.quality.runtime import SHAPES, Shape, write_checkpoint

FULL, EXACT = "full prefill", "best chunk prepared, exact"
_BITS = (16, 8, 4)


class BenchDocuments:
    """The documents of the benchmark: document d has chunks d * length to (d + 1) * length - 1."""

    def __init__(self, num_documents: int, length: int) -> None:
        self._length = length
        self.documents = [range(start * length, (start + 1) * length) for start in range(num_documents)]
        self.num_changes = 0

    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        return set(chunk_ids)

    def removed_since(self, num_changes: int) -> tuple[ChunkId, ...]:
        return ()

    def chunks_before(self, chunk_ids: Collection[ChunkId], limit: int) -> dict[ChunkId, tuple[ChunkId, ...]]:
        return {one: tuple(map(ChunkId, range(one - one % self._length, one))) for one in chunk_ids}

    def chunks(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, Chunk]:
        """Return nothing: the benchmark audits no answers."""
        return {}


def run_prepared(
    options: PreparedBenchOptions,
    work_dir: Path,
    *,
    shape: Shape | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Run the benchmark.

    Args:
        work_dir: folder that keeps the checkpoint between runs, and KV during a run.
        shape: shape of the model with random weights; None: that of `options.size`.
    """
    shape, environment = shape or SHAPES[options.size], record_environment()
    folder = write_checkpoint(work_dir, shape, options.dtype, options.seed)
    decoder = load_own_decoder(folder, device=options.device, dtype=options.dtype)
    prompts = AnywhereBenchOptions(
        num_chunks=options.num_chunks,
        chunk_tokens=options.chunk_tokens,
        question_tokens=options.question_tokens,
        seed=options.seed,
    )
    answers, costs = Answers(), list[dict[str, Any]]()
    with _engines(decoder, options, prompts, work_dir, costs, on_progress) as engines:
        arms = [Arm(name, _ask(engines[name], name, options, prompts, answers)) for name in engines]
        samples = run_arms(
            arms, repeat=options.repeat, on_run=lambda arm, at: on_progress(f"{arm}, run {at}"), only_own=True
        )
        on_progress(f"{options.num_beside} pairs of questions beside preparing")
        device = engines[f"prepared, from {Tier.DEVICE.label}"]
        beside = (
            beside_preparing(
                device,
                prompts,
                lambda number: _prompt(options, prompts, 10_000 + number),
                options.num_beside,
                PrepareConfig().idle_s,
            )
            if options.num_beside
            else []
        )
    others = [name for name in engines if name != FULL]
    return BenchResult(
        "stillroom bench prepared",
        environment,
        {
            "num_documents": options.num_documents,
            "document_chunks": options.document_chunks,
            "num_chunks": options.num_chunks,
            "chunk_tokens": options.chunk_tokens,
            "question_tokens": options.question_tokens,
            "num_beside": options.num_beside,
            "repeat": options.repeat,
            "seed": options.seed,
            "dtype": options.dtype,
            "device": device_name(options.device),
            "num_parameters": shape.layer_parameters + shape.vocab_size * shape.hidden_size,
        },
        samples,
        FULL,
        tables={
            "What preparing costs": costs,
            **({"Time to first token of prepared questions beside preparing": beside} if beside else {}),
            "Answers beside a full prefill (random weights)": answers.rows(dict.fromkeys(others, FULL)),
        },
        notes=["Every run asks a new question over chunks that are drawn anew; all arms get the same."],
    )


@contextmanager
def _engines(
    decoder: CausalModel,
    options: PreparedBenchOptions,
    prompts: AnywhereBenchOptions,
    work_dir: Path,
    costs: list[dict[str, Any]],
    on_progress: Callable[[str], None],
) -> Iterator[Mapping[str, BenchEngine]]:
    """Yield an engine per arm, with its documents prepared."""
    room = options.num_documents * options.document_chunks * (options.chunk_tokens + 16) + 4 * prompts.prompt_tokens
    prepared = ReuseConfig(mode="prepared", load="always", tail_blocks=10_000)
    settings = {
        FULL: (ReuseConfig(mode="off"), 16),
        EXACT: (ReuseConfig(load="always", tail_blocks=10_000), 16),
        f"prepared, from {Tier.DEVICE.label}": (prepared, 16),
    }
    for bits in _BITS:
        settings[f"prepared, {bits} bits, from {Tier.HOST.label}"] = (prepared, bits)
        settings[f"prepared, {bits} bits, from {Tier.DISK.label}"] = (replace(prepared, host_bytes=0), bits)
    engines: dict[str, BenchEngine] = {}
    with tempfile.TemporaryDirectory(dir=work_dir) as scratch, ExitStack() as stack:
        for name, (reuse, bits) in settings.items():
            folder = Path(scratch) / str(bits) if name.endswith(Tier.DISK.label) else None
            prepare = PrepareConfig(bits=bits)
            engine = engines[name] = build_fixture(decoder, prompts, reuse, folder, room, prepare=prepare)
            stack.callback(engine.cache.close)
            documents = BenchDocuments(options.num_documents, options.document_chunks)
            engine.engine.follow("", documents)
            if name != FULL:
                on_progress(f"preparing for: {name}")
                costs.append({"arm": name, **_prepare(engine, documents, prompts)})
        yield engines


def _prepare(engine: BenchEngine, documents: BenchDocuments, prompts: AnywhereBenchOptions) -> dict[str, str]:
    """Prepare all documents; return the time and the bytes per 1,000 chunks."""
    in_document = engine.cache.manager.uses_prepared
    windows = [
        tuple(window) for document in documents.documents for window in ([document] if in_document else zip(document))
    ]
    start = time.perf_counter()
    num_prepared = prepare_windows(engine, prompts, windows)
    seconds = time.perf_counter() - start
    assert num_prepared == len(windows), "the budget of prepared KV is too small"
    num_chunks = sum(map(len, documents.documents))
    assert engine.cache.tree is not None
    num_bytes = sum(
        engine.cache.tree.options.num_bytes(node.num_tokens, node.bits)
        for node in engine.cache.tree
        if node.chunk_id is not None
    )
    return {
        "seconds per 1,000 chunks": f"{1000 * seconds / num_chunks:.0f}",
        "MiB per 1,000 chunks": f"{1000 * num_bytes / num_chunks / 2**20:.0f}",
    }


def prepare_windows(engine: BenchEngine, prompts: AnywhereBenchOptions, windows: Iterable[Sequence[int]]) -> int:
    """Prepare windows of chunks, one after the other, until the budget is full; return how many were prepared.

    Raises:
        StillroomError: a window could not be computed.
    """
    errors: list[Exception] = []

    def on_end(error: Exception | None, *, is_computed: bool) -> None:
        if error is not None:
            errors.append(error)

    num_prepared = 0
    for window in windows:
        request = Request(
            request_id=RequestId(f"prepare {window[0]}"),
            prompt=SegmentedPrompt((system(prompts), *(chunk(prompts, one) for one in window), question(prompts, 0))),
            sampling=SamplingParams(max_tokens=1),
            prepares=frozenset(map(ChunkId, window)),
        )
        engine.engine.prepare(request, on_end)
        engine.finish_idle_work()
        if errors:
            if isinstance(errors[0], PreparedFullError):
                break
            raise errors[0]
        num_prepared += 1
    return num_prepared


def _ask(
    engine: BenchEngine, name: str, options: PreparedBenchOptions, prompts: AnywhereBenchOptions, answers: Answers
) -> Callable[[int], Metrics]:
    tier = next((one for one in Tier if name.endswith(one.label)), None)

    def run(repetition: int) -> Metrics:
        if tier in (Tier.HOST, Tier.DISK):
            engine.evict_from_device()
        reply = engine.ask(_prompt(options, prompts, repetition))
        answers.add(name, repetition, reply)
        assert tier is None or reply.sources == {tier}, f"chunks came from {reply.sources}, not from {tier}"
        assert name != EXACT or reply.num_cached >= options.chunk_tokens, "the best chunk was not prepared"
        return {"ttft_seconds": reply.seconds}

    return run


def _prompt(options: PreparedBenchOptions, prompts: AnywhereBenchOptions, repetition: int) -> Sequence[Segment]:
    rng = np.random.default_rng([options.seed, repetition + 100])
    chosen = rng.permutation(options.num_documents * options.document_chunks)[: options.num_chunks].tolist()
    return [system(prompts), *(chunk(prompts, one) for one in chosen), question(prompts, 1000 + repetition)]
