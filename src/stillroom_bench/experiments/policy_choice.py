"""`stillroom bench policies --changing` and `--anywhere`: which eviction policy suits which traffic, over seeds.

Changing: RAGCache's PGDSF is compared where its two inputs beside the frequency matter: the cost of a token, which is
equal, nearly equal or several times higher in long prompts, and recency, which matters if popular documents change.
Anywhere: Cache-Craft's `reusability` (3.3) and the other policies under reuse at any position. How to read it:
docs/policies-bench.md
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvcache.tree.eviction import NodeUse, gdsf, lfu, lru, pgdsf, prefix_heat, reusability
from stillroom_bench.experiments.experiment_options import PoliciesOptions
from stillroom_bench.experiments.machines import load_machine
from stillroom_bench.instrument.bench_report import BenchResult, share_name
from stillroom_bench.instrument.environment import Environment, record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.statistics import ratio_of_pairs
from stillroom_bench.loads.policy_replay import Capacity, FirstIn, PolicyOutcome, Setup, replay
from stillroom_bench.loads.reuse_workloads import MMLU_LIKE, NQ_LIKE, Lengths, changing_workload, made_workload

QUEUE = 32
NUM_ASKS, NUM_ASKS_ANYWHERE = 600, 400
"""Requests of a workload, unless fewer are asked for."""
CHANGES = (0, 2, 9)
"""How often all popular documents change at once during a workload."""
ROOM = 0.1
"""Share of the KV of all distinct pieces that fits on the device; there is no other tier."""
ANYWHERE_ROOM = (0.02, 0.05)


def gdsf_by_size(use: NodeUse) -> float:
    """clock + frequency: GDSF whose cost is proportional to the size, as RAGCache 7.3 configures its baseline."""
    return use.clock + use.frequency


ARMS = {
    "pgdsf": Setup(policy=pgdsf),
    "gdsf, cost by size": Setup(policy=gdsf_by_size),
    "gdsf, cost alone": Setup(policy=gdsf),
    "lru": Setup(policy=lru),
    "lfu": Setup(policy=lfu),
    "fifo": Setup(makes_policy=FirstIn),
    "prefix_heat": Setup(policy=prefix_heat),
    "prefix_heat, half-life 1,000": Setup(policy=prefix_heat, half_life_uses=1000.0),
    "pgdsf + look-ahead": Setup(policy=pgdsf, queue=QUEUE),
    "prefix_heat + look-ahead": Setup(policy=prefix_heat, queue=QUEUE),
}
"""The last one is the default of `reuse.policy`."""
_ANYWHERE = AnywhereOptions(recompute_ratio=0.0, selector="question", alpha=1.0)
ANYWHERE_ARMS = {
    policy.__name__: Setup(policy=policy, anywhere=_ANYWHERE) for policy in (reusability, pgdsf, lru, lfu, prefix_heat)
} | {"fifo": Setup(makes_policy=FirstIn, anywhere=_ANYWHERE)}
_NOTES = (
    "All policies replay the same requests on the knowledge tree; seconds are those of a cost model, nothing is timed.",
    "Ratios: the arm divided by pgdsf (or reusability), mean of the logarithms over the seeds, with the 95 % interval "
    "of Student's t over pairs of the same seed. One seed has no interval.",
    "Saved: share of the modelled prefill seconds. Hit rate: share of documents found (RAGCache 7.3). Tokens: share of "
    "document tokens that were not computed.",
)
_ANYWHERE_NOTE = (
    "The CFO (alpha 1) of the placed tokens is computed again. No attention is measured here, so every chunk has the "
    "same CCI, 0.75, and CFO varies by the overlap with the old context only."
)


def cost_cases() -> dict[str, tuple[Lengths, CostProfile]]:
    """Return documents and the costs of computing them, by the name of the case."""
    paper = load_machine("mistral-7b-a10g").costs()
    grid = paper.new
    equal = tuple(tuple(2.5e-4 * new for new in grid) for _ in paper.cached)
    rising = tuple(tuple(0.064 + 2.5e-4 * new + 8e-8 * new * (old + new / 2) for new in grid) for old in paper.cached)
    return {
        "every token costs the same": (Lengths(), CostProfile(paper.cached, grid, equal)),
        "RAGCache's machine and documents": (Lengths(2700.0, 0.8, 2000), paper),
        "long documents, attention dominates": (
            Lengths(8000.0, 1.0, 60_000),
            CostProfile(paper.cached, grid, rising),
        ),
    }


def run_policy_choice(options: PoliciesOptions, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Replay every case with every policy, over `options.repeat` seeds."""
    environment = record_environment()
    seeds = range(options.seed, options.seed + options.repeat)
    rows: list[dict[str, Any]] = []
    for name, (lengths, profile) in cost_cases().items():
        for changes in CHANGES:
            on_progress(f"{name}, {changes} changes")
            loads = [
                changing_workload(lengths, num_changes=changes, num_asks=min(NUM_ASKS, options.num_asks), seed=seed)
                for seed in seeds
            ]
            found = {
                arm: [replay(load, Capacity(ROOM), setup, profile) for load in loads] for arm, setup in ARMS.items()
            }
            rows += compared_rows({"costs": name, "popular documents change": changes}, found, "pgdsf")
    return _result("stillroom bench policies --changing", environment, options, _NOTES, {"Costs and changes": rows})


def run_anywhere_policies(options: PoliciesOptions, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Replay workloads under reuse at any position with every policy, over `options.repeat` seeds."""
    environment = record_environment()
    seeds = range(options.seed, options.seed + options.repeat)
    rows: list[dict[str, Any]] = []
    for popularity in (MMLU_LIKE, NQ_LIKE):
        num_asks = min(NUM_ASKS_ANYWHERE, options.num_asks)
        loads = [made_workload(popularity, 5, num_asks=num_asks, num_documents=400, seed=seed) for seed in seeds]
        for room in ANYWHERE_ROOM:
            on_progress(f"{popularity.name}, {share_name(room)} fits")
            found = {
                arm: [replay(load, Capacity(room), setup) for load in loads] for arm, setup in ANYWHERE_ARMS.items()
            }
            rows += compared_rows({"workload": loads[0].name, "fits": share_name(room)}, found, "reusability")
    notes = (*_NOTES, _ANYWHERE_NOTE)
    return _result("stillroom bench policies --anywhere", environment, options, notes, {"Reuse at any position": rows})


def _result(
    name: str,
    environment: Environment,
    options: PoliciesOptions,
    notes: Sequence[str],
    tables: dict[str, list[dict[str, Any]]],
) -> BenchResult:
    shown = {key: value for key, value in asdict(options).items() if key in ("num_asks", "repeat", "seed")}
    return BenchResult(name, environment, shown, Samples(), notes=list(notes), tables=tables)


def compared_rows(
    head: Mapping[str, Any], found: Mapping[str, Sequence[PolicyOutcome]], baseline: str
) -> list[dict[str, Any]]:
    """Return a row per arm: means over the repetitions, and ratios to the baseline with intervals over the pairs.

    A ratio is `-` if an arm found nothing in a repetition.
    """

    def values(arm: str, name: str) -> list[float]:
        return [float(getattr(one, name)) for one in found[arm]]

    def ratio(own: Sequence[float], other: Sequence[float]) -> str:
        return str(ratio_of_pairs(own, other)) if min(*own, *other) > 0 else "-"

    titles = {"saved": "saved_share", "hit rate": "document_hit_rate", "tokens": "hit_rate"}
    rows = []
    for arm in found:
        row: dict[str, Any] = {**head, "policy": arm}
        for title, name in titles.items():
            own, other = values(arm, name), values(baseline, name)
            row[title] = f"{sum(own) / len(own):.3f}"
            row[f"{title} / {baseline}"] = "" if arm == baseline else ratio(own, other)
        rows.append(row)
    return rows
