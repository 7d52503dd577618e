"""Converts a plan to plain JSON values."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from stillroom.planner.accuracy import Accuracy
from stillroom.planner.choice import Option
from stillroom.planner.constraints import Shortfall, Sufficient
from stillroom.planner.inputs import PlanInputs
from stillroom.planner.nodes import NodesForecast
from stillroom.planner.planner import Plan
from stillroom.planner.what_if import Effect
from stillroom.retrieval.tiers.search_model import ScanModel, worst_error_of_line


def plan_as_json(
    plan: Plan, inputs: PlanInputs, accuracy: Accuracy | None = None, nodes: Sequence[NodesForecast] = ()
) -> dict[str, Any]:
    """Return the JSON that docs/planning.md describes.

    Args:
        accuracy: of an earlier validation on this machine; None: there was none, so the times only order choices.
        nodes: of `--nodes`.
    """
    workload = inputs.workload
    return {
        "target": {"ttft_seconds": plan.target.seconds, "percentile": plan.target.percent, "rate": plan.rate},
        "is_met": plan.is_feasible,
        "binding": None
        if plan.binding is None
        else {
            "constraint": plan.binding.constraint,
            # 0 if these few requests meet the target, but the queue grows without bound
            "missed_by_seconds": max(0.0, plan.chosen.forecast.percentile(plan.target.percent) - plan.target.seconds),
            "alone": plan.binding.alone.as_json(),
        },
        "model": inputs.model_name,
        "is_calibrated": inputs.is_calibrated,
        "overheads": asdict(inputs.overheads),
        "accuracy": None if accuracy is None else accuracy.as_json(),
        "index": inputs.index_kind,
        "workload": {"questions": len(inputs.texts), "warm": len(workload.warm), "requests": len(workload.asked)},
        "chosen": _option(plan.chosen),
        "now": None if plan.current is None else _option(plan.current),
        "throughput": plan.throughput,
        "sustained_rate": plan.sustained_rate,
        "sustains_more": plan.sustains_more,
        "smallest_hit_rate": _rule(plan.rule),
        "hit_rates": None if plan.hits is None else asdict(plan.hits),
        "search_model": None if inputs.index is None else _search_model(inputs.index.profile.model),
        "options": [_option(option) for option in plan.options],
        "sensitivity": [_effect(effect) for effect in plan.sensitivity],
        "purchases": [_effect(effect) for effect in plan.purchases],
        "preparing": plan.preparing.as_json(),
        "nodes": [one.as_json() for one in nodes],
    }


def _search_model(model: ScanModel) -> dict[str, Any]:
    """Return the search model, with the largest error of a straight line (Eq. 1) over batch sizes."""
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
