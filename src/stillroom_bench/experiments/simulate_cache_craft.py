"""Cache-Craft Figures 22 to 24 and the cost of a shared prefix (llmds 5.9), on modelled machines with a virtual clock.

Part of `stillroom bench simulate`. How to read it: docs/simulate-bench.md
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stillroom.config.settings import ReuseConfig
from stillroom.planner.simulation.simulated_runtime import HardwareModel, SimulatedRuntime
from stillroom.planner.simulation.stepped_engine import EnginePolicy, Prompt, Tokens
from stillroom_bench.experiments.experiment_options import SimulateOptions
from stillroom_bench.experiments.machines import Machine, load_machine
from stillroom_bench.experiments.simulated_cases import (
    QUESTION_TOKENS,
    SGLANG,
    SYSTEM_TOKENS,
    VLLM,
    Case,
    Say,
    Tables,
    hardware_of,
)
from stillroom_bench.instrument.statistics import ratio_of_pairs
from stillroom_bench.loads.reuse_traffic import Pool, ReuseTraffic

_CHUNKS, _ANSWER = 5, 24
FIGURE_22 = {
    "llama3-8b-a100": {"anywhere 0%": ("1.9", "3.3"), "anywhere 30%": ("1.6", "2.1")},
    "llama3-70b-4xa100": {"anywhere 0%": ("2.0", "3.3"), "anywhere 30%": ("1.6", "2.0")},
}
"""Throughput and response speed as multiples of those of prefix caching, under heavy load (Cache-Craft 5.3.1)."""
_HEAVY = 0.95
"""Share of the maximum throughput of prefix caching."""


def cache_craft(options: SimulateOptions, say: Say) -> Tables:
    """Cache-Craft Figure 22 under heavy load: five chunks, prompts of about 3,300 tokens, answers of 24 tokens.

    With these lengths, prefill takes about 55 % of a request on four A100 (2.2). Arms: exact prefixes on the device,
    and reuse at any position with device and host tiers.
    """
    rows = []
    for name, papers in FIGURE_22.items():
        machine = load_machine(name)
        traffic = ReuseTraffic(chunk_pool(options.num_documents, options.seed), "nq", _CHUNKS, "drawn", options.seed)
        case = Case(machine, hardware_of(machine, max_seqs=32, max_tokens=_ANSWER), traffic, options)
        exact = ReuseConfig(host_bytes=int(machine["machine.host_bytes"]), disk_bytes=0)
        arms = {"prefix cache": SGLANG}
        for arm, ratio in (("anywhere 0%", 0.0), ("anywhere 30%", 0.3)):
            arms[arm] = EnginePolicy(reuse=replace(exact, mode="anywhere", recompute_ratio=ratio, audit_share=0.0))
        all_at_once = {arm: case.run(system, [1e9])[0] for arm, system in arms.items()}
        say(f"{name}, all at once")
        most = {arm: options.num_requests / one.wall_seconds for arm, one in all_at_once.items()}
        rate = _HEAVY * most["prefix cache"]
        found = {arm: case.run(system, [rate])[0] for arm, system in arms.items()}
        say(f"{name}, {rate:.2f} requests per second")
        slow = float(np.mean(found["prefix cache"].response_seconds))
        for arm, outcome in found.items():
            row: dict[str, Any] = {"machine": name, "arm": arm}
            row |= {"kept tokens": f"{outcome.num_kept_tokens / outcome.num_tokens:.0%}"}
            row |= {"requests/s at most": most[arm], "x": most[arm] / most["prefix cache"]}
            row |= {"paper": papers.get(arm, ("", ""))[0], "response s": float(np.mean(outcome.response_seconds))}
            row |= {"times faster": slow / float(np.mean(outcome.response_seconds))}
            rows.append(row | {"paper response": papers.get(arm, ("", ""))[1]})
    return {"Cache-Craft Figure 22, heavy load": rows}


def chunk_pool(size: int, seed: int) -> Pool:
    """Make chunks of log-normal length, so that prompts of five have about 3,300 tokens, Sys-X's median (5.1.2)."""
    rng = np.random.default_rng([seed, 1])
    mean = (3300 - SYSTEM_TOKENS - QUESTION_TOKENS) / _CHUNKS
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.18, 0.6, size), 64, 1500).astype(int)

    def text(length: int) -> tuple[int, ...]:
        return tuple(rng.integers(1, 256, size=length).tolist())

    chunks = tuple(text(length) for length in lengths.tolist())
    return Pool(text(SYSTEM_TOKENS), chunks, tuple((text(QUESTION_TOKENS),) for _ in chunks))


_MACHINE = "llama3-8b-a100"
_SEEDS = 5
"""Seeds of the experiments below, from `SimulateOptions.seed` on; intervals are over them."""
_PREFIX_CHUNKS = 3
"""Chunks of five that the prefix cache finds: 60 % of the tokens, as Cache-Craft 5.4 grants it."""
_RATIO = 0.25
"""Share that is recomputed at a ROUGE-L F1 of 0.85 (Cache-Craft 5.4)."""
FIGURE_23 = ((4, (1024, 2048, 4096, 8192, 16_384)), (1, (8192,)), (2, (8192,)), (8, (8192,)))
"""Prompts of a batch, and tokens of a prompt (Figures 23c and 23d)."""
_PAPER_23 = {(4, 8192): "1.6", (4, 16_384): "1.7"}
"""Full recomputation / Cache-Craft, where the text has a number (5.4.2)."""
_LOADS = (0.3, 0.6)
"""Requests per second of Figure 24, as shares of the maximum throughput of prefix caching."""


def cache_craft_times(options: SimulateOptions, say: Say) -> Tables:
    """Cache-Craft Figures 23c, 23d and 24: times to the first token by prompt, batch and percentile."""
    seeds = range(options.seed, options.seed + _SEEDS)
    rows = []
    for batch, lengths in FIGURE_23:
        for length in lengths:
            say(f"{batch} prompts of {length:,} tokens")
            rows.append(_batch_row(batch, length, seeds))
    return {"Cache-Craft Figures 23c and 23d": rows, "Cache-Craft Figure 24": _percentiles(options, seeds, say)}


def _batch_row(batch: int, length: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Return mean times to the first token of prompts that arrive together, with all their chunks kept."""
    hardware = hardware_of(load_machine(_MACHINE), max_seqs=batch, max_tokens=1)
    hardware = replace(hardware, max_model_len=2 * length, step_tokens=batch * length)
    found: dict[str, list[float]] = {}
    for seed in seeds:
        prompts = [_long_prompt(length, [seed, number]) for number in range(batch)]
        for arm, (system, warm) in _arms(prompts).items():
            runtime = SimulatedRuntime(hardware, system)
            runtime.ask(warm)
            found.setdefault(arm, []).append(runtime.ask(prompts, [0.0] * batch).mean)
    ours = found[f"anywhere {_RATIO:.0%}"]
    row: dict[str, Any] = {"batch": batch, "tokens": length}
    row |= {f"{arm} s": float(np.mean(seconds)) for arm, seconds in found.items()}
    for arm in ("full recompute", "prefix cache"):
        row[f"{arm} / anywhere"] = str(ratio_of_pairs(found[arm], ours))
    return row | {"paper, of full recompute": _PAPER_23.get((batch, length), "")}


def _arms(prompts: Sequence[Prompt]) -> Mapping[str, tuple[EnginePolicy, list[Prompt]]]:
    """Return each system with the prompts that it answers before.

    The prefix cache has the first three chunks of each prompt in their order; reuse at any position has all chunks in
    the reverse order.
    """
    begun = [(*prompt[: 1 + _PREFIX_CHUNKS], prompt[-1]) for prompt in prompts]
    reversed_ = [(prompt[0], *prompt[-2:0:-1], prompt[-1]) for prompt in prompts]
    anywhere = replace(SGLANG.reuse, mode="anywhere", recompute_ratio=_RATIO, audit_share=0.0)
    return {
        "full recompute": (VLLM, []),
        "prefix cache": (SGLANG, begun),
        f"anywhere {_RATIO:.0%}": (EnginePolicy(reuse=anywhere), reversed_),
    }


def _long_prompt(length: int, seed: Sequence[int]) -> Prompt:
    """Make a prompt of `length` random tokens with five chunks, whose lengths vary by some tenths."""
    rng = np.random.default_rng([*seed, length])
    weights = rng.lognormal(0.0, 0.3, _CHUNKS)
    ends = np.round(np.cumsum(weights / weights.sum()) * (length - SYSTEM_TOKENS - QUESTION_TOKENS)).astype(int)
    chunks = (_tokens(rng, count) for count in np.diff([0, *ends]).tolist())
    return (_tokens(np.random.default_rng(0), SYSTEM_TOKENS), *chunks, _tokens(rng, QUESTION_TOKENS))


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    return tuple(rng.integers(1, 256, size=count).tolist())


def _percentiles(options: SimulateOptions, seeds: Sequence[int], say: Say) -> list[dict[str, Any]]:
    """Return the mean and the 99th percentile of times to the first token of a trace (Figure 24), after warm-up."""
    machine = load_machine(_MACHINE)
    anywhere = EnginePolicy(
        reuse=replace(_device_and_host(machine), mode="anywhere", recompute_ratio=0.3, audit_share=0.0)
    )
    found: dict[tuple[float, str], list[tuple[float, float]]] = {}
    for seed in seeds:
        own = replace(options, seed=seed)
        traffic = ReuseTraffic(chunk_pool(options.num_documents, seed), "mmlu", _CHUNKS, "drawn", seed)
        case = Case(machine, hardware_of(machine, max_seqs=32, max_tokens=_ANSWER), traffic, own)
        most = options.num_requests / case.run(SGLANG, [1e9])[0].wall_seconds
        for name, system in (("prefix cache", SGLANG), ("anywhere 30%", anywhere)):
            say(f"seed {seed}, {name}")
            for load, outcome in zip(_LOADS, case.run(system, [load * most for load in _LOADS]), strict=True):
                times = outcome.mean, float(np.quantile(outcome.seconds, 0.99))
                found.setdefault((load, name), []).append(times)
    rows = []
    for load in _LOADS:
        row: dict[str, Any] = {"load": f"{load:g} of the maximum of prefix caching"}
        for place, title in enumerate(("mean", "p99")):
            exact, ours = ([times[place] for times in found[load, name]] for name in ("prefix cache", "anywhere 30%"))
            row |= {f"prefix cache {title} s": float(np.mean(exact)), f"anywhere 30% {title} s": float(np.mean(ours))}
            row[f"{title}: prefix cache / anywhere"] = str(ratio_of_pairs(exact, ours))
        rows.append(row | {"paper p99": "3"})
    return rows


def _device_and_host(machine: Machine) -> ReuseConfig:
    return ReuseConfig(host_bytes=int(machine["machine.host_bytes"]), disk_bytes=0)


_DOLLARS_AN_HOUR = 3.06
"""Price of a machine (llmds 5.9.1: AWS p3.2xlarge); only ratios follow from it."""
_SEQUENCES, _SEQUENCE_TOKENS = 100, 1000


def prefix_costs(options: SimulateOptions, say: Say) -> Tables:
    """llmds 5.9.1: 100 concurrent requests of 1,000 tokens that share a system prompt, with and without sharing.

    Time is what costs money: dollars are machine hours until all requests are answered, with answers of 24 tokens.
    """
    machine = load_machine(_MACHINE)
    hardware: HardwareModel = hardware_of(machine, max_seqs=_SEQUENCES, max_tokens=_ANSWER)
    rows = []
    for shared in (100, 200, 500, 800):
        say(f"{shared} of {_SEQUENCE_TOKENS:,} tokens shared")
        dollars: dict[str, list[float]] = {"off": [], "shared": []}
        for seed in range(options.seed, options.seed + _SEEDS):
            rng = np.random.default_rng([seed, shared])
            system = _tokens(rng, shared)
            lengths = rng.integers(_SEQUENCE_TOKENS * 9 // 10, _SEQUENCE_TOKENS * 11 // 10, size=options.num_requests)
            prompts: list[Prompt] = [
                (system, _tokens(rng, length - shared - QUESTION_TOKENS), _tokens(rng, QUESTION_TOKENS))
                for length in lengths.tolist()
            ]
            for arm, policy in (("off", VLLM), ("shared", SGLANG)):
                outcome = SimulatedRuntime(hardware, policy).ask(prompts, [0.0] * len(prompts))
                dollars[arm].append(outcome.wall_seconds / 3600 * _DOLLARS_AN_HOUR / len(prompts) * 1e6)
        row: dict[str, Any] = {"shared tokens": shared}
        row |= {f"{arm}, dollars a million": float(np.mean(values)) for arm, values in dollars.items()}
        row["shared / off"] = str(ratio_of_pairs(dollars["shared"], dollars["off"]))
        rows.append(row | {"paper": {200: "0.902 of the memory's cost"}.get(shared, "")})
    return {"llmds 5.9: cost of requests that share a prefix": rows}
