"""`stillroom bench pipeline speculation`: gain of speculative prefill during the search (RAGCache 5.3; 7.3, Figure 19
and Table 3).

A dense search probes a share of the inverted lists, as in the paper. Its documents make a prompt for a real engine,
which caches their KV. Arms answer the same questions, each with an empty cache: no speculation (`off`), speculation
always (`on`), and speculation where it was measured to pay (`auto`). The paper runs one question at a time; concurrent
clients show the gain on a busy engine. The index may be on disk, with a cold page cache, searched under a filter, and
the documents may be long; the report compares the gain with the least time that any overlap could give.
"""

import hashlib
import itertools
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any, Literal

import numpy as np
import torch

from stillroom.backends.base import Load, PreparedPrompt
from stillroom.backends.engine_building import build_engine
from stillroom.config.settings import ReuseConfig, RuntimeConfig, SpeculationConfig
from stillroom.core.clock import SystemClock
from stillroom.core.document import Chunk, ScoredChunk
from stillroom.core.ids import RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SampleRequest, SamplingParams
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.engine import Engine
from stillroom.engine.events import Listener, TokenEvent
from stillroom.models.loader import load_own_decoder
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom.rag.speculation import Attempt, CompletedSearch, Speculator
from stillroom.telemetry.metrics import Metrics as Counters
from stillroom_bench.experiments.experiment_options import SpeculationOptions
from stillroom_bench.experiments.speculation_corpus import SearchedCorpus
from stillroom_bench.instrument.bench_report import BenchResult, share_name
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, Samples, run_arms
from stillroom_bench.quality.runtime import Shape, write_checkpoint
from stillroom_bench.quality.search_arms import Vectors

MODES: tuple[Literal["off", "on", "auto"], ...] = ("off", "on", "auto")
PAPER = {"TTFT, at most": "1.6x lower", "search that overlaps with nothing": "1.5 to 4.3x less"}

_ANSWER_TOKENS = 8
_SYSTEM = Segment(SegmentKind.SYSTEM, tuple(range(10, 74)))
_QUESTION = Segment(SegmentKind.QUESTION, tuple(range(100, 132)))
_MAX_TOKENS = 512
_POOL_BYTES = 2 * 1024**3


def run_speculation(
    options: SpeculationOptions,
    work_dir: Path,
    *,
    shape: Shape | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Run the benchmark.

    Args:
        work_dir: folder that keeps embeddings and the model's random weights between runs.
        shape: shape of the model; None: 135 million parameters.

    Raises:
        UsageError: a data set is missing or empty.
        DocumentError: a line of a data set cannot be read.
    """
    environment = record_environment()
    corpus = SearchedCorpus(options.datasets, work_dir, options, on_progress)
    shape = shape or Shape()
    on_progress("loading the model")
    engine = run_in_short_lived_thread(lambda: _engine(write_checkpoint(work_dir, shape, "bfloat16", 0)))
    try:
        with AsyncEngine(engine) as running:
            bench = _SpeculationBench(corpus, running, shape.vocab_size, options)
            samples = run_arms(
                list(bench.arms()),
                repeat=options.repeat,
                on_run=lambda arm, at: on_progress(f"{arm}, run {at + 1}" if at >= 0 else f"{arm}, warming up"),
                only_own=True,
            )
    finally:
        corpus.close()
    return BenchResult(
        "stillroom bench pipeline speculation",
        environment,
        {
            "datasets": [path.name for path in options.datasets],
            "size": options.size,
            "lists": corpus.index.nlist,
            "questions per run": options.num_questions,
            "zipf": options.zipf,
            "top_k": options.k,
            "tokens of a document": options.document_tokens or f"those of its text, at most {_MAX_TOKENS}",
            "index on disk": options.on_disk,
            "share that a filter allows": options.allowed,
            "stages": options.num_stages,
            "repeat": options.repeat,
            "seed": options.seed,
            "num_threads": torch.get_num_threads(),
        },
        samples,
        "off",
        notes=[f"RAGCache: {what} {much}" for what, much in PAPER.items()],
        tables={"What overlap can gain": _limits(samples, options.num_stages)},
    )


def _limits(samples: Samples, num_stages: int) -> list[dict[str, Any]]:
    """Compare the measured time to first token with its least by RAGCache's Theorem 5.1, per group of arms.

    Search S and model P take S + P one after the other. If the first of n stages of equal length finds the final list,
    the model starts after S / n, and the first token comes after max(S, S / n + P). So the gain is greatest where both
    take equally long, and small where one of them is short.
    """
    rows = []
    for arm in samples.values:
        group, mode = arm.rsplit("/", 1)
        if mode != "off" or not group.endswith("one client"):
            continue
        search, whole = (fmean(samples.of(arm, metric)) for metric in ("retrieval_seconds", "ttft_seconds"))
        least = max(search, search / num_stages + whole - search)
        on = f"{group}/on"
        rows.append(
            {
                "lists searched": group,
                "search, ms": 1e3 * search,
                "model, ms": 1e3 * (whole - search),
                "search by model": search / max(whole - search, 1e-9),
                "least ratio of times to first token": least / whole,
                "ratio, on": fmean(samples.of(on, "ttft_seconds")) / whole,
                "search while the model computes, by search alone": fmean(samples.of(on, "retrieval_seconds")) / search,
                "right": f"{fmean(samples.of(on, 'right_share')):.0%}",
            }
        )
    return rows


def _engine(checkpoint: Path) -> Engine:
    return build_engine(
        load_own_decoder(checkpoint, device="cpu", dtype="bfloat16"),
        RuntimeConfig(kv_bytes=_POOL_BYTES, request_timeout_s=0.0),
        SystemClock(),
        reuse=ReuseConfig(host_bytes=0, disk_bytes=0),
    )[0]


class _Backend:
    """Backend of a `Speculator`: prompts of random tokens with the documents' lengths, on a running engine."""

    may_speculate = True

    def __init__(self, engine: AsyncEngine, vocab_size: int, document_tokens: int | None) -> None:
        self.engine = engine
        self._vocab_size = vocab_size
        self._document_tokens = document_tokens

    @property
    def load(self) -> Load:
        engine = self.engine
        return Load(engine.num_waiting, engine.num_running, num_prefilling=engine.num_prefilling)

    def cancel(self, request_id: RequestId) -> None:
        self.engine.cancel(request_id)

    def prepare_prompt(self, found: Sequence[ScoredChunk]) -> PreparedPrompt:
        chunks = [Segment(SegmentKind.CHUNK, self._tokens(one.chunk), one.chunk.chunk_id) for one in found]
        prompt = SegmentedPrompt((_SYSTEM, *chunks, _QUESTION))
        return PreparedPrompt(prompt, prompt.chunk_ids, prompt.num_tokens)

    def start(self, prepared: PreparedPrompt, samples: Sequence[SampleRequest], listeners: Sequence[Listener]) -> None:
        assert isinstance(prepared.prompt, SegmentedPrompt)
        for sample, listener in zip(samples, listeners, strict=True):
            request = Request(request_id=sample.request_id, prompt=prepared.prompt, sampling=sample.sampling)
            self.engine.submit(request, listener)

    def _tokens(self, chunk: Chunk) -> tuple[int, ...]:
        seed = int.from_bytes(hashlib.blake2b(str(chunk.document_id).encode(), digest_size=8).digest(), "little")
        num = self._document_tokens or min(max(len(chunk.text.split()) * 4 // 3, 1), _MAX_TOKENS)
        return tuple(np.random.default_rng(seed).integers(200, self._vocab_size, size=num).tolist())


class _SpeculationBench:
    def __init__(
        self, corpus: SearchedCorpus, engine: AsyncEngine, vocab_size: int, options: SpeculationOptions
    ) -> None:
        self._corpus = corpus
        self._engine = engine
        self._backend = _Backend(engine, vocab_size, options.document_tokens)
        self._options = options
        self._names = (RequestId(f"bench-{number}") for number in itertools.count())
        self._naming = Lock()
        self._num_threads = torch.get_num_threads()
        self._speculators: dict[str, Speculator] = {}

    def arms(self) -> Iterator[Arm]:
        for share in self._options.shares:
            group = f"{share_name(share)} of lists, one client"
            for mode in MODES:
                yield self._arm(group, mode, share, 1, self._num_threads)
            if self._options.one_thread and self._num_threads > 1:
                yield self._arm(group, "on", share, 1, self._num_threads - 1)
        for num in self._options.num_clients:
            if num > 1 and not self._options.on_disk:  # pages are dropped only while no search runs
                for mode in MODES:
                    yield self._arm(f"50% of lists, {num} clients", mode, 0.5, num, self._num_threads)

    def _arm(
        self, group: str, mode: Literal["off", "on", "auto"], share: float, num_clients: int, num_threads: int
    ) -> Arm:
        name = f"{group}/{mode}" + ("" if num_threads == self._num_threads else f", {num_threads} thread(s) compute")

        def run(repetition: int) -> Metrics:
            self._clear(num_threads)
            speculator = self._speculators.get(name) or self._speculator(name, mode)
            questions = self._corpus.questions(self._options.num_questions, (self._options.seed, repetition + 1000))
            with ThreadPoolExecutor(num_clients) as clients:
                asked = list(clients.map(lambda query: self._ask(speculator, query, share), questions))
            return _figures(asked)

        return Arm(name, run)

    def _speculator(self, name: str, mode: Literal["off", "on", "auto"]) -> Speculator:
        """Make a speculator, which is kept between runs because it learns."""
        config = SpeculationConfig(mode=mode, num_stages=self._options.num_stages)
        made = self._speculators[name] = Speculator(self._backend, config, SystemClock(), Counters())
        return made

    def _clear(self, num_threads: int) -> None:
        """Clear the cache and set the number of compute threads."""
        done: queue.SimpleQueue[None] = queue.SimpleQueue()

        def clear(engine: Engine) -> None:
            engine.scheduler.forget_chunks(lambda chunk_ids: set())
            torch.set_num_threads(num_threads)
            done.put(None)

        self._engine.run(clear)
        done.get()

    def _ask(self, speculator: Speculator, query: Vectors, share: float) -> Mapping[str, float]:
        clock = SystemClock()
        self._corpus.forget_pages()
        began = clock.monotonic()

        def attempt_with(found: Sequence[ScoredChunk]) -> Attempt:
            with self._naming:
                name = next(self._names)
            sample = SampleRequest(request_id=name, sampling=SamplingParams(max_tokens=_ANSWER_TOKENS))
            return Attempt(self._backend, self._backend.prepare_prompt(found), [sample])

        found: CompletedSearch = speculator.find(
            lambda num: self._corpus.search(query, share, num), "dense", attempt_with
        )
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        found.attempt.deliver([events.put], clock.monotonic())
        first = last = events.get()
        while last.finish_reason is None:
            last = events.get()
        retrieval, report = found.ended_at - began, found.report
        return {
            "ttft_seconds": first.at - began,
            "total_seconds": last.at - began,
            "retrieval_seconds": retrieval,
            "exposed_search_seconds": retrieval - min(report.ahead_seconds, retrieval),
            "right_share": float(report.outcome == "right"),
            "begun_per_question": report.num_started,
            "cached_share": first.reuse.num_cached_tokens / found.attempt.prepared.num_tokens
            if first.reuse and found.attempt.prepared.num_tokens
            else 0.0,
        }


def _figures(asked: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    figures = {name: float(np.mean([one[name] for one in asked])) for name in asked[0]}
    figures["p99_ttft_seconds"] = float(np.quantile([one["ttft_seconds"] for one in asked], 0.99))
    return figures
