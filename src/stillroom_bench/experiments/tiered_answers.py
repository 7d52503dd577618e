"""`stillroom bench tiered --answers`: time to first token of the model behind a divided index (VectorLiteRAG Figures 9
and 10, Table 1).

Skewed questions arrive at random times. A search thread takes all waiting requests as one batch. The engine gets a
prompt when its search has ended (with the dispatcher), or when its whole batch has. The search may take the target
minus the model's unloaded time to first token. VectorLiteRAG's rule (Eq. 7 to 10) gives the number of lists that must
be in RAM; a simulation as of `stillroom plan` gives another (`tiered_forecast`). Arms have these, none, or all in RAM.
Before each batch, the page cache of the lists on disk is dropped.
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
from stillroom.planner.simulation.arrivals import arrivals
from stillroom.planner.simulation.driving import drive
from stillroom.planner.simulation.simulated_runtime import HardwareModel
from stillroom.planner.simulation.stepped_engine import EnginePolicy
from stillroom.retrieval.tiers.faiss_lists import write_bare_list_file
from stillroom.retrieval.tiers.host_scan import Scored
from stillroom.retrieval.tiers.partition import Lists, hottest
from stillroom.retrieval.tiers.search_profile import Effort, SearchProfile, measure_profile
from stillroom.retrieval.tiers.tiered_ivf import TieredLists
from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.reuse_engine import OurRuntime, system_of
from stillroom_bench.experiments.reuse_search import Asked, Searched
from stillroom_bench.experiments.tiered_forecast import Forecasts, Overheads, measure_cores, request_overhead
from stillroom_bench.experiments.tiered_plans import (
    PERCENT,
    PlannedDivision,
    SimulatedDivision,
    UnloadedModel,
    chosen_divisions,
    division_name,
    memory_by_target,
    plan_for,
    plan_row,
    within_rows,
)
from stillroom_bench.experiments.tiered_throughput import SKEWS, SkewedQuestions, check_options, made_lists
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, run_arms
from stillroom_bench.loads.reuse_traffic import MAX_SEQS, ReuseTraffic, budget_for, pool_for
from stillroom_bench.quality.runtime import Shape, write_checkpoint

_STEP_TOKENS = 512
_NUM_FOUND = 50
_HIT_RATES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Shares of the accesses that go to RAM in the divisions that are simulated."""
_NUM_BESIDE = 12
"""Prompts and searches that measure how much both slow each other down."""
_SIZES = ("size", "nlist", "nprobe", "num_batches", "repeat", "seed")
"""Options that the report shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredAnswersOptions:
    """Requests and targets of the benchmark; the index and `nprobe` are those of `TieredOptions`."""

    skew: str = "ORCAS"
    slos: tuple[float, ...] = (1.1, 1.25, 1.5, 2.5, 4.0)
    """Targets of time to first token: multiples of the model's 95th percentile without search."""
    together: bool = False
    """Measure each division also without the dispatcher."""
    rate: float = 0.6
    """Request rate, as a multiple of the model's sequential throughput."""
    num_requests: int = 60
    num_warm: int = 80
    num_documents: int = 100
    num_documents_each: int = 2
    """Documents of a prompt."""


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
            with short_switch_interval():  # as in a server
                on_progress("measuring how much search and model slow each other down")
                overheads = fixture.overheads(tiers, questions, options.nprobe)
                on_progress("simulating")
                forecasts = fixture.forecasts(overheads, profile, questions, lists, options.nprobe)
                simulated = [SimulatedDivision(held, forecasts.seconds(held)) for held in _candidates(profile)]
                divisions = _divisions(plans, chosen_divisions(simulated, slos), options.nlist)
                forecast = {name: forecasts.seconds(held) for name, held in divisions.items()}
                arms = [
                    Arm(name, _AnswersRun(fixture, tiers, held, dispatches, questions, options.nprobe, slos))
                    for name, held, dispatches in _arms(divisions, together=asked.together)
                ]
                samples = run_arms(
                    arms,
                    repeat=options.repeat,
                    warmup=0,  # model and lists were measured before
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
            "Simulation: engine, searches and shared cores on a virtual clock, as in stillroom plan, before the runs "
            "and with other requests. A search beside the model takes "
            f"{overheads.cores.search_slowdown:.3g} times as long, a step beside searches "
            f"{overheads.cores.step_slowdown:.3g} times; a request costs "
            f"{1e3 * overheads.request_seconds:.3g} ms more than its steps.",
            "Measured shares within the target: mean over the runs, with the 95 % interval of Student's t; requests of "
            "a run are slow together. One run has no interval.",
        ],
        tables={
            f"Plans for {PERCENT:g} % within the target": [plan_row(plan, simulated, options.nlist) for plan in plans],
            "Share within the target: planned and measured": [
                row for plan in plans for row in within_rows(plan, divisions, forecast, samples.values)
            ],
            "Index memory by target of the search": memory_by_target(unloaded, profile, options.nprobe),
        },
    )


def _candidates(profile: SearchProfile) -> list[Lists]:
    """Return the divisions among which the simulation chooses."""
    everything = np.arange(len(profile.sizes))
    return [hottest(profile.accesses(), share) if share < 1 else everything for share in _HIT_RATES]


def _divisions(plans: Sequence[PlannedDivision], chosen: Sequence[Lists], nlist: int) -> dict[str, Lists]:
    """Return the lists in RAM of each distinct division to measure."""
    everything = np.arange(nlist)
    found = {"all on disk": everything[:0]}
    found |= {division_name(plan.held, nlist): plan.held for plan in plans if plan.held is not None}
    found |= {division_name(held, nlist): held for held in chosen}
    return found | {"all in RAM": everything}


def _arms(divisions: dict[str, Lists], *, together: bool) -> list[tuple[str, Lists, bool]]:
    """Return name, lists in RAM, and whether the dispatcher is on, for each division."""
    return [
        (f"{name}{'' if dispatches else ', batches end together'}", held, dispatches)
        for name, held in divisions.items()
        for dispatches in ((True, False) if together else (True,))
    ]


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
        self._budget = budget_for(pool, self.prompts(0), 1)
        settings = {
            **asdict(self._budget),
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
        self._sequential = found["seconds"]
        seconds = float(np.percentile(found["seconds"], PERCENT))
        self._rate = self.asked.rate * self.asked.num_requests / found["wall_seconds"]
        return UnloadedModel(seconds, self.asked.num_requests / found["wall_seconds"])

    def arrivals(self, repetition: int) -> list[float]:
        """Return the arrival times, the same for every arm. Precondition: the model was measured."""
        return arrivals(self.asked.num_requests, self._rate, [self._seed, 8, repetition + 1000])

    def overheads(self, tiers: TieredLists, questions: SkewedQuestions, nprobe: int) -> Overheads:
        """Measure what shared cores and requests cost. Precondition: the model was measured."""
        prompts = self.prompts(-1)
        cores = measure_cores(self.runtime, prompts[:_NUM_BESIDE], tiers, questions.draw(_NUM_BESIDE, -3), nprobe)
        request = request_overhead(self._sequential, self._hardware, self._policy, prompts, self.asked.num_warm)
        return Overheads(request, cores)

    def forecasts(
        self, overheads: Overheads, profile: SearchProfile, questions: SkewedQuestions, lists: Any, nprobe: int
    ) -> Forecasts:
        """Return the simulation of this load on this machine."""
        return Forecasts(self._hardware, self._policy, overheads, profile, self, questions, lists, nprobe)

    @property
    def _hardware(self) -> HardwareModel:
        runtime, costs = self.runtime, self.runtime.profile
        assert costs is not None, "the arm keeps KV"
        return HardwareModel(
            costs=costs,
            bytes_per_token=runtime.bytes_per_token,
            num_layers=runtime.spec.num_layers,
            device_bytes=self._budget.device * runtime.bytes_per_token,
            max_model_len=runtime.spec.max_positions,
            max_seqs=MAX_SEQS,
            step_tokens=_STEP_TOKENS,
        )

    @property
    def _policy(self) -> EnginePolicy:
        per_token = self.runtime.bytes_per_token
        return system_of("tiers", self._budget.host * per_token, self._budget.disk * per_token)

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
        slos: Sequence[float],
    ) -> None:
        self._fixture, self._tiers, self._held, self._dispatches = fixture, tiers, held, dispatches
        self._questions, self._nprobe, self._slos = questions, nprobe, slos

    def __call__(self, repetition: int) -> Metrics:
        prompts = self._fixture.warm_up(repetition)
        self._tiers.exchange(np.flatnonzero(self._tiers.is_in_ram), ())
        self._tiers.exchange((), self._held)
        queries = self._questions.draw(len(prompts), repetition)
        search = BatchedSearch(self._tiers, queries, self._nprobe, self._dispatches)
        searched = Searched(self._fixture.runtime, search)
        found = drive(searched, prompts, self._fixture.arrivals(repetition))
        search.stop(searched.asked)
        seconds = np.array(found["seconds"])
        waits = np.array(list(searched.search_seconds.values()))
        return {
            "mean_ttft_seconds": float(seconds.mean()),
            "p95_ttft_seconds": float(np.percentile(seconds, PERCENT)),
            "mean_search_seconds": float(waits.mean()),
            "p95_search_seconds": float(np.percentile(waits, PERCENT)),
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
