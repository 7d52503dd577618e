"""`stillroom bench simulate`: RAGCache's Figures 13 to 19 and Tables 2 to 4, Cache-Craft's Figures 22 to 24, simulated.

Results are ratios between arms next to the paper's. Stillroom's engine, scheduler, tree and policies run on modelled
machines (`machines.py`) with a virtual clock, so everything but the scheduling time is deterministic. How to read it:
docs/simulate-bench.md
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from stillroom.config.settings import EvictionPolicy, ReuseConfig
from stillroom.errors import UsageError
from stillroom_bench.experiments.experiment_options import SimulateOptions
from stillroom_bench.experiments.held_out import held_out
from stillroom_bench.experiments.reuse_figures import sustained_rate
from stillroom_bench.experiments.simulate_cache_craft import cache_craft, cache_craft_times, prefix_costs
from stillroom_bench.experiments.simulate_speculation import speculation
from stillroom_bench.experiments.simulated_cases import (
    OVERLOAD,
    RATES,
    SGLANG,
    VLLM,
    Case,
    Say,
    Tables,
    ragcache_case,
)
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples

GIB = 2**30
MODERATE = 0.67
"""RAGCache's 0.8 requests per second (7.3), relative to vLLM: RAGCache sustains almost 2.5, up to 2.1 times as many as
vLLM, so 0.8 / (2.5 / 2.1)."""
_NOTES = (
    "Simulated: Stillroom's engine, scheduler, tree and policies on a modelled machine; no model runs.",
    "Rates are multiples of the sequential throughput without reuse.",
    "Speculative pipelining takes search times from RAGCache Table 3, and how early lists are final from our index.",
)


Papers = Mapping[str, tuple[str, str]]
"""Baseline -> its time to first token as a multiple of RAGCache's, and RAGCache's sustained rate over its own."""
_FIGURE_13: Papers = {"vllm": ("1.2 to 4", "1.3 to 2.1"), "sglang": ("1.1 to 3.5", "1.2 to 1.8")}
_FIGURE_15: Papers = {"vllm": ("1.7 to 3.1", ""), "sglang": ("1.2 to 2.5", "")}
_FIGURE_16: Papers = {"vllm": ("1.4 to 2.1 at low rates", ""), "sglang": ("1.2 to 2.6", "")}


def _compared(case: Case, load: str, papers: Papers, say: Say) -> Tables:
    """Compare the four systems at all rates (Figures 13 to 16)."""
    service = case.service_rate()
    rates = [rate * service for rate in RATES]
    arms = {"vllm": VLLM, "sglang": SGLANG, "ragcache": case.ragcache(), "ours": case.ours()}
    found = {}
    for name, system in arms.items():
        say(f"{load}, {name}")
        found[name] = case.run(system, rates)
    sustained = {
        name: sustained_rate([(rate, one.mean) for rate, one in zip(rates, ones, strict=True)], OVERLOAD * ones[0].mean)
        for name, ones in found.items()
    }
    rows: list[dict[str, Any]] = []
    for at, rate in enumerate(RATES):
        row: dict[str, Any] = {"load": load, "rate": f"{rate:g}x", "requests/s": rates[at]}
        row |= {f"{name} s": outcomes[at].mean for name, outcomes in found.items()}
        for other in papers:
            is_overloaded = rates[at] > sustained[other]
            for name in ("ragcache", "ours"):
                ratio = found[other][at].mean / found[name][at].mean
                row[f"{other} / {name}"] = "overload" if is_overloaded else ratio
        hits = {name: outcomes[at].hit_rate for name, outcomes in found.items() if name != "vllm"}
        rows.append(row | {f"{name} hits": f"{share:.0%}" for name, share in hits.items()})
    summary = []
    for other, (paper, more) in papers.items():
        within = [at for at, rate in enumerate(rates) if rate <= max(sustained[other], rates[0])]
        for name in ("ragcache", "ours"):
            ratios = [found[other][at].mean / found[name][at].mean for at in within]
            at_least = "" if sustained[name] < rates[-1] else "at least "
            summary.append(
                {
                    "load": load,
                    "ratio": f"{other} / {name}",
                    "time to first token": f"{min(ratios):.2f} to {max(ratios):.2f}",
                    "paper": paper,
                    "sustained": f"{at_least}{sustained[name] / sustained[other]:.2f}",
                    "paper sustained": more,
                }
            )
    return {"Ratios where the slower one is not overloaded": summary, "Mean time to first token": rows}


def _joined(tables: Sequence[Tables], prefix: str) -> Tables:
    names = dict.fromkeys(name for one in tables for name in one)
    return {f"{prefix}: {name[0].lower()}{name[1:]}": [row for one in tables for row in one[name]] for name in names}


def overall(options: SimulateOptions, say: Say) -> Tables:
    """RAGCache Figures 13 and 14."""
    return _joined(
        [
            _compared(ragcache_case(name, curve, 2, options), f"{name}, {curve}", _FIGURE_13, say)
            for curve in ("mmlu", "nq")
            for name in ("mistral-7b-a10g", "llama2-7b-a10g")
        ],
        "Figures 13 and 14",
    )


def top_k(options: SimulateOptions, say: Say) -> Tables:
    """RAGCache Figure 15."""
    cases = [(k, ragcache_case("mistral-7b-a10g", "mmlu", k, options)) for k in (1, 3, 5)]
    return _joined([_compared(case, f"k={k}", _FIGURE_15, say) for k, case in cases], "Figure 15")


def large_models(options: SimulateOptions, say: Say) -> Tables:
    """RAGCache Figure 16, with the paper's limits of concurrent requests."""
    slots = {"mixtral-8x7b-2xh800": 8, "llama2-70b-2xh800": 4}
    return _joined(
        [
            _compared(ragcache_case(name, "mmlu", 2, options, max_seqs), name, _FIGURE_16, say)
            for name, max_seqs in slots.items()
        ],
        "Figure 16",
    )


TABLE_2 = {
    "mmlu": {8: (1.38, 1.68, 1.78, 1.81), 16: (1.32, 1.55, 1.61, 1.63), 32: (1.23, 1.45, 1.50, 1.49)}
    | {64: (1.06, 1.27, 1.28, 1.29), 128: (0.83, 0.98, 1.01, 1.03)},
    "nq": {8: (2.85, 3.35, 3.41, 3.36), 16: (2.50, 2.89, 2.92, 2.98), 32: (2.00, 2.09, 2.25, 2.20)}
    | {64: (1.32, 1.47, 1.56, 1.55), 128: (0.78, 0.92, 0.95, 0.95)},
}
"""Mean seconds to the first token of PGDSF, GDSF, LRU and LFU by GiB of host memory (RAGCache Table 2)."""
_BASELINES: tuple[EvictionPolicy, ...] = ("gdsf", "lru", "lfu")


def policies(options: SimulateOptions, say: Say) -> Tables:
    """RAGCache Figure 17 and Table 2."""
    hits, times = [], []
    for curve, sizes in TABLE_2.items():
        case = ragcache_case("mistral-7b-a10g", curve, 2, options)
        rate = MODERATE * case.service_rate()
        for size, paper in sizes.items():
            say(f"policies, {curve}, {size} GiB")
            names: tuple[EvictionPolicy, ...] = ("pgdsf", *_BASELINES, ReuseConfig().policy)
            found = {name: case.run(case.with_policy(name, size * GIB), [rate])[0] for name in names}
            head = {"curve": curve, "host": f"{size} GiB"}
            hits.append(head | {name: f"{one.hit_rate:.1%}" for name, one in found.items()})
            row: dict[str, Any] = head | {"pgdsf s": found["pgdsf"].mean, "paper s": paper[0]}
            for name, seconds in zip(_BASELINES, paper[1:], strict=True):
                row[f"{name} / pgdsf"] = found[name].mean / found["pgdsf"].mean
                row[f"paper {name} / pgdsf"] = seconds / paper[0]
            times.append(row | {"ours / pgdsf": found[ReuseConfig().policy].mean / found["pgdsf"].mean})
    return {"Figure 17: documents found": hits, "Table 2: mean time to first token": times}


def reordering(options: SimulateOptions, say: Say) -> Tables:
    """RAGCache Figure 18: 1.1 times the rate sustained in order of arrival."""
    rows = []
    for curve in ("mmlu", "nq"):
        case = ragcache_case("mistral-7b-a10g", curve, 2, options)
        service = case.service_rate()
        for size in (16, 32, 64, 128):
            say(f"reordering, {curve}, {size} GiB")
            rates = [rate * service for rate in RATES]
            arrived = case.ragcache(size * GIB, scheduling="first_come")
            points = [(rate, one.mean) for rate, one in zip(rates, case.run(arrived, rates), strict=True)]
            rate = 1.1 * sustained_rate(points, OVERLOAD * points[0][1])
            first, second = (case.run(system, [rate])[0] for system in (arrived, case.ragcache(size * GIB)))
            row: dict[str, Any] = {"curve": curve, "host": f"{size} GiB", "requests/s": rate}
            row |= {"first come s": first.mean, "cache first s": second.mean, "ratio": first.mean / second.mean}
            hits = {"first come hits": f"{first.hit_rate:.1%}", "cache first hits": f"{second.hit_rate:.1%}"}
            rows.append(row | {"paper (all sizes)": "1.2 to 2.1"} | hits)
    return {"Figure 18: order of arrival / cache first": rows}


TABLE_4 = {0.5: 0.880, 1.0: 0.872, 1.5: 0.902, 2.0: 0.906}
"""Milliseconds by requests per second."""


def scheduling(options: SimulateOptions, say: Say) -> Tables:
    """RAGCache Table 4, in real seconds on the machine that runs the simulation."""
    case = ragcache_case("mistral-7b-a10g", "mmlu", 2, options)
    rows = []
    for rate, paper in TABLE_4.items():
        say(f"scheduling, {rate:g} requests per second")
        seconds = case.run(case.ragcache(), [rate])[0].scheduling_seconds
        row = {"requests/s": rate, "mean ms": 1e3 * float(np.mean(seconds)), "p50 ms": 1e3 * float(np.median(seconds))}
        rows.append(row | {"p95 ms": 1e3 * float(np.quantile(seconds, 0.95)), "paper ms": paper})
    return {"Table 4: deciding a step and what follows from its result": rows}


EXPERIMENTS: dict[str, Callable[[SimulateOptions, Say], Tables]] = {
    "overall": overall,
    "top-k": top_k,
    "large-models": large_models,
    "policies": policies,
    "reordering": reordering,
    "speculation": speculation,
    "scheduling": scheduling,
    "cache-craft": cache_craft,
    "cache-craft-times": cache_craft_times,
    "prefix-costs": prefix_costs,
    "held-out": held_out,
}


def run_simulate(options: SimulateOptions, on_progress: Say = lambda _: None) -> BenchResult:
    """Simulate the chosen experiments.

    Raises:
        UsageError: an option is invalid.
    """
    if unknown := set(options.experiments) - set(EXPERIMENTS):
        raise UsageError(f"unknown experiments {', '.join(sorted(unknown))}; known are {', '.join(EXPERIMENTS)}")
    environment = record_environment()
    tables: Tables = {}
    for name in options.experiments or EXPERIMENTS:
        tables |= EXPERIMENTS[name](options, on_progress)
    parameters = asdict(options) | {"experiments": list(options.experiments or EXPERIMENTS)}
    return BenchResult(
        "stillroom bench simulate",
        environment,
        parameters,
        Samples(),
        notes=list(_NOTES),
        tables=tables,
    )
