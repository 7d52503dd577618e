"""`stillroom bench cluster`: which engine of a cluster gets a request, simulated.

Stillroom's engines, scheduler, tree and router run on modelled machines on one virtual time line; everything is
deterministic. Every arm gets the same prompts at the same times; a repetition draws other orders and times. The first
half of the requests warms the engines. How to read it: docs/cluster.md
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from stillroom.cluster.prediction import EngineCosts
from stillroom.cluster.routers import (
    BoundedHash,
    CostRouter,
    LeastLoaded,
    PrefixScore,
    PrefixThreshold,
    RoundRobin,
    Router,
)
from stillroom.config.settings import PrepareConfig, ReuseConfig
from stillroom.core.kv import FULL_BITS, Link
from stillroom.errors import UsageError
from stillroom.planner.simulation.arrivals import arrivals_of
from stillroom.planner.simulation.cluster_simulation import (
    ClusterOutcome,
    ClusterSetup,
    ClusterSimulation,
    NetworkModel,
    NodeChange,
)
from stillroom.planner.simulation.simulated_runtime import HardwareModel, SimulatedRuntime
from stillroom.planner.simulation.stepped_engine import EnginePolicy, Prompt
from stillroom_bench.experiments.experiment_options import ClusterOptions
from stillroom_bench.experiments.machines import load_machine
from stillroom_bench.experiments.simulated_cases import VLLM, Say, Tables, hardware_of
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.statistics import Interval, summarise
from stillroom_bench.loads.cluster_traffic import ClusterTraffic, made_traffic, recorded_traffic, trace_name

GATE = 1.10
"""Times that routing by chunks must be faster than the best routing by prefix, set before the first measurement."""
OURS = "cost, chunks"
PREFIX_ARMS = ("prefix threshold", "prefix score", "cost, prefixes")
ARMS: dict[str, Callable[[EngineCosts], Router]] = {
    "round robin": lambda _: RoundRobin(),
    "least loaded": lambda _: LeastLoaded(),
    "hash of first chunk": lambda _: BoundedHash(),
    "hash of chunk set": lambda _: BoundedHash(uses_set=True),
    "prefix threshold": lambda _: PrefixThreshold(),
    "prefix score": lambda _: PrefixScore(),
    "cost, prefixes": lambda costs: CostRouter(costs.exact_only()),
    OURS: CostRouter,
}
_MODES = ("exact", "anywhere", "prepared")
_MAX_SEQS, _ANSWER_TOKENS = 32, 6
"""Concurrent requests of an engine; tokens of an answer, as on Natural Questions (RAGCache 7)."""
_K, _NUM_CHUNKS, _FITS = 5, 10_000, 0.05
"""Generated traffic: chunks of a question, all chunks, and the share of them whose KV an engine holds."""
_REQUESTS_PER_ENGINE = 200
_CAPACITY_REQUESTS = 200
_NOTES = (
    "Simulated: Stillroom's engines, scheduler, tree and routers on modelled machines; no model runs.",
    "The load is a multiple of the highest throughput of the engines without reuse.",
    "Ratios: mean time to first token of the arm divided by that of `cost, chunks`, per repetition on the same prompts "
    "and times; geometric mean with its 95 % interval by Student's t.",
)


@dataclass(frozen=True, slots=True)
class Case:
    """Traffic on a cluster."""

    traffic: ClusterTraffic
    setup: ClusterSetup
    num_requests: int
    per_second: float

    def run(self, arm: str, seed: int, options: ClusterOptions) -> ClusterOutcome:
        """Run one arm; outcomes of the same seed are of the same prompts and times."""
        prompts, dues = self._load(seed, options)
        router = ARMS[arm](self.setup.costs)
        documents = self.traffic.windows() if self.setup.policy.reuse.mode == "prepared" else ()
        return ClusterSimulation(self.setup, router, self.traffic.corpus(), documents).run(prompts, dues)

    def _load(self, seed: int, options: ClusterOptions) -> tuple[list[Prompt], list[float]]:
        prompts = self.traffic.prompts(self.num_requests, [options.seed, seed, 7])
        draw = arrivals_of(options.arrivals)
        return prompts, draw(len(prompts), self.per_second, [options.seed, seed, 8])


def capacity(hardware: HardwareModel, traffic: ClusterTraffic, seed: int) -> float:
    """Return the highest throughput of one engine without reuse, in requests per second: all requests at once."""
    prompts = traffic.prompts(_CAPACITY_REQUESTS, [seed, 9])
    outcome = SimulatedRuntime(hardware, VLLM).ask(prompts, [0.0] * len(prompts))
    return len(prompts) / outcome.wall_seconds


class Measured:
    """Outcomes of arms over the repetitions of one case."""

    def __init__(self) -> None:
        self.outcomes: dict[str, list[ClusterOutcome]] = {}

    def row(self, arm: str) -> dict[str, Any]:
        """Return an arm's figures over the measured half of all repetitions."""
        ones = self.outcomes[arm]
        seconds = [value for one in ones for value in _half(one.seconds)]
        reused = sum(sum(_half(one.reused)) for one in ones) / sum(sum(_half(one.num_tokens)) for one in ones)
        return {
            "arm": arm,
            "mean ms": 1e3 * float(np.mean(seconds)),
            "p99 ms": 1e3 * float(np.quantile(seconds, 0.99)),
            "tokens reused": f"{reused:.1%}",
            "busiest / mean": float(np.mean([_imbalance(_half(one.engine)) for one in ones])),
            "copies": float(np.mean([one.copies for one in ones])),
            "time / chunks": str(self.ratio(arm, OURS)),
        }

    def ratio(self, arm: str, other: str) -> Interval:
        """Return how many times as long the arm's requests wait as the other's, with its interval."""
        pairs = zip(self.outcomes[arm], self.outcomes[other], strict=True)
        return geometric([_mean(one) / _mean(two) for one, two in pairs])

    def fastest(self, arms: Sequence[str]) -> str:
        return min(arms, key=lambda arm: np.mean([_mean(one) for one in self.outcomes[arm]]))


def geometric(ratios: Sequence[float]) -> Interval:
    """Return the geometric mean of ratios with its 95 % interval."""
    found = summarise([math.log(ratio) for ratio in ratios])
    return Interval(*(math.exp(value) for value in (found.mean, found.ci_low, found.ci_high)))


def verdict(ratio: Interval, margin: float = GATE) -> str:
    """Return whether a ratio reaches the margin, never kinder than its interval."""
    if math.isnan(ratio.low):
        return "unknown: one repetition"
    if ratio.low >= margin:
        return "passes"
    missed = "fails" if ratio.high < margin else "undecided"
    return f"{missed}, {'faster' if ratio.low > 1.0 else 'slower' if ratio.high < 1.0 else 'no difference shown'}"


def _say_of(say: Say, head: Mapping[str, Any], text: str) -> None:
    say(f"{', '.join(map(str, head.values()))}: {text}")


def _half(values: Sequence[Any]) -> Sequence[Any]:
    """Return the measured half."""
    return values[len(values) // 2 :]


def _mean(outcome: ClusterOutcome) -> float:
    return float(np.mean(_half(outcome.seconds)))


def _imbalance(engines: Sequence[int]) -> float:
    """Return the requests of the busiest engine as a multiple of the mean over engines that got any."""
    counts = np.bincount(engines)
    return float(counts.max() / counts[counts > 0].mean())


def measure(case: Case, arms: Sequence[str], options: ClusterOptions, say: Callable[[str], None]) -> Measured:
    """Run all arms, interleaved, over all repetitions."""
    found = Measured()
    for repetition in range(options.repeat):
        for arm in arms:
            say(f"run {repetition + 1}: {arm}")
            found.outcomes.setdefault(arm, []).append(case.run(arm, repetition, options))
    return found


def traces(options: ClusterOptions, say: Say) -> Tables:
    """Compare routers on recorded retrievals; the gate."""
    rows, gates = [], []
    for case, head in _recorded_cases(options):
        found = measure(case, options.arms or tuple(ARMS), options, partial(_say_of, say, head))
        rows += [head | found.row(arm) for arm in found.outcomes]
        prefix = [arm for arm in PREFIX_ARMS if arm in found.outcomes]
        if OURS in found.outcomes and prefix:
            best = found.fastest(prefix)
            ratio = found.ratio(best, OURS)
            gates.append(head | {"best prefix arm": best, "time / chunks": str(ratio), "gate": verdict(ratio)})
    return {f"Gate: at least {GATE:.2f} times the speed of the best prefix routing": gates, "Recorded traces": rows}


def _recorded_cases(options: ClusterOptions) -> Iterator[tuple[Case, dict[str, Any]]]:
    files = {trace_name(file): file for file in options.data.glob("rag_*.json")} if options.data else {}
    if not files:
        raise UsageError("--experiment traces needs --data: a folder with rag_*.json, traces of retrieved passages")
    if unknown := set(options.traces) - set(files):
        raise UsageError(f"no trace {', '.join(sorted(unknown))} in --data; it has {', '.join(sorted(files))}")
    machine = load_machine(options.machine)
    hardware = hardware_of(machine, max_seqs=_MAX_SEQS, max_tokens=_ANSWER_TOKENS)
    host_bytes = int(machine["machine.host_bytes"])
    popularity = options.popularity or None
    for traffic in (recorded_traffic(files[name], popularity) for name in options.traces or sorted(files)):
        rate = capacity(hardware, traffic, options.seed)
        for mode in options.modes:
            for num_engines in options.engines:
                setup = ClusterSetup(
                    hardware=hardware,
                    policy=_policy(mode, host_bytes),
                    num_engines=num_engines,
                    num_prepared_copies=options.copies or num_engines,
                )
                count = options.num_requests or len(traffic.retrieved)
                case = Case(traffic, setup, count, options.load * num_engines * rate)
                yield case, {"trace": traffic.name, "reuse": mode, "engines": num_engines}


def _policy(mode: str, host_bytes: int) -> EnginePolicy:
    if mode not in _MODES:
        raise UsageError(f"unknown mode {mode!r}; known are {', '.join(_MODES)}")
    reuse = ReuseConfig(mode=mode, host_bytes=host_bytes, disk_bytes=0, audit_share=0.0)  # type: ignore[arg-type]
    return EnginePolicy(reuse=reuse, prepare=PrepareConfig(bits=FULL_BITS, host_bytes=host_bytes))


def made_case(options: ClusterOptions, num_engines: int, mode: str, *, has_topics: bool, **changes: Any) -> Case:
    """Make a case of generated traffic: an engine holds 5 % of the chunks besides its running requests."""
    if mode == "prepared":
        raise UsageError("--mode prepared needs --experiment traces: generated chunks have no room to be prepared")
    count = options.num_requests or _REQUESTS_PER_ENGINE * num_engines
    traffic = made_traffic(_NUM_CHUNKS, count, _K, options.seed, has_topics=has_topics)
    hardware = hardware_of(load_machine(options.machine), max_seqs=_MAX_SEQS, max_tokens=_ANSWER_TOKENS)
    longest = max(map(len, traffic.chunks)) * _K + 200
    room = round(_FITS * traffic.num_chunk_tokens) + 8 * longest
    hardware = replace(hardware, device_bytes=room * hardware.bytes_per_token, max_seqs=8)
    setup = ClusterSetup(hardware=hardware, policy=_policy(mode, 0), num_engines=num_engines, **changes)
    return Case(traffic, setup, count, options.load * num_engines * capacity(hardware, traffic, options.seed))


def generated(options: ClusterOptions, say: Say) -> Tables:
    """Compare routers on generated traffic: topics, and independent chunks."""
    rows = []
    for has_topics in (True, False):
        for mode in options.modes:
            for num_engines in options.engines:
                case = made_case(options, num_engines, mode, has_topics=has_topics)
                head = {"traffic": case.traffic.name, "reuse": mode, "engines": num_engines}
                found = measure(case, options.arms or tuple(ARMS), options, partial(_say_of, say, head))
                rows += [head | found.row(arm) for arm in found.outcomes]
    return {f"Generated traffic, {_FITS:.0%} of the chunks fit an engine": rows}


AGES = (0.0, 0.1, 1.0)
"""Seconds between two reports of an engine."""
AGE_ARMS = ("cost, prefixes", OURS)
CHANGE_ARMS = ("round robin", "hash of chunk set", *AGE_ARMS)
TIER_ARMS = ("round robin", OURS)


def age(options: ClusterOptions, say: Say) -> Tables:
    """Let beliefs grow old, with one front and with four that do not see each other's requests."""
    rows = []
    for num_engines in options.engines:
        for num_fronts in (1, 4):
            for seconds in AGES:
                changes = {"num_fronts": num_fronts, "report_seconds": seconds}
                case = made_case(options, num_engines, "anywhere", has_topics=True, **changes)
                head = {"engines": num_engines, "fronts": num_fronts, "reports every s": seconds}
                found = measure(case, AGE_ARMS, options, partial(_say_of, say, head))
                rows += [head | found.row(arm) for arm in AGE_ARMS]
    return {"Age of beliefs, topics": rows}


def engine_changes(options: ClusterOptions, say: Say) -> Tables:
    """Lose a quarter of the engines, or add as many, when three quarters of the requests have come."""
    rows = []
    for num_engines in options.engines:
        steady = made_case(options, num_engines, "anywhere", has_topics=True)
        moment = 0.75 * steady.num_requests / steady.per_second
        share = max(1, num_engines // 4)
        lost = tuple(NodeChange(moment, "lose", engine) for engine in range(share))
        added = tuple(NodeChange(moment, "add", num_engines + number) for number in range(share))
        for name, happens in {"none": (), f"{share} lost": lost, f"{share} added": added}.items():
            case = replace(steady, setup=replace(steady.setup, changes=happens))
            head = {"engines": num_engines, "change": name}
            found = measure(case, CHANGE_ARMS, options, partial(_say_of, say, head))
            for arm in CHANGE_ARMS:
                outcomes = found.outcomes[arm]
                after = [second for one in outcomes for second in _half(_half(one.seconds))]
                more = {
                    "mean ms after": 1e3 * float(np.mean(after)),
                    "sent again": sum(o.num_rerouted for o in outcomes),
                }
                rows.append(head | found.row(arm) | more)
    return {"Engines lost and added, topics": rows}


PORT = Link(0.0005, 3.125e9)
"""Of each engine: 25 GbE, and half a millisecond for a request to the tier."""
NETWORKS = {"no tier": None, "as one port": NetworkModel(PORT, 3.125e9), "as all ports": NetworkModel(PORT, 1e15)}
"""Bandwidth of the tier."""


def tier(options: ClusterOptions, say: Say) -> Tables:
    """Give the engines a KV tier behind 25 GbE; its bandwidth is that of one port, or more than all can use."""
    rows = []
    for num_engines in options.engines:
        for has_topics in (True, False):
            for name, network in NETWORKS.items():
                case = made_case(options, num_engines, "anywhere", has_topics=has_topics, network=network)
                head = {"traffic": case.traffic.name, "engines": num_engines, "tier": name}
                found = measure(case, TIER_ARMS, options, partial(_say_of, say, head))
                for arm in TIER_ARMS:
                    outcomes = found.outcomes[arm]
                    loaded, stored = (
                        sum(getattr(one, kind) / one.wall_seconds for one in outcomes) / len(outcomes) / 1e9
                        for kind in ("num_loaded_bytes", "num_stored_bytes")
                    )
                    rows.append(head | found.row(arm) | {"loaded GB/s": loaded, "stored GB/s": stored})
    return {"Network tier behind 25 GbE": rows}


EXPERIMENTS: dict[str, Callable[[ClusterOptions, Say], Tables]] = {
    "traces": traces,
    "generated": generated,
    "age": age,
    "changes": engine_changes,
    "tier": tier,
}


def run_cluster(options: ClusterOptions, on_progress: Say = lambda _: None) -> BenchResult:
    """Simulate the chosen experiments.

    Raises:
        UsageError: an option is invalid.
    """
    for kind, chosen, known in (("experiments", options.experiments, EXPERIMENTS), ("arms", options.arms, ARMS)):
        if unknown := set(chosen) - set(known):
            raise UsageError(f"unknown {kind} {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    tables: Tables = {}
    for name in options.experiments:
        tables |= EXPERIMENTS[name](options, on_progress)
    parameters = asdict(options) | {"data": str(options.data), "arrivals": str(options.arrivals)}
    return BenchResult(
        "stillroom bench cluster",
        record_environment(),
        parameters,
        Samples(),
        notes=list(_NOTES),
        tables=tables,
    )
