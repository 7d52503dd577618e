"""Forecasts of changes to a plan: each choice halved and doubled, and what to buy or give up next."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from stillroom.errors import PromptTooLongError
from stillroom.planner.choice import Target, choose, simulate_splits
from stillroom.planner.forecast import Forecast, Forecaster, Variation
from stillroom.planner.splits import Budgets, Split, candidate_splits

_GPU = 10.0
"""Assumed speed-up of a GPU; not measured on any."""


@dataclass(frozen=True, slots=True)
class Effect:
    """A change to the plan and its forecast."""

    name: str
    forecast: Forecast | None
    """None if the change cannot work."""
    remark: str = ""


def _try(forecaster: Forecaster, name: str, split: Split, variation: Variation, remark: str = "") -> Effect:
    try:
        return Effect(name, forecaster.forecast(split, variation), remark)
    except PromptTooLongError:
        return Effect(name, None, "the longest prompt does not fit")


def sensitivity(forecaster: Forecaster, split: Split, step: Callable[[], None]) -> list[Effect]:
    """Forecast each choice halved and doubled, with all others unchanged."""
    reuse, found = forecaster.inputs.policy.reuse, []
    for word, times in (("half", 0.5), ("twice", 2.0)):
        others = [
            (f"{word} the KV on the device", replace(split, device_kv=int(split.device_kv * times))),
            (f"{word} the KV in host memory", replace(split, host_kv=int(split.host_kv * times))),
            (f"{word} the KV on disk", replace(split, disk_kv=int(split.disk_kv * times))),
        ]
        if forecaster.list_bytes:
            host_lists = min(int(split.host_lists * times), forecaster.list_bytes)
            list_bytes_within = forecaster.list_bytes_within(host_lists, split.device_lists)
            others.insert(0, (f"{word} the lists in RAM", replace(split, host_lists=list_bytes_within)))
        if split.num_devices:
            device_lists = forecaster.least_device_bytes(int(split.device_lists * times))
            others.insert(0, (f"{word} the lists on devices", replace(split, device_lists=device_lists)))
        for name, other in others:
            found.append(_try(forecaster, name, other, Variation()))
            step()
        if forecaster.list_bytes:
            found.append(
                _try(forecaster, f"{word} the probes", split, Variation(probes=times), "changes what is found")
            )
        if reuse.mode == "prepared":
            found.append(_try(forecaster, f"{word} prepare.disk_bytes", split, Variation(prepared=times)))
        found.append(_try(forecaster, f"{word} the requests", split, Variation(rate=times)))
        step()
    return found


def purchases(
    forecaster: Forecaster, budgets: Budgets, split: Split, target: Target, step: Callable[[], None]
) -> list[Effect]:
    """Forecast what could be bought or given up next, best first."""
    reuse = forecaster.inputs.policy.reuse
    found = [_best_split(forecaster, "twice the RAM", replace(budgets, ram=2 * budgets.ram), target)]
    step()
    if split.num_devices:
        more = replace(budgets, device_lists=2 * budgets.device_lists)
        if budgets.shares_device:
            more = replace(more, device=2 * budgets.device, device_lists=2 * budgets.device)
        name = "twice the device memory" if budgets.shares_device else "twice the device memory for lists"
        found.append(_best_split(forecaster, name, more, target))
        step()
    device = replace(split, device_kv=2 * split.device_kv)
    found.append(_try(forecaster, "twice the memory for KV on the device", device, Variation()))
    disk = replace(split, disk_kv=split.disk_kv + budgets.disk)
    found.append(_try(forecaster, "twice the disk", disk, Variation()))
    remark = f"assumed: computes {_GPU:g} times as fast"
    found.append(_try(forecaster, "a GPU, or a faster one", split, Variation(speed=_GPU), remark))
    if forecaster.list_bytes:
        found.append(_try(forecaster, "half the probes", split, Variation(probes=0.5), "costs recall, no money"))
    if reuse.keeps_kv and not reuse.allows_any_position:
        remark = "answers may change (docs/chunk-reuse.md)"
        found.append(_try(forecaster, 'reuse.mode = "anywhere"', split, Variation(reuse="anywhere"), remark))
    if reuse.mode != "prepared" and not forecaster.inputs.documents.refusal:
        found.append(_prepared(forecaster, split))
    step()
    known = [one for one in found if one.forecast is not None]
    return sorted(known, key=lambda one: one.forecast.percentile(target.percent) if one.forecast else 0.0)


def _prepared(forecaster: Forecaster, split: Split) -> Effect:
    """Forecast reuse of prepared KV, with as many documents prepared as the configured budget holds."""
    effect = _try(forecaster, 'reuse.mode = "prepared"', split, Variation(reuse="prepared"))
    num_prepared = 0 if effect.forecast is None else effect.forecast.prepared.num_chunks
    share = num_prepared / max(1, forecaster.inputs.documents.num_chunks)
    return replace(effect, remark=f"{share:.0%} of the chunks prepared; answers may change (docs/prepared.md)")


def _best_split(forecaster: Forecaster, name: str, budgets: Budgets, target: Target) -> Effect:
    """Forecast the best split of other budgets, from a coarser grid than the plan's."""
    splits = candidate_splits(budgets, forecaster.list_bytes, forecaster, 4, 2)
    return Effect(
        name, choose(simulate_splits(forecaster, splits, lambda: None), target.percent).forecast, "split again"
    )
