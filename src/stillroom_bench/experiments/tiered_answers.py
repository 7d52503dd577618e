"""`stillroom bench tiered --answers`: time to first token with a divided index in front of the model (VectorLiteRAG
Figure 9 and Table 1).

Requests of skewed questions come at random moments. A search thread takes all that wait as one batch; the engine gets
each prompt when its search has ended (with the dispatcher), or when that of its whole batch has. The search's share of
a target is what the model leaves of it when nobody else asks. VectorLiteRAG's rule (Eq. 7 to 10) says how many lists
then have to be in RAM, and arms have those, none, or all there. Before each batch the pages of the lists on disk are
dropped.
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
from stillroom.retrieval.tiers.partition import Lists, hottest
from stillroom.retrieval.tiers.search_profile import Effort, SearchProfile, measure_profile, rate_at
from stillroom.retrieval.tiers.tiered_ivf import Scored, TieredLists, write_bare_list_file
from stillroom_bench.experiments.experiment_options import TieredScope
from stillroom_bench.experiments.reuse_engine import OurRuntime
from stillroom_bench.experiments.reuse_search import Asked, Searched
from stillroom_bench.experiments.tiered_index import SKEWS, SkewedQuestions, check_scope, made_lists
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, run_arms
from stillroom_bench.loads.reuse_traffic import MAX_SEQS, ReuseTraffic, budget_for, pool_for
from stillroom_bench.quality.runtime import Shape, write_checkpoint

_STEP_TOKENS = 512
_NUM_FOUND = 50
_PERCENT = 95.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerScope:
    """What is asked. Sizes of the index and `nprobe` are those of `TieredScope`."""

    skew: str = "ORCAS"
    slos: tuple[float, ...] = (1.1, 1.25, 1.5)
    """Targets for the first token: multiples of what the model alone takes for 95 % of the requests."""
    rate: float = 0.6
    """Requests per second, times what the model serves one after the other."""
    num_requests: int = 60
    num_warm: int = 80
    num_documents: int = 100
    num_documents_each: int = 2
    """Of a prompt."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The model, without a search."""

    seconds: float
    """To the first token, for 95 % of the requests, one after the other."""
    per_second: float
    """Served."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What the rule says of a target."""

    slo: float
    """Seconds to the first token."""
    held: Lists | None
    """Lists in RAM; None where no hit rate does."""
    verdict: str


def run_answers(
    scope: TieredScope,
    asked: AnswerScope,
    work_dir: Path,
    *,
    shape: Shape | None = None,
    model: Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Measure everything.

    Args:
        work_dir: on the disk that is the slow tier; keeps the checkpoint between runs.
        model: a checkpoint's folder with its tokenizer; None takes random weights of `shape`.

    Raises:
        UsageError: there are too few vectors for so many lists.
    """
    check_scope(scope)
    environment = record_environment()
    work_dir.mkdir(parents=True, exist_ok=True)
    lists = made_lists(scope, on_progress)
    on_progress(f"{asked.skew}: where questions go")
    questions = SkewedQuestions(lists, SKEWS[asked.skew], scope)
    profile = measure_profile(lists, questions.draw(500, -2), scope.nprobe, work_dir, Effort(batch_sizes=(1, 2, 4, 8)))
    folder = model or write_checkpoint(work_dir, shape or Shape(), "bfloat16", 0)
    file = work_dir / f"tiered-answers-{os.getpid()}.ivf"
    with TemporaryDirectory(dir=work_dir, prefix="answers-") as scratch:
        house = _AnswersFixture(folder, model is not None, asked, scope, environment.num_threads, scratch)
        on_progress("the model alone")
        alone = house.alone()
        plans = [plan_for(slo * alone.seconds, alone, profile, scope.nprobe) for slo in asked.slos]
        slos = [plan.slo for plan in plans]
        try:
            tiers = TieredLists(write_bare_list_file(lists, file))
            arms = [
                Arm(name, _AnswersRun(house, tiers, held, dispatches, questions, scope.nprobe, alone, slos))
                for name, held, dispatches in _arms(plans, scope.nlist)
            ]
            with short_switch_interval():  # as a server does
                samples = run_arms(
                    arms, repeat=scope.repeat, on_run=lambda arm, at: on_progress(f"{arm}, run {at + 1}"), only_own=True
                )
            tiers.close()
        finally:
            file.unlink(missing_ok=True)
            house.close()
    parameters = {key: value for key, value in asdict(scope).items() if key not in ("shares", "batch_sizes")}
    return BenchResult(
        "stillroom bench tiered --answers",
        environment,
        parameters | asdict(asked) | {"model": folder.name},
        samples,
        "all on disk",
        notes=[
            f"A target is a multiple of the {alone.seconds:.3g} s that the model alone needs for 95 % of requests.",
            "Before each batch of searches the pages of the lists on disk are dropped and the file is mapped anew.",
        ],
        tables={"Targets": [_row(plan, scope.nlist, samples.values) for plan in plans]},
    )


def plan_for(slo: float, alone: Alone, profile: SearchProfile, nprobe: int) -> Planned:
    """The fewest lists in RAM that keep the search within what the model leaves of the target."""
    batch_sizes = profile.model.times.batch_sizes
    found = smallest_hit_rate(rate_at(profile, nprobe), batch_sizes, alone.per_second, max(slo - alone.seconds, 1e-6))
    if isinstance(found, Shortfall):
        return Planned(slo, None, f"no hit rate: {found.binding}, {found.possible:.3g} of {found.needed:.3g}/s")
    return Planned(slo, hottest(profile.accesses(), found.hit_rate), f"hit rate {found.hit_rate:.0%}")


def _arms(plans: Sequence[Planned], nlist: int) -> list[tuple[str, Lists, bool]]:
    """Name, lists in RAM, whether the dispatcher is on: each division once."""
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


def _row(plan: Planned, nlist: int, values: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
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
        self, folder: Path, has_tokenizer: bool, asked: AnswerScope, scope: TieredScope, num_threads: int, scratch: str
    ) -> None:
        self.asked, self._seed = asked, scope.seed
        pool = pool_for(folder, has_tokenizer, None, asked.num_documents, scope.seed)
        self._traffic = ReuseTraffic(pool, "mmlu", asked.num_documents_each, "fixed", scope.seed)
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
        """To warm up, then those that count; a repetition has its own."""
        return self._traffic.prompts(self.asked.num_warm + self.asked.num_requests, repetition + 1)

    def warmed(self, repetition: int) -> list[Any]:
        """A fresh engine that has answered the first requests; the others."""
        prompts = self.prompts(repetition)
        self.runtime.reset()
        drive(self.runtime, prompts[: self.asked.num_warm], None)
        return prompts[self.asked.num_warm :]

    def alone(self) -> Alone:
        """One request after the other, without a search."""
        found = drive(self.runtime, self.warmed(-1), None)
        return Alone(float(np.percentile(found["seconds"], _PERCENT)), self.asked.num_requests / found["wall_seconds"])

    def dues(self, alone: Alone, repetition: int) -> list[float]:
        """When requests come: the same for every arm."""
        return arrivals(self.asked.num_requests, self.asked.rate * alone.per_second, [self._seed, 8, repetition + 1000])

    def close(self) -> None:
        self.runtime.close()


class _AnswersRun:
    """One arm."""

    def __init__(  # noqa: PLR0913  what an arm is made of
        self,
        house: _AnswersFixture,
        tiers: TieredLists,
        held: Lists,
        dispatches: bool,
        questions: SkewedQuestions,
        nprobe: int,
        alone: Alone,
        slos: Sequence[float],
    ) -> None:
        self._house, self._tiers, self._held, self._dispatches = house, tiers, held, dispatches
        self._questions, self._nprobe, self._alone, self._slos = questions, nprobe, alone, slos

    def __call__(self, repetition: int) -> Metrics:
        prompts = self._house.warmed(repetition)
        self._tiers.exchange(np.flatnonzero(self._tiers.is_in_ram), ())
        self._tiers.exchange((), self._held)
        queries = self._questions.draw(len(prompts), repetition)
        search = BatchedSearch(self._tiers, queries, self._nprobe, self._dispatches)
        searched = Searched(self._house.runtime, search)
        found = drive(searched, prompts, self._house.dues(self._alone, repetition))
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
    """Takes all requests that wait as one batch, again and again."""

    def __init__(self, tiers: TieredLists, queries: Any, nprobe: int, dispatches: bool) -> None:
        """
        Args:
            queries: one for each request, [n, d].
            dispatches: whether a request goes on when its own search has ended, or when all of its batch have.
        """
        self._tiers, self._queries, self._nprobe, self._dispatches = tiers, queries, nprobe, dispatches
        self.num_batches = 0

    def stop(self, asked: "queue.SimpleQueue[Asked]") -> None:
        """No more requests will come."""
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
            tell = end if self._dispatches else held_back.append

            def on_found(number: int, _: Scored, batch: list[Asked] = batch, tell: Any = tell) -> None:
                tell(batch[number])

            numbers = [number for number, _ in batch]
            self._tiers.search_batch(self._queries[numbers], _NUM_FOUND, self._nprobe, on_found)
            for one in held_back:
                end(one)
