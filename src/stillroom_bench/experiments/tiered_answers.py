"""`stillroom bench tiered --answers`: time to first token of the model behind a divided index (VectorLiteRAG Figure 9
and Table 1).

Skewed questions arrive at random times. A search thread takes all waiting requests as one batch. The engine gets a
prompt when its search has ended (with the dispatcher), or when its whole batch has. The search may take the target
minus the model's unloaded time to first token. VectorLiteRAG's rule (Eq. 7 to 10) gives the number of lists that must
be in RAM; arms have these, none, or all in RAM. Before each batch, the page cache of the lists on disk is dropped.
"""

import os
import queue
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from stillroom.ops.thread_pools import short_switch_interval
from stillroom.planner.constraints import Shortfall, smallest_hit_rate
from stillroom.planner.simulation.arrivals import arrivals
from stillroom.planner.simulation.driving import drive
from stillroom.retrieval.tiers.host_scan import Scored
from stillroom.retrieval.tiers.partition import Lists, hottest
from stillroom.retrieval.tiers.search_profile import Effort, SearchProfile, measure_profile, rate_at
from stillroom.retrieval.tiers.tiered_ivf import TieredLists, write_bare_list_file
from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.reuse_engine import OurRuntime
from stillroom_bench.experiments.reuse_search import Asked, Searched
from stillroom_bench.experiments.tiered_throughput import SKEWS, SkewedQuestions, check_options, made_lists
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, run_arms
from stillroom_bench.loads.reuse_traffic import MAX_SEQS, ReuseTraffic, budget_for, pool_for
from stillroom_bench.quality.runtime import Shape, write_checkpoint

_STEP_TOKENS = 512
_NUM_FOUND = 50
_PERCENT = 95.0
_SEARCH_TARGETS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Targets of the search, as multiples of the least that all lists on disk keep."""
_SIZES = ("size", "nlist", "nprobe", "num_batches", "repeat", "seed")
"""Options that the report shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredAnswersOptions:
    """Requests and targets of the benchmark; the index and `nprobe` are those of `TieredOptions`."""

    skew: str = "ORCAS"
    slos: tuple[float, ...] = (1.1, 1.25, 1.5)
    """Targets of time to first token: multiples of the model's 95th percentile without search."""
    rate: float = 0.6
    """Request rate, as a multiple of the model's sequential throughput."""
    num_requests: int = 60
    num_warm: int = 80
    num_documents: int = 100
    num_documents_each: int = 2
    """Documents of a prompt."""


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """Speed of the model without search and with one request at a time."""

    seconds: float
    """95th percentile of time to first token."""
    per_second: float
    """Requests served per second."""


@dataclass(frozen=True, slots=True)
class PlannedDivision:
    """The rule's result for one target."""

    slo: float
    """Target of time to first token in seconds."""
    held: Lists | None
    """Lists in RAM; None if no hit rate reaches the target."""
    verdict: str


def run_answers(
    options: TieredOptions,
    asked: TieredAnswersOptions,
    work_dir: Path,
    *,
    shape: Shape | None = None,
    model: Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Run the benchmark.

    Args:
        work_dir: folder on the disk that is the slow tier; keeps the checkpoint between runs.
        model: folder of a checkpoint with its tokenizer; None: random weights of `shape`.

    Raises:
        UsageError: there are too few vectors for the number of lists.
    """
    check_options(options)
    environment = record_environment()
    work_dir.mkdir(parents=True, exist_ok=True)
    lists = made_lists(options, on_progress)
    on_progress(f"{asked.skew}: counting accesses")
    questions = SkewedQuestions(lists, SKEWS[asked.skew], options)
    profile = measure_profile(
        lists, questions.draw(500, -2), options.nprobe, work_dir, Effort(batch_sizes=(1, 2, 4, 8))
    )
    folder = model or write_checkpoint(work_dir, shape or Shape(), "bfloat16", 0)
    file = work_dir / f"tiered-answers-{os.getpid()}.ivf"
    with TemporaryDirectory(dir=work_dir, prefix="answers-") as scratch:
        fixture = _AnswersFixture(folder, model is not None, asked, options, environment.num_threads, scratch)
        on_progress("measuring the model without search")
        unloaded = fixture.measure_unloaded()
        plans = [plan_for(slo * unloaded.seconds, unloaded, profile, options.nprobe) for slo in asked.slos]
        slos = [plan.slo for plan in plans]
        try:
            tiers = TieredLists(write_bare_list_file(lists, file))
            arms = [
                Arm(name, _AnswersRun(fixture, tiers, held, dispatches, questions, options.nprobe, unloaded, slos))
                for name, held, dispatches in _arms(plans, options.nlist)
            ]
            with short_switch_interval():  # as in a server
                samples = run_arms(
                    arms,
                    repeat=options.repeat,
                    on_run=lambda arm, at: on_progress(f"{arm}, run {at + 1}"),
                    only_own=True,
                )
            tiers.close()
        finally:
            file.unlink(missing_ok=True)
            fixture.close()
    parameters = {key: value for key, value in asdict(options).items() if key in _SIZES}
    return BenchResult(
        "stillroom bench tiered --answers",
        environment,
        parameters | asdict(asked) | {"model": folder.name},
        samples,
        "all on disk",
        notes=[
            f"A target is a multiple of the model's 95th percentile without search, {unloaded.seconds:.3g} s.",
            "Before each batch of searches, the page cache of the lists on disk is dropped and the file mapped again.",
        ],
        tables={
            "Targets": [_row(plan, options.nlist, samples.values) for plan in plans],
            "Index memory by target of the search": memory_by_target(unloaded, profile, options.nprobe),
        },
    )


def plan_for(slo: float, unloaded: UnloadedModel, profile: SearchProfile, nprobe: int) -> PlannedDivision:
    """Return the fewest lists in RAM with which the search stays within the target minus the model's time."""
    batch_sizes = profile.model.times.batch_sizes
    budget = max(slo - unloaded.seconds, 1e-6)
    found = smallest_hit_rate(rate_at(profile, nprobe), batch_sizes, unloaded.per_second, budget)
    if isinstance(found, Shortfall):
        verdict = f"no hit rate: {found.binding}, {found.possible:.3g} of {found.needed:.3g}/s"
        return PlannedDivision(slo, None, verdict)
    return PlannedDivision(slo, hottest(profile.accesses(), found.hit_rate), f"hit rate {found.hit_rate:.0%}")


def memory_by_target(unloaded: UnloadedModel, profile: SearchProfile, nprobe: int) -> list[dict[str, Any]]:
    """Return the bytes of lists that the rule puts into RAM, by the search's share of the target (Table 1).

    By Eq. 9 a target is at least twice the time of a search, so targets are multiples of twice the time of one search
    with all lists on disk.
    """
    smallest = profile.model.times.batch_sizes[0]
    on_disk = 2 * smallest / rate_at(profile, nprobe)(0.0, smallest)
    rows = []
    for share in _SEARCH_TARGETS:
        plan = plan_for(unloaded.seconds + share * on_disk, unloaded, profile, nprobe)
        row: dict[str, Any] = {"search within, ms": 1e3 * share * on_disk, "rule": plan.verdict}
        if plan.held is not None:
            num_bytes = int(profile.sizes[plan.held].sum()) * profile.bytes_per_vector
            row |= {"lists in RAM": len(plan.held), "MB in RAM": num_bytes / 1e6}
            row |= {"of all bytes": f"{num_bytes / profile.list_bytes:.1%}"}
        rows.append(row)
    return rows


def _arms(plans: Sequence[PlannedDivision], nlist: int) -> list[tuple[str, Lists, bool]]:
    """Return name, lists in RAM, and whether the dispatcher is on, for each distinct division."""
    everything = np.arange(nlist)
    found = {"all on disk": everything[:0]}
    found |= {_name(plan.held, nlist): plan.held for plan in plans if plan.held is not None}
    found |= {"all in RAM": everything}
    return [
        (f"{name}{'' if dispatches else ', batches end together'}", held, dispatches)
        for name, held in found.items()
        for dispatches in (True, False)
    ]


def _name(held: Lists, nlist: int) -> str:
    return {0: "all on disk", nlist: "all in RAM"}.get(len(held), f"{len(held) / nlist:.1%} of lists in RAM")


def _row(plan: PlannedDivision, nlist: int, values: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    row: dict[str, Any] = {"target ms": 1e3 * plan.slo, "rule": plan.verdict}
    key = f"within_{1e3 * plan.slo:.0f}_ms"
    planned = "" if plan.held is None else _name(plan.held, nlist)
    row |= {"lists in RAM": planned}
    for name in filter(None, ("all on disk", planned, "all in RAM")):
        label = "as planned" if name == planned else name
        row[f"within it, {label}"] = f"{np.mean(values[name][key]):.0%}"
    return row


class _AnswersFixture:
    """The model and its requests."""

    def __init__(
        self,
        folder: Path,
        has_tokenizer: bool,
        asked: TieredAnswersOptions,
        options: TieredOptions,
        num_threads: int,
        scratch: str,
    ) -> None:
        self.asked, self._seed = asked, options.seed
        pool = pool_for(folder, has_tokenizer, None, asked.num_documents, options.seed)
        self._traffic = ReuseTraffic(pool, "mmlu", asked.num_documents_each, "fixed", options.seed)
        budget = budget_for(pool, self.prompts(0), 1)
        settings = {
            **asdict(budget),
            "max_seqs": MAX_SEQS,
            "step_tokens": _STEP_TOKENS,
            "max_tokens": 1,
            "scratch": scratch,
        }
        self.runtime = OurRuntime("tiers", folder, settings, num_threads)

    def prompts(self, repetition: int) -> list[Any]:
        """Return warm-up prompts, then measured prompts, different in each repetition."""
        return self._traffic.prompts(self.asked.num_warm + self.asked.num_requests, repetition + 1)

    def warm_up(self, repetition: int) -> list[Any]:
        """Answer the warm-up prompts with a new engine, and return the measured prompts."""
        prompts = self.prompts(repetition)
        self.runtime.reset()
        drive(self.runtime, prompts[: self.asked.num_warm], None)
        return prompts[self.asked.num_warm :]

    def measure_unloaded(self) -> UnloadedModel:
        """Measure sequential requests without search."""
        found = drive(self.runtime, self.warm_up(-1), None)
        seconds = float(np.percentile(found["seconds"], _PERCENT))
        return UnloadedModel(seconds, self.asked.num_requests / found["wall_seconds"])

    def dues(self, unloaded: UnloadedModel, repetition: int) -> list[float]:
        """Return the arrival times, the same for every arm."""
        rate = self.asked.rate * unloaded.per_second
        return arrivals(self.asked.num_requests, rate, [self._seed, 8, repetition + 1000])

    def close(self) -> None:
        self.runtime.close()


class _AnswersRun:
    """One arm."""

    def __init__(  # noqa: PLR0913  the parts of an arm
        self,
        fixture: _AnswersFixture,
        tiers: TieredLists,
        held: Lists,
        dispatches: bool,
        questions: SkewedQuestions,
        nprobe: int,
        unloaded: UnloadedModel,
        slos: Sequence[float],
    ) -> None:
        self._fixture, self._tiers, self._held, self._dispatches = fixture, tiers, held, dispatches
        self._questions, self._nprobe, self._unloaded, self._slos = questions, nprobe, unloaded, slos

    def __call__(self, repetition: int) -> Metrics:
        prompts = self._fixture.warm_up(repetition)
        self._tiers.exchange(np.flatnonzero(self._tiers.is_in_ram), ())
        self._tiers.exchange((), self._held)
        queries = self._questions.draw(len(prompts), repetition)
        search = BatchedSearch(self._tiers, queries, self._nprobe, self._dispatches)
        searched = Searched(self._fixture.runtime, search)
        found = drive(searched, prompts, self._fixture.dues(self._unloaded, repetition))
        search.stop(searched.asked)
        seconds = np.array(found["seconds"])
        waits = np.array(list(searched.search_seconds.values()))
        return {
            "mean_ttft_seconds": float(seconds.mean()),
            "p95_ttft_seconds": float(np.percentile(seconds, _PERCENT)),
            "mean_search_seconds": float(waits.mean()),
            "p95_search_seconds": float(np.percentile(waits, _PERCENT)),
            "searches_per_batch": len(prompts) / max(1, search.num_batches),
            **{f"within_{1e3 * slo:.0f}_ms": float((seconds <= slo).mean()) for slo in self._slos},
        }


class BatchedSearch:
    """Searches repeatedly for all waiting requests as one batch."""

    def __init__(self, tiers: TieredLists, queries: Any, nprobe: int, dispatches: bool) -> None:
        """
        Args:
            queries: query of each request, [n, d].
            dispatches: whether a request is passed on when its own search has ended, instead of its whole batch's.
        """
        self._tiers, self._queries, self._nprobe, self._dispatches = tiers, queries, nprobe, dispatches
        self.num_batches = 0

    def stop(self, asked: "queue.SimpleQueue[Asked]") -> None:
        """End the thread after the queued requests."""
        asked.put((-1, ()))

    def __call__(self, asked: "queue.SimpleQueue[Asked]", end: Callable[[Asked], None]) -> None:
        while True:
            batch = [asked.get()]
            while not asked.empty():
                batch.append(asked.get())
            if batch[-1][0] < 0:
                return
            self.num_batches += 1
            self._tiers.drop_pages()
            held_back: list[Asked] = []
            pass_on = end if self._dispatches else held_back.append

            def on_found(number: int, _: Scored, batch: list[Asked] = batch, pass_on: Any = pass_on) -> None:
                pass_on(batch[number])

            numbers = [number for number, _ in batch]
            self._tiers.search_batch(self._queries[numbers], _NUM_FOUND, self._nprobe, on_found)
            for request in held_back:
                end(request)
