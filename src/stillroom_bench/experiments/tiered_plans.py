"""Plans of `bench tiered --answers` for a target: VectorLiteRAG's rule (Eq. 7 to 10), and a simulation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stillroom.planner.constraints import Shortfall, smallest_hit_rate
from stillroom.retrieval.tiers.partition import Lists, hottest
from stillroom.retrieval.tiers.search_profile import SearchProfile, rate_at
from stillroom_bench.instrument.statistics import Interval, summarise_shares

PERCENT = 95.0
"""Share of the first tokens that a target is for."""
_SEARCH_TARGETS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Targets of the search, as multiples of the least that all lists on disk keep."""


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """Speed of the model without search and with one request at a time."""

    seconds: float
    """95th percentile of time to first token."""
    per_second: float
    """Requests served per second."""


@dataclass(frozen=True, slots=True)
class PlannedDivision:
    """The rule's result for one target."""

    slo: float
    """Target of time to first token in seconds."""
    held: Lists | None
    """Lists in RAM; None if no hit rate reaches the target."""
    verdict: str


@dataclass(frozen=True, slots=True)
class SimulatedDivision:
    """Lists in RAM and the first tokens that the simulation forecasts for them."""

    held: Lists
    seconds: Any
    """Times to first token, [requests]."""

    def within(self, slo: float) -> float:
        """Return the share of the first tokens within a target."""
        return float((self.seconds <= slo).mean())


def plan_for(slo: float, unloaded: UnloadedModel, profile: SearchProfile, nprobe: int) -> PlannedDivision:
    """Return the fewest lists in RAM with which the search stays within the target minus the model's time."""
    batch_sizes = profile.model.times.batch_sizes
    budget = max(slo - unloaded.seconds, 1e-6)
    found = smallest_hit_rate(rate_at(profile, nprobe), batch_sizes, unloaded.per_second, budget)
    if isinstance(found, Shortfall):
        verdict = f"no hit rate: {found.binding}, {found.possible:.3g} of {found.needed:.3g}/s"
        return PlannedDivision(slo, None, verdict)
    return PlannedDivision(slo, hottest(profile.accesses(), found.hit_rate), f"hit rate {found.hit_rate:.0%}")


def memory_by_target(unloaded: UnloadedModel, profile: SearchProfile, nprobe: int) -> list[dict[str, Any]]:
    """Return the bytes of lists that the rule puts into RAM, by the search's share of the target (Table 1).

    By Eq. 9 a target is at least twice the time of a search, so targets are multiples of twice the time of one search
    with all lists on disk.
    """
    smallest = profile.model.times.batch_sizes[0]
    on_disk = 2 * smallest / rate_at(profile, nprobe)(0.0, smallest)
    rows = []
    for share in _SEARCH_TARGETS:
        plan = plan_for(unloaded.seconds + share * on_disk, unloaded, profile, nprobe)
        row: dict[str, Any] = {"search within, ms": 1e3 * share * on_disk, "rule": plan.verdict}
        if plan.held is not None:
            num_bytes = int(profile.sizes[plan.held].sum()) * profile.bytes_per_vector
            row |= {"lists in RAM": len(plan.held), "MB in RAM": num_bytes / 1e6}
            row |= {"of all bytes": f"{num_bytes / profile.list_bytes:.1%}"}
        rows.append(row)
    return rows


def chosen_divisions(simulated: Sequence[SimulatedDivision], slos: Sequence[float]) -> list[Lists]:
    """Return the lists that the simulation chooses for each target that it expects to be met."""
    found = (smallest_within(simulated, slo) for slo in slos)
    return [one.held for one in found if one is not None]


def smallest_within(simulated: Sequence[SimulatedDivision], slo: float) -> SimulatedDivision | None:
    """Return the division with the fewest lists in RAM that keeps the target; None if none does."""
    keeping = [one for one in simulated if one.within(slo) >= PERCENT / 100]
    return min(keeping, key=lambda one: len(one.held), default=None)


def division_name(held: Lists, nlist: int) -> str:
    return {0: "all on disk", nlist: "all in RAM"}.get(len(held), f"{len(held) / nlist:.1%} of lists in RAM")


def plan_row(plan: PlannedDivision, simulated: Sequence[SimulatedDivision], nlist: int) -> dict[str, Any]:
    """Return what both plans put into RAM for a target."""
    found = smallest_within(simulated, plan.slo)
    most = max(one.within(plan.slo) for one in simulated)
    return {
        "target ms": 1e3 * plan.slo,
        "rule (Eq. 7 to 10)": plan.verdict,
        "its lists in RAM": "" if plan.held is None else division_name(plan.held, nlist),
        "simulation": f"none keeps it, {most:.0%} at most" if found is None else f"{found.within(plan.slo):.0%}",
        "its lists": "" if found is None else division_name(found.held, nlist),
    }


def within_rows(
    plan: PlannedDivision,
    divisions: dict[str, Lists],
    forecast: dict[str, Any],
    values: dict[str, dict[str, list[float]]],
) -> list[dict[str, Any]]:
    """Return a row per division: the share within the target by the rule, by the simulation, and measured.

    Args:
        forecast: times to first token of each division, [requests].
        values: samples of each division, by metric.
    """
    rows = []
    for name, held in divisions.items():
        shares = values[name][f"within_{1e3 * plan.slo:.0f}_ms"]
        found = summarise_shares(shares)
        measured = Interval(found.mean, found.ci_low, found.ci_high)
        by_rule = plan.held is not None and len(held) >= len(plan.held)
        rows.append(
            {
                "target ms": 1e3 * plan.slo,
                "division": name,
                "rule": f"at least {PERCENT / 100:g}" if by_rule else f"below {PERCENT / 100:g}",
                "simulation": f"{SimulatedDivision(held, forecast[name]).within(plan.slo):.3f}",
                "measured": str(measured) if len(shares) > 1 else f"{found.mean:.3f}",
            }
        )
    return rows
