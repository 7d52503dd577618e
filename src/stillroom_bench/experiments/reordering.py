"""`stillroom bench pipeline reordering`: effect of admission order above saturation (RAGCache's Figure 18).

All arms use the same engine, weights and cost profile with different admission orders. Requests arrive faster than the
order of arrival can serve, tiers start empty, and all requests of a run count. Each run is also simulated on modelled
hardware with the measured costs. How to read it: docs/reordering-bench.md
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.config.settings import ReuseConfig
from stillroom.errors import UsageError
from stillroom.planner.simulation.arrivals import arrivals
from stillroom.planner.simulation.driving import drive
from stillroom.planner.simulation.simulated_runtime import HardwareModel, SimulatedRuntime
from stillroom.planner.simulation.stepped_engine import EnginePolicy, Prompt
from stillroom_bench.experiments.experiment_options import ReorderingOptions
from stillroom_bench.experiments.reuse_engine import OurRuntime, reuse_config
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, Samples, run_arms
from stillroom_bench.instrument.statistics import ratio_of_means
from stillroom_bench.loads.reuse_traffic import (
    MAX_SEQS,
    Budget,
    ReuseTraffic,
    budget_for,
    pool_for,
)
from stillroom_bench.quality.runtime import Shape, write_checkpoint
from stillroom_bench.quality.runtime_worker import MAX_TOKENS

BASELINE = "first come"
MEAN, P99, ANSWERED, KEPT = "mean_first_token_seconds", "p99_first_token_seconds", "answered_per_second", "kept_share"
_STEP_TOKENS = 512
_FIRST_RUN = 1
"""First measured repetition; repetition 0 measures the throughput in order of arrival."""
_NOTES = (
    "Times are from a request's due time to its first token, over all requests of a run, without search.",
    f"Loads are multiples of the throughput of `{BASELINE}` when all requests arrive at once.",
    "Above saturation, waiting times grow with the length of a run; ratios hold for runs of this many requests.",
    "A sample is the value of one complete run.",
)


def systems(reuse: ReuseConfig, windows: Sequence[int]) -> dict[str, EnginePolicy]:
    """Return the arms: order of arrival, cache first with each window, shortest first with the widest window."""
    arms = {BASELINE: EnginePolicy(reuse=reuse)}
    for window in sorted(set(windows)):
        arms[f"cache first, window {window}"] = EnginePolicy(reuse=reuse, scheduling="cache_first", window=window)
    widest = max(windows)
    arms[f"shortest first, window {widest}"] = EnginePolicy(reuse=reuse, scheduling="shortest_first", window=widest)
    return arms


def figures(seconds: Sequence[float], wall_seconds: float, num_kept: int, num_tokens: int) -> Metrics:
    """Return the metrics of one run."""
    return {
        MEAN: float(np.mean(seconds)),
        P99: float(np.percentile(seconds, 99)),
        ANSWERED: len(seconds) / wall_seconds,
        KEPT: num_kept / num_tokens,
    }


@dataclass(slots=True)
class _ReorderingBench:
    options: ReorderingOptions
    traffic: ReuseTraffic
    runtime: OurRuntime
    hardware: HardwareModel
    throughput: float = 0.0
    """Requests per second in order of arrival, as measured."""
    modelled: Samples = field(default_factory=Samples)

    def prompts(self, repetition: int) -> tuple[list[Prompt], list[Prompt]]:
        """Return the warm-up prompts and the measured prompts."""
        num_warm = self.options.num_warm
        drawn = self.traffic.prompts(num_warm + self.options.num_requests, repetition)
        return drawn[:num_warm], drawn[num_warm:]

    def measure(self, system: EnginePolicy, repetition: int, dues: Sequence[float]) -> Metrics:
        warm, prompts = self.prompts(repetition)
        self.runtime.become(system)
        drive(self.runtime, warm, [0.0] * len(warm))
        found = drive(self.runtime, prompts, dues)
        return figures(found["seconds"], found["wall_seconds"], sum(map(sum, found["cached"])), _num_tokens(prompts))

    def simulate(self, system: EnginePolicy, repetition: int, dues: Sequence[float]) -> Metrics:
        warm, prompts = self.prompts(repetition)
        runtime = SimulatedRuntime(self.hardware, system)
        runtime.ask(warm, [0.0] * len(warm))
        found = runtime.ask(prompts, dues)
        return figures(found.seconds, found.wall_seconds, found.num_kept_tokens, found.num_tokens)

    def arm(self, group: str, name: str, system: EnginePolicy, load: float) -> Arm:
        """Return the arm of one admission order under one load."""
        options = self.options

        def run(repetition: int) -> Metrics:
            number = _FIRST_RUN + repetition
            dues = arrivals(options.num_requests, load * self.throughput, [options.seed, 6, number])
            self.modelled.add(f"{group}/{name}", self.simulate(system, number, dues))
            return self.measure(system, number, dues)

        return Arm(f"{group}/{name}", run)


def run_reordering(
    options: ReorderingOptions,
    work_dir: Path,
    *,
    shape: Shape | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Run the benchmark.

    Args:
        work_dir: folder that keeps the checkpoint between runs.

    Raises:
        UsageError: an option is invalid, or prompts exceed the model's limit.
        DocumentError: a line of the data set cannot be read.
    """
    dataset, model = options.dataset, options.model
    work_dir.mkdir(parents=True, exist_ok=True)
    folder = model or write_checkpoint(work_dir, shape or Shape(), "bfloat16", 0)
    environment = record_environment()
    pool = pool_for(folder, model is not None, dataset, options.num_documents, options.seed)
    traffic = ReuseTraffic(pool, options.curve, options.k, options.companions, options.seed)
    budget = _budget(traffic, options)
    on_progress("loading the model and measuring compute costs")
    with tempfile.TemporaryDirectory(dir=work_dir, prefix="reordering-") as scratch:
        runtime = OurRuntime("tiers", folder, _settings(budget, scratch), environment.num_threads)
        reuse = reuse_config("tiers", budget.host * runtime.bytes_per_token, 0)
        bench = _ReorderingBench(options, traffic, runtime, _hardware(runtime, budget))
        try:
            on_progress(f"throughput of `{BASELINE}`")
            at_once = [0.0] * options.num_requests
            bench.throughput = bench.measure(EnginePolicy(reuse=reuse), 0, at_once)[ANSWERED]
            arms = [
                bench.arm(f"{load:g}x", name, system, load)
                for load in options.loads
                for name, system in systems(reuse, options.windows).items()
            ]
            samples = run_arms(
                arms,
                repeat=options.repeat,
                warmup=0,  # every run warms up a new engine
                on_run=lambda arm, at: on_progress(f"{arm}, run {at + 1}"),
                only_own=True,
            )
        finally:
            runtime.close()
    parameters = {
        **asdict(options),
        "dataset": dataset.name if dataset else "made",
        "model": (model or folder).name,
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": _STEP_TOKENS,
    }
    return BenchResult(
        "stillroom bench pipeline reordering",
        environment,
        parameters,
        samples,
        BASELINE,
        notes=[*_NOTES, f"`{BASELINE}` answers {bench.throughput:.3g} requests per second."],
        tables={
            "order of admission": rows(samples, bench.modelled),
            "room for KV, in tokens": [{"device": budget.device, "host": budget.host}],
        },
    )


def rows(samples: Samples, modelled: Samples) -> list[dict[str, Any]]:
    """Return one row per arm; ratios over all runs have 95 % bootstrap intervals."""
    found = []
    for arm, metrics in samples.values.items():
        group, _, name = arm.rpartition("/")
        baseline = f"{group}/{BASELINE}"
        row: dict[str, Any] = {"load": group, "order": name}
        row |= {"mean s": _mean(metrics[MEAN]), "p99 s": _mean(metrics[P99])}
        row["first come / it"] = "" if arm == baseline else _ratio(samples, MEAN, baseline, arm)
        row["p99 x"] = "" if arm == baseline else _ratio(samples, P99, arm, baseline)
        row |= {"answered/s": _mean(metrics[ANSWERED]), "kept": f"{_mean(metrics[KEPT]):.1%}"}
        row["modelled first come / it"] = _mean(modelled.of(baseline, MEAN)) / _mean(modelled.of(arm, MEAN))
        found.append(row | {"modelled kept": f"{_mean(modelled.of(arm, KEPT)):.1%}"})
    return found


def _ratio(samples: Samples, metric: str, numerator: str, denominator: str) -> str:
    ratio = ratio_of_means(samples.of(numerator, metric), samples.of(denominator, metric), block=1)
    return str(ratio)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _num_tokens(prompts: Sequence[Prompt]) -> int:
    return sum(len(part) for prompt in prompts for part in prompt)


def _budget(traffic: ReuseTraffic, options: ReorderingOptions) -> Budget:
    prompts = [
        prompt
        for repetition in range(_FIRST_RUN + options.repeat)
        for prompt in traffic.prompts(options.num_warm + options.num_requests, repetition)
    ]
    budget = budget_for(traffic.pool, prompts, 1, device_share=options.device_share, host_share=options.host_share)
    if budget.longest > MAX_TOKENS:
        raise UsageError(f"prompts of {budget.longest} tokens are too long; the limit is {MAX_TOKENS}; lower --k")
    return budget


def _settings(budget: Budget, scratch: str) -> dict[str, Any]:
    return {
        **asdict(budget),
        "disk": 0,
        "max_seqs": MAX_SEQS,
        "step_tokens": _STEP_TOKENS,
        "max_tokens": 1,
        "scratch": scratch,
    }


def _hardware(runtime: OurRuntime, budget: Budget) -> HardwareModel:
    """Return a model of the measured engine with the measured costs."""
    assert runtime.profile is not None
    return HardwareModel(
        costs=runtime.profile,
        bytes_per_token=runtime.bytes_per_token,
        num_layers=runtime.spec.num_layers,
        device_bytes=budget.device * runtime.bytes_per_token,
        max_model_len=runtime.spec.max_positions,
        max_seqs=MAX_SEQS,
        step_tokens=_STEP_TOKENS,
    )
