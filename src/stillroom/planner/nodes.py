"""Predicts what several machines gain: each with the planned memory, behind the router of a cluster (docs/cluster.md).

The machines run the product's engine, scheduler, knowledge tree and router on modelled hardware
(`planner.simulation.cluster_simulation`). A question reaches the router when its search is done, which takes its
measured time, with no wait and no engine beside it.

Not modelled: cores that search and engine, or several engines of one machine, share; the network between fronts and
engines; reports that are late.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.cluster.routers import CostRouter
from stillroom.core.kv import Link
from stillroom.planner.choice import Target
from stillroom.planner.forecast import Forecaster
from stillroom.planner.simulation.cluster_simulation import ClusterSetup, ClusterSimulation, NetworkModel
from stillroom.planner.simulation.simulated_corpus import PreparingPrompt, SimulatedCorpus
from stillroom.planner.splits import Split
from stillroom.planner.sustained import MOST_RATE, sustained

TIER_LATENCY_SECONDS = 0.0005
"""Of a request to the tier."""
_PAUSE_SECONDS = 3600.0
"""Between the warm-up requests and requests that come all at once."""


@dataclass(frozen=True, slots=True, eq=False)
class NodesForecast:
    """Predicted times of the workload's requests on some number of machines."""

    num_nodes: int
    has_tier: bool
    """Whether they share a KV tier, which takes the place of their disks."""
    seconds: NDArray[np.float64]
    """Time to first token at the workload's rate, search included: [n]."""
    kept_share: float
    """Share of prompt tokens whose KV was reused."""
    busiest: float
    """Requests of the machine that got most, as a multiple of the mean."""
    throughput: float
    """Requests per second of the engines, if all come at once."""
    sustained_rate: float
    """Requests per second up to which the target is met."""
    sustains_more: bool
    """Whether the target was met at the highest rate tried."""

    def percentile(self, percent: float) -> float:
        """Return a percentile of the time to first token, in seconds."""
        return float(np.percentile(self.seconds, percent))

    def as_json(self) -> dict[str, Any]:
        return {
            "nodes": self.num_nodes,
            "tier": self.has_tier,
            "p50_seconds": self.percentile(50),
            "p95_seconds": self.percentile(95),
            "p99_seconds": self.percentile(99),
            "kept_share": self.kept_share,
            "busiest": self.busiest,
            "throughput": self.throughput,
            "sustained_rate": self.sustained_rate,
            "sustains_more": self.sustains_more,
        }


@dataclass(frozen=True, slots=True, eq=False)
class NodesRun:
    """Results of the measured requests at one rate; fields as of `NodesForecast`."""

    seconds: NDArray[np.float64]
    kept_share: float
    busiest: float
    requests_per_second: float
    """Answered, from the first arrival to the last answer."""


class NodesForecaster:
    """Simulates a plan's workload on several machines. Deterministic."""

    def __init__(self, forecaster: Forecaster, split: Split, tier_bytes_per_second: float | None = None) -> None:
        """
        Args:
            split: memory of each machine.
            tier_bytes_per_second: of a tier that all machines share, for all of them together and for each.
        """
        self._forecaster, self._split, self._tier_speed = forecaster, split, tier_bytes_per_second

    def forecast(self, num_nodes: int, target: Target, *, has_tier: bool = False) -> NodesForecast:
        """Simulate the workload at its rate, all at once, and at the rates that a bisection needs."""
        at_rate, at_once = self.run(num_nodes, 1.0, has_tier), self.run(num_nodes, math.inf, has_tier)
        rate = self._forecaster.inputs.workload.rate

        def meets(times: float) -> bool:
            found = at_rate if times == 1.0 else self.run(num_nodes, times, has_tier)
            return float(np.percentile(found.seconds, target.percent)) <= target.seconds

        times = sustained(meets, min(MOST_RATE, at_once.requests_per_second / rate))
        return NodesForecast(
            num_nodes,
            has_tier,
            at_rate.seconds,
            at_rate.kept_share,
            at_rate.busiest,
            at_once.requests_per_second,
            times * rate,
            times == MOST_RATE,
        )

    def run(self, num_nodes: int, rate: float, has_tier: bool) -> NodesRun:
        """Simulate the warm-up requests and then the measured ones, at `rate` times the workload's rate.

        The warm-up requests come at the same times as the measured ones after them. If these come all at once, the
        engines are idle before.
        """
        inputs = self._forecaster.inputs
        workload, num_warm = inputs.workload, len(inputs.workload.warm)
        dues = np.array(workload.dues)
        warm_dues = np.resize(dues, num_warm) / (rate if math.isfinite(rate) else 1.0)
        began = float(warm_dues.max(initial=0.0)) + (0.0 if math.isfinite(rate) else _PAUSE_SECONDS)
        searched = self._forecaster.search_seconds(self._split)
        arrivals = np.concatenate([warm_dues, began + dues / rate + searched])
        order = np.argsort(arrivals, kind="stable")
        numbers = (*workload.warm, *workload.asked)
        setup = self._setup(num_nodes, has_tier)
        simulation = ClusterSimulation(setup, CostRouter(setup.costs), self._corpus, self._documents)
        outcome = simulation.run([inputs.found[numbers[at]].prompt for at in order.tolist()], arrivals[order].tolist())

        def measured(values: Sequence[float]) -> NDArray[np.float64]:
            """Return the values of the measured requests, in their order."""
            found = np.empty(len(values))
            found[order] = values
            return found[num_warm:]

        ends = arrivals[num_warm:] + measured(outcome.response_seconds)
        counts = np.bincount(measured(outcome.engine).astype(int), minlength=num_nodes)
        return NodesRun(
            searched + measured(outcome.seconds),
            float(measured(outcome.reused).sum() / max(1.0, measured(outcome.num_tokens).sum())),
            float(counts.max() / counts.mean()),
            len(workload.asked) / max(1e-9, float(ends.max()) - began),
        )

    def _setup(self, num_nodes: int, has_tier: bool) -> ClusterSetup:
        split = self._split
        network = None
        if has_tier:
            assert self._tier_speed is not None
            network = NetworkModel(Link(TIER_LATENCY_SECONDS, self._tier_speed), self._tier_speed)
        return ClusterSetup(
            hardware=replace(self._forecaster.inputs.hardware, device_bytes=split.device_kv, batch_delay_seconds=0.0),
            policy=self._forecaster.policy(split),
            num_engines=num_nodes,
            network=network,
        )

    @property
    def _documents(self) -> Sequence[PreparingPrompt]:
        """What the machines prepare before the warm-up, each window on one of them, as far as they have room."""
        forecaster, split = self._forecaster, self._split
        if forecaster.policy(split).reuse.mode != "prepared" or forecaster.inputs.documents.refusal:
            return ()
        return forecaster.windows(split.device_kv).prompts

    @cached_property
    def _corpus(self) -> SimulatedCorpus:
        return SimulatedCorpus(self._forecaster.inputs.documents.read)


def forecast_nodes(
    forecaster: Forecaster,
    split: Split,
    target: Target,
    most: int,
    tier_bytes_per_second: float | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[NodesForecast]:
    """Forecast 1, 2 and `most` machines, without a tier and, if its speed is given and KV is kept, with one."""
    nodes = NodesForecaster(forecaster, split, tier_bytes_per_second)
    has_tier = tier_bytes_per_second is not None and forecaster.inputs.policy.reuse.keeps_kv
    cases = [
        (num_nodes, tier)
        for tier in ((False, True) if has_tier else (False,))
        for num_nodes in sorted({1, min(2, most), most})
    ]
    found = []
    for done, (num_nodes, tier) in enumerate(cases):
        on_progress(done, len(cases))
        found.append(nodes.forecast(num_nodes, target, has_tier=tier))
    on_progress(len(cases), len(cases))
    return found
