"""A plan for programs: plain values."""

import math
from dataclasses import asdict
from typing import Any

from stillroom.planner.choice import Option
from stillroom.planner.constraints import Shortfall, Sufficient
from stillroom.planner.inputs import PlanInputs
from stillroom.planner.planner import Plan
from stillroom.planner.what_if import Effect
from stillroom.retrieval.tiers.search_model import ScanModel, worst_error_of_line


def plan_as_json(plan: Plan, scene: PlanInputs) -> dict[str, Any]:
    """See docs/planning.md."""
    workload = scene.workload
    return {
        "target": {"ttft_seconds": plan.target.seconds, "percentile": plan.target.percent, "rate": plan.rate},
        "is_met": plan.is_feasible,
        "binding": None
        if plan.binding is None
        else {
            "constraint": plan.binding.constraint,
            # 0 where so few requests would keep it, and only a queue that grows without end does not
            "missed_by_seconds": max(0.0, plan.chosen.forecast.percentile(plan.target.percent) - plan.target.seconds),
            "alone": plan.binding.alone.as_json(),
        },
        "model": scene.model_name,
        "is_calibrated": scene.is_calibrated,
        "index": scene.index_kind,
        "workload": {"questions": len(scene.texts), "warm": len(workload.warm), "requests": len(workload.asked)},
        "chosen": _option(plan.chosen),
        "now": None if plan.current is None else _option(plan.current),
        "throughput": plan.throughput,
        "sustained_rate": plan.sustained_rate,
        "sustains_more": plan.sustains_more,
        "smallest_hit_rate": _rule(plan.rule),
        "hit_rates": None if plan.hits is None else asdict(plan.hits),
        "search_model": None if scene.index is None else _search_model(scene.index.profile.model),
        "options": [_option(option) for option in plan.options],
        "sensitivity": [_effect(effect) for effect in plan.sensitivity],
        "purchases": [_effect(effect) for effect in plan.purchases],
    }


def _search_model(model: ScanModel) -> dict[str, Any]:
    """With how far a straight line (Eq. 1) is from the times by batch size at most."""
    times = model.times
    return asdict(model) | {"eq_1_worst_error": worst_error_of_line(times.batch_sizes, times.scan_seconds)}


def _option(option: Option) -> dict[str, Any]:
    return {"bytes": asdict(option.split), "predicted": option.forecast.as_json()}


def _effect(effect: Effect) -> dict[str, Any]:
    predicted = None if effect.forecast is None else effect.forecast.as_json()
    return {"name": effect.name, "remark": effect.remark, "predicted": predicted}


def _rule(rule: Sufficient | Shortfall | None) -> dict[str, Any] | None:
    if isinstance(rule, Shortfall) and math.isinf(rule.needed):  # JSON has no infinity
        return {"binding": rule.binding, "needed": None, "possible": rule.possible}
    return None if rule is None else asdict(rule)
