"""Plans how memory is split between the lists of the vector index and kept KV (VectorLiteRAG 4.1, extended to KV)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stillroom.errors import PromptTooLongError, UsageError
from stillroom.planner.choice import Option, Target, choose, simulate_splits
from stillroom.planner.constraints import Shortfall, Sufficient, smallest_hit_rate
from stillroom.planner.forecast import Forecast, Forecaster, Variation
from stillroom.planner.preparing import NUM_SIMULATIONS, PreparingPlan, plan_preparing
from stillroom.planner.splits import Budgets, Split, candidate_splits
from stillroom.planner.sustained import MOST_RATE, sustained
from stillroom.planner.what_if import Effect, purchases, sensitivity
from stillroom.retrieval.tiers.hit_rates import HitRates
from stillroom.retrieval.tiers.search_model import hits_of
from stillroom.retrieval.tiers.search_profile import rate_at

_NO_WAIT = Variation(rate=math.inf)
"""All questions arrive at time 0: gives the throughput of search and model."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Why the plan misses its target."""

    constraint: Literal["prefill", "search", "load"]
    alone: Forecast
    """Of one question at a time."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The chosen split, its alternatives and its limits."""

    target: Target
    rate: float
    chosen: Option
    options: tuple[Option, ...]
    current: Option | None
    """The present configuration; None if it cannot run."""
    throughput: float
    """Requests per second that search and model can serve; the queue grows without bound at a higher rate."""
    sustained_rate: float
    """Requests per second up to which the target is met; 0 if one question at a time misses it."""
    sustains_more: bool
    """Whether the target was met at the highest rate tried."""
    binding: Binding | None
    """None if the target is met."""
    rule: Sufficient | Shortfall | None
    """VectorLiteRAG's rule, with the wait for the model and shared cores counted; None without lists."""
    hits: HitRates | None
    """Beta-binomial hit rates of the asked questions (4.1), with the chosen lists on devices and in RAM; None without
    lists."""
    sensitivity: tuple[Effect, ...]
    purchases: tuple[Effect, ...]
    """Best first."""
    preparing: PreparingPlan

    @property
    def is_feasible(self) -> bool:
        return self.binding is None


def make_plan(
    forecaster: Forecaster,
    budgets: Budgets,
    target: Target,
    current: Split | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Simulate the grid, choose a split, and forecast changes to it.

    Raises:
        UsageError: no split is possible: the disk cannot hold the lists, or the device cannot hold a prompt.
    """
    splits = candidate_splits(budgets, forecaster.list_bytes, forecaster)
    if not splits:
        missing = forecaster.list_bytes - budgets.disk
        raise UsageError(
            f"the lists of the index do not fit: {missing:,} bytes are missing on disk; raise --disk by that"
        )
    progress = _PlanProgress(on_progress, len(splits) + 24 + NUM_SIMULATIONS)
    options = simulate_splits(forecaster, splits, progress.step)
    if not options:
        try:
            forecaster.forecast(splits[0])  # has the most bytes for KV
        except PromptTooLongError as error:
            raise UsageError(f"{error}; or give --device-memory more than {budgets.device:,} bytes") from None
    chosen = choose(options, target.percent)
    alone = forecaster.forecast(chosen.split, Variation(is_alone=True))
    rate = forecaster.inputs.workload.rate
    throughput = forecaster.forecast(chosen.split, _NO_WAIT).requests_per_second
    is_met = target.is_met(chosen.forecast) and rate <= throughput
    most = min(MOST_RATE, throughput / rate)

    def meets(times: float) -> bool:
        progress.step()
        return target.is_met(forecaster.forecast(chosen.split, Variation(rate=times)))

    times = sustained(meets, most) if target.is_met(alone) else 0.0
    plan = Plan(
        target,
        rate,
        chosen,
        tuple(options),
        _current(forecaster, current),
        throughput,
        times * rate,
        times == MOST_RATE,
        None if is_met else binding_constraint(alone, target),
        sufficient_hit_rate(forecaster, chosen, target),
        _hits(forecaster, chosen.split),
        tuple(sensitivity(forecaster, chosen.split, progress.step)),
        tuple(purchases(forecaster, budgets, chosen.split, target, progress.step)),
        plan_preparing(forecaster.inputs, chosen.split, progress.step),
    )
    progress.end()
    return plan


def binding_constraint(alone: Forecast, target: Target) -> Binding:
    """Return what makes the plan miss the target.

    `load` if one question at a time meets it; else the longer of search and prefill, among the questions that miss it.
    """
    if target.is_met(alone):
        return Binding("load", alone)
    late = alone.seconds > target.seconds
    search = float(alone.search_seconds[late].mean())
    return Binding("search" if 2 * search > float(alone.seconds[late].mean()) else "prefill", alone)


class _PlanProgress:
    def __init__(self, on_progress: Callable[[int, int], None], total: int) -> None:
        self._on_progress, self._total, self._done = on_progress, total, 0

    def step(self) -> None:
        self._done = min(self._done + 1, self._total)
        self._on_progress(self._done, self._total)

    def end(self) -> None:
        self._on_progress(self._total, self._total)


def _current(forecaster: Forecaster, current: Split | None) -> Option | None:
    try:
        return None if current is None else Option(current, forecaster.forecast(current))
    except PromptTooLongError:
        return None


def _hits(forecaster: Forecaster, split: Split) -> HitRates | None:
    index = forecaster.inputs.index
    if index is None:
        return None
    probed = np.stack([index.probed(number) for number in forecaster.inputs.workload.asked])
    return hits_of(forecaster.division_of(split), probed)


def sufficient_hit_rate(forecaster: Forecaster, chosen: Option, target: Target) -> Sufficient | Shortfall | None:
    """Apply Eq. 7 to 10 of VectorLiteRAG to a search beside the model.

    The paper gives each its own processors: the search has what the target leaves after the model's time alone, and
    runs as fast as alone. Here it has what the model and the wait for it leave at the workload's rate, and it is as
    slow as beside the computing model.
    """
    index = forecaster.inputs.index
    if index is None:
        return None
    profile, alone = index.profile, rate_at(index.profile, index.nprobe)
    slowdown = forecaster.inputs.overheads.cores.search_slowdown

    def rate(hit_rate: float, batch_size: int) -> float:
        return alone(hit_rate, batch_size) / slowdown

    at_once = forecaster.forecast(chosen.split, Variation(at_once=True))
    after_search = float(np.percentile(chosen.forecast.seconds - chosen.forecast.search_seconds, target.percent))
    rest = target.seconds - after_search
    if rest <= 0:
        return Shortfall("latency", float("inf"), rate(1.0, 1))
    return smallest_hit_rate(rate, profile.model.times.batch_sizes, at_once.requests_per_second, rest)
