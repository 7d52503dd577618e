"""`stillroom bench reuse`: time to first token against request rate (RAGCache's Figures 13 to 15).

Each arm runs in its own process (`reuse_worker.py`): Stillroom's engine without reuse, with prefix caching, with three
tiers, and optionally with reuse at any position; vLLM and llama.cpp receive the same prompts at the same times. One arm
runs at a time while the others are stopped; at every rate, the order alternates. An overloaded arm gets no higher rate.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import faiss as _faiss

from stillroom.errors import UsageError
from stillroom.planner.simulation.arrivals import Draw, arrivals_of
from stillroom.planner.simulation.stepped_engine import Prompt
from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.reuse_figures import UNLOADED, Figures, LoadCell
from stillroom_bench.experiments.reuse_options import ARMS, OFF, ReuseOptions
from stillroom_bench.experiments.reuse_worker import PEERS
from stillroom_bench.experiments.tiered_throughput import made_lists
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import Environment, record_environment
from stillroom_bench.instrument.option_flags import named_pythons
from stillroom_bench.instrument.worker import WorkerProcess
from stillroom_bench.loads.reuse_traffic import (
    MAX_SEQS,
    Budget,
    Pool,
    ReuseTraffic,
    budget_for,
    pool_for,
)
from stillroom_bench.quality.runtime import Shape, write_checkpoint
from stillroom_bench.quality.runtime_worker import MAX_TOKENS

faiss: Any = _faiss  # its type stubs lack names that are created at import

_WORKER = Path(__file__).parent / "reuse_worker.py"
_STEP_TOKENS = 512
"""Token budget of one step, for Stillroom and the peers."""
_KEEPS_NOTHING = ("off", "llama.cpp")
_SHARE_PROBED = 8
"""One in this many lists of the searched index is probed."""
_NUM_FIRST = 3
"""Number of warm-up requests for arms that cache nothing, or only the last prompt."""
_NOTES = (
    "Times are from a request's due time to its first token.",
    "Rates are multiples of the sequential throughput of `off`; an overloaded arm gets no higher rate.",
    "Samples are single requests: CV and class describe the spread over requests, not the reproducibility of a run.",
)


@dataclass(frozen=True, slots=True)
class Searchable:
    """A FAISS index file with its search effort."""

    file: str
    nprobe: int


@dataclass(slots=True)
class _ReuseRun:
    options: ReuseOptions
    environment: Environment
    folder: Path
    """Folder of the checkpoint."""
    pool: Pool
    draw: Draw
    say: Callable[[str], None]
    figures: Figures
    index: Searchable | None = None
    """Index that is searched before each prompt."""
    budgets: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run_reuse(
    options: ReuseOptions,
    work_dir: Path,
    *,
    shape: Shape | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Run the benchmark.

    Args:
        work_dir: folder that keeps the checkpoint between runs, and KV during a run.

    Raises:
        UsageError: an option is invalid, or prompts exceed the model's limit.
        DocumentError: a line of the data set cannot be read.
    """
    dataset, model, arrivals, peers = options.dataset, options.model, options.arrivals, named_pythons(options.peers)
    if unknown := set(peers) - set(PEERS):
        raise UsageError(f"unknown peers {', '.join(sorted(unknown))}; known are {', '.join(PEERS)}")
    draw = arrivals_of(arrivals)
    work_dir.mkdir(parents=True, exist_ok=True)
    folder = model or write_checkpoint(work_dir, shape or Shape(), "bfloat16", 0)
    pool = pool_for(folder, model is not None, dataset, options.num_documents, options.seed)
    figures = Figures(options.slo_ttft, options.max_tokens)
    run = _ReuseRun(options, record_environment(), folder, pool, draw, on_progress, figures)
    if options.num_vectors:
        run.index = _searchable(work_dir, options.num_vectors, on_progress)
    for k in options.ks:
        traffics = [ReuseTraffic(pool, curve, k, options.companions, options.seed) for curve in options.curves]
        budget = _budget(run, k, traffics)
        with _started(run, peers, budget, work_dir) as workers:
            for traffic in traffics:
                _measure(run, workers, traffic)
            run.figures.add_memory(k, {worker.name: worker.peak_rss_bytes for worker in workers})
    sources = {
        "dataset": dataset.name if dataset else "made",
        "model": folder.name,
        "arrivals": arrivals.name if arrivals else "poisson",
    }
    return _result(run, sources)


def _searchable(work_dir: Path, size: int, on_progress: Callable[[str], None]) -> Searchable:
    """Build an IVF-PQ index of `size` generated vectors, unless its file exists."""
    nlist = min(round(4 * size**0.5), size // 39)
    file = work_dir / f"vectors-{size}.ivf"
    if not file.exists():
        on_progress(f"indexing {size:,} vectors")
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        faiss.write_index(made_lists(TieredOptions(size=size, nlist=nlist), on_progress), str(temporary))
        temporary.replace(file)
    return Searchable(str(file), max(1, nlist // _SHARE_PROBED))


def _result(run: _ReuseRun, sources: Mapping[str, str]) -> BenchResult:
    lengths = [len(document) for document in run.pool.documents]
    parameters = {
        **asdict(run.options),
        **sources,
        "peers": [peer.partition("=")[0] for peer in run.options.peers],  # without the Python's path
        "mean_document_tokens": sum(lengths) / len(lengths),
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": _STEP_TOKENS,
    }
    tables = run.figures.tables() | {"room for KV, in tokens": run.budgets}
    return BenchResult(
        "stillroom bench reuse",
        run.environment,
        parameters,
        run.figures.samples(),
        OFF,
        notes=[*_NOTES, *run.notes],
        tables=tables,
        sample_of="request",
    )


def _prompts(run: _ReuseRun, traffic: ReuseTraffic, repetition: int) -> list[Prompt]:
    """Return the prompts of one repetition: warm-up, the sequential load, then each rate."""
    options = run.options
    return traffic.prompts(options.num_warm + (1 + len(options.rates)) * options.num_requests, repetition)


def _budget(run: _ReuseRun, k: int, traffics: Sequence[ReuseTraffic]) -> Budget:
    prompts = [
        prompt for traffic in traffics for at in range(run.options.repeat) for prompt in _prompts(run, traffic, at)
    ]
    budget = budget_for(run.pool, prompts, run.options.max_tokens)
    if budget.longest > MAX_TOKENS:
        raise UsageError(f"prompts of {budget.longest} tokens are too long; the limit is {MAX_TOKENS}; lower --k")
    run.budgets.append({"k": k, **asdict(budget)})
    return budget


@contextlib.contextmanager
def _started(run: _ReuseRun, peers: Mapping[str, str], budget: Budget, work_dir: Path) -> Iterator[list[WorkerProcess]]:
    """Yield all arms that start; add a note for each peer that does not."""
    workers: list[WorkerProcess] = []
    with tempfile.TemporaryDirectory(dir=work_dir, prefix="reuse-") as scratch:
        settings = {
            **asdict(budget),
            "max_seqs": MAX_SEQS,
            "step_tokens": _STEP_TOKENS,
            "max_tokens": run.options.max_tokens,
            "scratch": scratch,
            "index": run.index.file if run.index else "",
            "nprobe": run.index.nprobe if run.index else 0,
        }
        try:
            for name, python in {**dict.fromkeys(run.options.arms, sys.executable), **peers}.items():
                run.say(f"loading {name}")
                command = [python, str(_WORKER), name, str(run.folder)]
                command += [str(run.environment.num_threads), json.dumps(settings)]
                worker = WorkerProcess(name, command, work_dir / f"reuse-{name}.log")
                workers.append(worker)
                try:
                    run.say(f"{name} loaded in {worker.wait():.1f} s")
                    if worker.version and (version := f"{name}: {worker.version}") not in run.notes:
                        run.notes.append(version)
                except UsageError as error:
                    _leave_out(run, workers, worker, error)
            yield workers
        finally:
            for worker in workers:
                worker.close()


def _leave_out(run: _ReuseRun, workers: list[WorkerProcess], worker: WorkerProcess, error: UsageError) -> None:
    """Continue without a peer; raise the error of one of Stillroom's arms."""
    if worker.name in ARMS:
        raise error
    workers.remove(worker)
    worker.close()
    run.say(f"{worker.name}: left out, {error}")
    run.notes.append(f"{worker.name}: left out, {error}")


def _measure(run: _ReuseRun, workers: list[WorkerProcess], traffic: ReuseTraffic) -> None:
    """Measure all rates on one curve with one k; each repetition has empty caches and different requests."""
    options, figures = run.options, run.figures
    for repetition in range(options.repeat):
        prompts = _prompts(run, traffic, repetition)
        _warm(run, workers, prompts[: options.num_warm])
        rates = (UNLOADED, *sorted(options.rates))
        for number, rate in enumerate(rates):
            first = options.num_warm + number * options.num_requests
            own = prompts[first : first + options.num_requests]
            if rate == UNLOADED:
                dues = None
            else:
                per_second = rate * figures.service_rate(traffic.curve, traffic.k)
                dues = run.draw(options.num_requests, per_second, [options.seed, 6, repetition, number])
            for worker in list(workers if (repetition + number) % 2 == 0 else reversed(workers)):
                cell = LoadCell(traffic.curve, traffic.k, rate, worker.name)
                if figures.is_asked(cell, rates[number - 1] if number else None, repetition):
                    run.say(f"{cell.group}/{cell.arm}, run {repetition + 1}")
                    answer = _ask(run, workers, worker, own, dues)
                    if answer is not None:
                        figures.add(cell, repetition, own, answer)
            if repetition == number == 0:
                seconds = _seconds_left(options, figures.response_seconds(traffic.curve, traffic.k))
                run.say(f"{traffic.curve}, k={traffic.k}: about {seconds / 60:.1f} minutes for its rates")


def _seconds_left(options: ReuseOptions, response_seconds: Mapping[str, float]) -> float:
    """Return the time of all rates of all runs, and of the warm-ups of later runs.

    An arm takes the time in which its requests arrive, or in which it answers them one after the other.

    Args:
        response_seconds: mean of each arm, one after the other.
    """
    num_warm = {name: _NUM_FIRST if name in _KEEPS_NOTHING else options.num_warm for name in response_seconds}
    per_arrival = [response_seconds[OFF] / rate for rate in options.rates]
    rates = sum(options.num_requests * max(one, own) for one in per_arrival for own in response_seconds.values())
    first = sum((options.num_requests + num_warm[name]) * own for name, own in response_seconds.items())
    return options.repeat * rates + (options.repeat - 1) * first


def _warm(run: _ReuseRun, workers: list[WorkerProcess], prompts: Sequence[Prompt]) -> None:
    for worker in list(workers):
        run.say(f"warming up {worker.name}")
        count = _NUM_FIRST if worker.name in _KEEPS_NOTHING else len(prompts)
        _ask(run, workers, worker, prompts[:count], None, is_first=True)


def _ask(
    run: _ReuseRun,
    workers: list[WorkerProcess],
    worker: WorkerProcess,
    prompts: Sequence[Prompt],
    dues: Sequence[float] | None,
    *,
    is_first: bool = False,
) -> dict[str, Any] | None:
    """Return the worker's times; None if it ended, after which it is omitted."""
    try:
        return worker.ask({"is_first": is_first, "prompts": prompts, "dues": dues})
    except UsageError as error:
        _leave_out(run, workers, worker, error)
        return None
