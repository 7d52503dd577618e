"""`stillroom bench policies`: what is evicted from a full KV cache (RAGCache section 7.3, Figure 17 and Table 2).

Every policy replays the same requests on the knowledge tree and the KV manager. Nothing is timed: hit rates and
modelled seconds are exact and reproducible from the seed. How to read it: docs/policies-bench.md
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stillroom.errors import UsageError
from stillroom.kvcache.tree.eviction import gdsf, lfu, lru, pgdsf, prefix_heat, tamm
from stillroom_bench.experiments.experiment_options import PoliciesOptions
from stillroom_bench.instrument.bench_report import BenchResult, share_name
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.loads.policy_replay import Capacity, FirstIn, PolicyOutcome, Setup, replay
from stillroom_bench.loads.reuse_workloads import (
    MMLU_LIKE,
    NQ_LIKE,
    ReuseWorkload,
    made_workload,
    retrieved_workload,
    trace_workload,
)

QUEUE = 32
"""Waiting requests that look-ahead sees; RAGCache's reordering window (section 7.3)."""
DEFAULT = "prefix_heat + look-ahead"
BELADY = "belady (offline)"
ARMS = {
    DEFAULT: Setup(policy=prefix_heat, queue=QUEUE),
    "prefix_heat": Setup(policy=prefix_heat),
    "pgdsf + look-ahead": Setup(policy=pgdsf, queue=QUEUE),
    "pgdsf": Setup(policy=pgdsf),
    "gdsf": Setup(policy=gdsf),
    "lru": Setup(policy=lru),
    "lfu": Setup(policy=lfu),
    "fifo": Setup(makes_policy=FirstIn),
    "tamm": Setup(policy=tamm),
    "lru + look-ahead": Setup(policy=lru, queue=QUEUE),
    "lfu + look-ahead": Setup(policy=lfu, queue=QUEUE),
    BELADY: Setup(policy=None),
}
TIERS = Capacity(device=0.05, host=0.1, disk=0.2)

SWITCHES = {
    "none": Setup(policy=prefix_heat),
    "look-ahead, 8 wait": Setup(policy=prefix_heat, queue=8),
    "look-ahead, 32 wait": Setup(policy=prefix_heat, queue=32),
    "admission to disk": Setup(policy=prefix_heat, admits_by_frequency=True),
    "load or recompute": Setup(policy=prefix_heat, always_loads=False),
    "all, 32 wait": Setup(policy=prefix_heat, queue=32, admits_by_frequency=True, always_loads=False),
}
"""Each improvement over the paper alone."""

_CLOSE = 5e-4
"""Hit rates that differ by less count as equal: half of the third digit."""


def run_policies(options: PoliciesOptions, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Replay every workload with every policy.

    Raises:
        UsageError: the folder has no traces, or a trace cannot be read.
    """
    data, seed = options.data, options.seed
    environment = record_environment()
    notes = [f"Each policy but {BELADY} is online. Look-ahead sees {QUEUE} waiting requests."]
    families = [_made(options, seed + number) for number in range(options.repeat)]
    traces = [] if data is None else _traces(data, options, notes)
    if data is None:
        notes.append("Generated workloads only; --data names a folder with recorded traces")
    samples = Samples()
    cells: list[dict[str, list[PolicyOutcome]]] = []
    names: list[tuple[ReuseWorkload, float]] = []
    for index, workload in enumerate([*families[0], *traces]):
        for share in options.capacities:
            on_progress(f"{workload.name}, {share_name(share)} of its KV fits")
            same = [family[index] for family in families] if index < len(families[0]) else [workload]
            cell = {arm: [replay(one, Capacity(share), setup) for one in same] for arm, setup in ARMS.items()}
            cells.append(cell)
            names.append((workload, share))
    _add_samples(samples, cells, options.repeat)
    on_progress("each improvement alone")
    tables = {
        "Token hit rate": _table(names, cells, lambda outcome: outcome.hit_rate),
        "Share of prefill seconds saved": _table(names, cells, lambda outcome: outcome.saved_share),
        "Where another online policy has the better hit rate": losses(names, cells),
        "Three tiers, share of prefill seconds saved, each improvement alone": _switches([*families[0], *traces]),
    }
    parameters = {
        **asdict(options),
        "data": data and data.name,
        "workloads": list(dict.fromkeys(one.name for one, _ in names)),
    }
    return BenchResult(
        "stillroom bench policies", environment, parameters, samples, DEFAULT, notes=notes, tables=tables
    )


def _made(options: PoliciesOptions, seed: int) -> list[ReuseWorkload]:
    return [
        made_workload(popularity, top_k, num_asks=options.num_asks, seed=seed)
        for popularity in (MMLU_LIKE, NQ_LIKE)
        for top_k in options.top_ks
    ]


def _traces(data: Path, options: PoliciesOptions, notes: list[str]) -> list[ReuseWorkload]:
    folder = data / "traces"
    retrieved = sorted(folder.glob("rag_*.json"))
    recorded = sorted(folder.glob("mooncake_*.jsonl"))
    if not retrieved and not recorded:
        raise UsageError(f"{folder} has no rag_*.json and no mooncake_*.jsonl; name the folder that contains `traces`")
    ends = sorted({min(options.top_ks), max(options.top_ks)})
    notes.append(f"Traces: at most the first {options.num_asks} requests")
    found = [trace_workload(path, options.num_asks) for path in recorded]
    return found + [retrieved_workload(path, top_k, options.num_asks) for path in retrieved for top_k in ends]


def _mean(outcomes: Sequence[PolicyOutcome], value: Callable[[PolicyOutcome], float]) -> float:
    return sum(map(value, outcomes)) / len(outcomes)


def _add_samples(samples: Samples, cells: Sequence[dict[str, list[PolicyOutcome]]], repeat: int) -> None:
    """Add one sample per seed: the mean over all workloads and capacities."""
    for number in range(repeat):
        for arm in ARMS:
            own = [cell[arm][min(number, len(cell[arm]) - 1)] for cell in cells]
            metrics = {
                "token_hit_rate": _mean(own, lambda one: one.hit_rate),
                "compute_saved_ratio": _mean(own, lambda one: one.saved_share),
            }
            samples.add(arm, metrics)


def _table(
    names: Sequence[tuple[ReuseWorkload, float]],
    cells: Sequence[dict[str, list[PolicyOutcome]]],
    value: Callable[[PolicyOutcome], float],
) -> list[dict[str, Any]]:
    rows = []
    for (workload, share), cell in zip(names, cells, strict=True):
        means = {arm: _mean(outcomes, value) for arm, outcomes in cell.items()}
        row: dict[str, Any] = {"workload": workload.name, "fits": share_name(share)}
        row |= {arm: f"{mean:.3f}" for arm, mean in means.items()}
        row["default / belady"] = f"{means[DEFAULT] / means[BELADY]:.2f}" if means[BELADY] > 0 else "-"
        rows.append(row)
    return rows


def losses(
    names: Sequence[tuple[ReuseWorkload, float]], cells: Sequence[dict[str, list[PolicyOutcome]]]
) -> list[dict[str, Any]]:
    """Return a row per workload and capacity where another online policy has a higher hit rate than the default."""
    rows = []
    for (workload, share), cell in zip(names, cells, strict=True):
        rates = {arm: _mean(outcomes, lambda one: one.hit_rate) for arm, outcomes in cell.items() if arm != BELADY}
        best = max(rates, key=lambda arm: rates[arm])
        if rates[best] > rates[DEFAULT] + _CLOSE:
            rows.append(
                {
                    "workload": workload.name,
                    "fits": share_name(share),
                    "better": best,
                    "its hit rate": f"{rates[best]:.4f}",
                    "the default's": f"{rates[DEFAULT]:.4f}",
                }
            )
    return rows


def _switches(workloads: Sequence[ReuseWorkload]) -> list[dict[str, Any]]:
    rows = []
    for workload in workloads:
        saved = {name: replay(workload, TIERS, setup).saved_share for name, setup in SWITCHES.items()}
        rows.append({"workload": workload.name} | {name: f"{share:.3f}" for name, share in saved.items()})
    return rows
