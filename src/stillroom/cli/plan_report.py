"""What `stillroom plan` prints."""

import math
from typing import TYPE_CHECKING

import numpy as np

from stillroom.cli.console import count, duration, line, size

if TYPE_CHECKING:
    from stillroom.planner.choice import Option
    from stillroom.planner.forecast import Forecast
    from stillroom.planner.inputs import PlanInputs
    from stillroom.planner.planner import Plan
    from stillroom.planner.validation import Measured
    from stillroom.planner.what_if import Effect
    from stillroom.planner.workload import QuestionCounts

_PERCENTILES = (50, 95, 99)
_WIDTH = 34


def show(plan: "Plan", inputs: "PlanInputs", questions: "QuestionCounts", answer_tokens: int) -> None:
    """The whole plan."""
    _about(plan, inputs, questions, answer_tokens)
    line()
    _table(plan)
    line()
    _verdict(plan)
    _lists(plan, inputs)
    name = f"p{plan.target.percent:g}"
    line()
    line(f"{'If there were':<{_WIDTH}}  {name:>8}")
    for effect in plan.sensitivity:
        _effect(effect, plan)
    line()
    line(f"{'What to get next, best first':<{_WIDTH}}  {name:>8}")
    for effect in plan.purchases:
        _effect(effect, plan)


def _about(plan: "Plan", inputs: "PlanInputs", questions: "QuestionCounts", answer_tokens: int) -> None:
    workload = inputs.workload
    line(f"Model {inputs.model_name}, index {inputs.index_kind}.")
    line(
        f"Workload: {count(len(workload.asked), 'request')} at {plan.rate:g}/s, as many before them; "
        f"{count(len(questions.texts), 'question')} ({questions.source}); answers of {answer_tokens:,} tokens."
    )
    if not inputs.is_calibrated:
        line("The model's costs were measured in a second; stillroom calibrate measures them well.")


def _table(plan: "Plan") -> None:
    """The chosen split beside what is configured now."""
    columns: list[tuple[str, Option]] = [("planned", plan.chosen)]
    if plan.current is not None:
        columns.append(("now", plan.current))
    line("".join([f"{'':<{_WIDTH}}", *(f"  {name:>10}" for name, _ in columns)]))

    def row(name: str, cells: list[str]) -> None:
        line("".join([f"{name:<{_WIDTH}}", *(f"  {cell:>10}" for cell in cells)]))

    splits = [option.split for _, option in columns]
    row("device: kept KV", [size(split.device_kv) for split in splits])
    if any(split.num_devices for split in splits):
        num = max(split.num_devices for split in splits)
        name = "device: lists of the index" if num == 1 else f"devices: lists, on each of {num}"
        row(name, [size(split.device_lists) for split in splits])
    if any(split.host_lists + split.disk_lists for split in splits):
        row("host: lists of the index", [size(split.host_lists) for split in splits])
    row("host: kept KV", [size(split.host_kv) for split in splits])
    if any(split.disk_lists for split in splits):
        row("disk: lists of the index", [size(split.disk_lists) for split in splits])
    row("disk: kept KV", [size(split.disk_kv) for split in splits])
    forecasts = [option.forecast for _, option in columns]
    for percent in _PERCENTILES:
        row(f"predicted time to first token, p{percent}", [duration(one.percentile(percent)) for one in forecasts])
    row("of that search, mean", [duration(float(one.search_seconds.mean())) for one in forecasts])
    row("prompt tokens whose KV is kept", [f"{one.kept_share:.0%}" for one in forecasts])
    if any(split.num_devices for split in splits):
        row("probed lists on devices", [f"{one.device_hit_rate:.0%}" for one in forecasts])
    if any(split.disk_lists for split in splits):
        row("probed lists in RAM", [f"{one.list_hit_rate - one.device_hit_rate:.0%}" for one in forecasts])
    line("Kept KV is knowledge tree and chunk caches: one store, one budget in each tier.")


def _verdict(plan: "Plan") -> None:
    target, forecast = plan.target, plan.chosen.forecast
    found, wanted = forecast.percentile(target.percent), duration(target.seconds)
    what = f"p{target.percent:g} of at most {wanted} at {plan.rate:g}/s"
    sustained = f"up to {'at least ' if plan.sustains_more else ''}{plan.sustained_rate:.3g}/s"
    if plan.binding is None:
        line(f"Met: {what} ({duration(found)}); sustained {sustained}.")
        return
    if target.is_met(forecast):
        line(
            f"Missed: {what}. These {count(len(forecast.seconds), 'request')} would keep it ({duration(found)}), but "
            f"search and model can serve {plan.throughput:.3g}/s: at a higher rate the queue grows without end."
        )
    else:
        line(f"Missed: {what}, by {duration(found - target.seconds)}: {duration(found)}.")
    alone = plan.binding.alone
    single = alone.percentile(target.percent)
    if plan.binding.constraint == "load":
        over = plan.rate - plan.sustained_rate
        line(
            f"The load binds: one question at a time takes {duration(single)}, waiting for others the rest. The target "
            f"holds {sustained}, {over:.3g}/s less than asked for."
        )
        return
    search = float(np.percentile(alone.search_seconds, target.percent))
    rest = float(np.percentile(alone.seconds - alone.search_seconds, target.percent))
    line(
        f"{'Prefill' if plan.binding.constraint == 'prefill' else 'Search'} binds: even one question at a time takes "
        f"{duration(single)} (p{target.percent:g} of prefill {duration(rest)}, of search {duration(search)}), "
        f"{duration(single - target.seconds)} too much."
    )


def _lists(plan: "Plan", inputs: "PlanInputs") -> None:
    if plan.rule is None:
        if inputs.index_kind != "ivf_pq":
            share = float(plan.chosen.forecast.search_seconds.sum() / plan.chosen.forecast.seconds.sum())
            line(
                f"The index ({inputs.index_kind}) cannot be divided, so the plan is about KV alone. Search is "
                f"{share:.0%} of the time to the first token"
                + (": ivf_pq would help (index.kind)." if share > 0.25 else ": ivf_pq would help little.")
            )
        else:
            line("The index has no lists yet (too few chunks to train on), so the plan is about KV alone.")
        return
    from stillroom.planner.constraints import Sufficient

    rule = plan.rule
    if isinstance(rule, Sufficient):
        line(
            f"VectorLiteRAG's rule (Eq. 7 to 10) asks for a hit rate of {rule.hit_rate:.0%} at least: "
            f"{rule.queries_per_second:.3g} searches per second in batches of {rule.batch_size}."
        )
    elif math.isinf(rule.needed):
        line("VectorLiteRAG's rule (Eq. 7 to 10): prefill alone takes the whole target, no hit rate is enough.")
    else:
        line(
            f"VectorLiteRAG's rule (Eq. 7 to 10): no hit rate is enough, {rule.binding} binds: {rule.possible:.3g} "
            f"searches per second with all lists in RAM, {rule.needed:.3g} needed."
        )


def _effect(effect: "Effect", plan: "Plan") -> None:
    remark = f"  {effect.remark}" if effect.remark else ""
    if effect.forecast is None:
        line(f"{effect.name:<{_WIDTH}}  {'-':>8}{remark}")
        return
    found = effect.forecast.percentile(plan.target.percent)
    change = found / plan.chosen.forecast.percentile(plan.target.percent) - 1
    line(f"{effect.name:<{_WIDTH}}  {duration(found):>8}  {change:+7.1%}{remark}")


def show_validation(predicted: "Forecast", measured: "Measured") -> None:
    """Side by side."""
    line()
    line(f"{'The planned settings':<{_WIDTH}}  {'predicted':>10}  {'measured':>10}  {'predicted / measured':>20}")
    pairs = [
        (f"time to first token, p{percent}", predicted.percentile(percent), measured.percentile(percent))
        for percent in _PERCENTILES
    ]
    pairs.append(("search, mean", float(predicted.search_seconds.mean()), float(measured.search_seconds.mean())))
    for name, told, found in pairs:
        line(f"{name:<{_WIDTH}}  {duration(told):>10}  {duration(found):>10}  {told / max(found, 1e-9):>20.2f}")
    kept = "prompt tokens whose KV was kept"
    line(f"{kept:<{_WIDTH}}  {predicted.kept_share:>10.0%}  {measured.kept_share:>10.0%}")
