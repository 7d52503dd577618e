"""The text that `stillroom plan` prints."""

import math
from typing import TYPE_CHECKING

import numpy as np

from stillroom.cli.console import count, duration, line, size
from stillroom.cli.preparing_report import show_preparing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stillroom.planner.accuracy import Accuracy
    from stillroom.planner.choice import Option
    from stillroom.planner.forecast import Forecast
    from stillroom.planner.inputs import PlanInputs
    from stillroom.planner.nodes import NodesForecast
    from stillroom.planner.planner import Plan
    from stillroom.planner.validation import Measured
    from stillroom.planner.what_if import Effect
    from stillroom.planner.workload import QuestionCounts

_PERCENTILES = (50, 95, 99)
_WIDTH = 34


def show(
    plan: "Plan",
    inputs: "PlanInputs",
    questions: "QuestionCounts",
    answer_tokens: int,
    accuracy: "Accuracy | None" = None,
) -> None:
    _show_inputs(plan, inputs, questions, answer_tokens)
    line()
    _show_table(plan)
    line()
    _show_result(plan)
    _show_lists(plan, inputs)
    show_accuracy(plan.chosen.forecast.percentile(95), accuracy)
    name = f"p{plan.target.percent:g}"
    line()
    line(f"{'If there were':<{_WIDTH}}  {name:>8}")
    for effect in plan.sensitivity:
        _show_effect(effect, plan)
    line()
    line(f"{'What to get next, best first':<{_WIDTH}}  {name:>8}")
    for effect in plan.purchases:
        _show_effect(effect, plan)
    line()
    show_preparing(plan.preparing)


def _show_inputs(plan: "Plan", inputs: "PlanInputs", questions: "QuestionCounts", answer_tokens: int) -> None:
    workload = inputs.workload
    line(f"Model {inputs.model_name}, index {inputs.index_kind}.")
    line(
        f"Workload: {count(len(workload.asked), 'request')} at {plan.rate:g}/s, as many before them; "
        f"{count(len(questions.texts), 'question')} ({questions.source}); answers of {answer_tokens:,} tokens."
    )
    over, cores = inputs.overheads, inputs.overheads.cores
    line(
        f"Measured beyond search and steps alone: {duration(over.request_seconds)} for each request, "
        f"{duration(over.step_seconds)} for each step. While both run, a search takes {cores.search_slowdown:.2g} "
        f"times as long and a step {cores.step_slowdown:.2g} times."
    )
    if not inputs.is_calibrated:
        line("The model's costs come from a measurement of one second; stillroom calibrate measures them better.")


def _show_table(plan: "Plan") -> None:
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
    line("Kept KV includes the knowledge tree and chunk caches, which share one budget per tier.")


def _show_result(plan: "Plan") -> None:
    target, forecast = plan.target, plan.chosen.forecast
    found, wanted = forecast.percentile(target.percent), duration(target.seconds)
    what = f"p{target.percent:g} of at most {wanted} at {plan.rate:g}/s"
    sustained = f"up to {'at least ' if plan.sustains_more else ''}{plan.sustained_rate:.3g}/s"
    if plan.binding is None:
        line(f"Met: {what} ({duration(found)}); sustained {sustained}.")
        return
    if target.is_met(forecast):
        line(
            f"Missed: {what}. These {count(len(forecast.seconds), 'request')} would meet it ({duration(found)}), but "
            f"search and model serve only {plan.throughput:.3g}/s: at a higher rate the queue grows without bound."
        )
    else:
        line(f"Missed: {what}, by {duration(found - target.seconds)}: {duration(found)}.")
    alone = plan.binding.alone
    single = alone.percentile(target.percent)
    if plan.binding.constraint == "load":
        over = plan.rate - plan.sustained_rate
        line(
            f"The load is the limit: one question alone takes {duration(single)}, the rest is waiting. The target "
            f"holds {sustained}, {over:.3g}/s less than asked for."
        )
        return
    search = float(np.percentile(alone.search_seconds, target.percent))
    rest = float(np.percentile(alone.seconds - alone.search_seconds, target.percent))
    line(
        f"{'Prefill' if plan.binding.constraint == 'prefill' else 'Search'} is the limit: one question alone takes "
        f"{duration(single)} (p{target.percent:g} of prefill {duration(rest)}, of search {duration(search)}), "
        f"{duration(single - target.seconds)} too much."
    )


def _show_lists(plan: "Plan", inputs: "PlanInputs") -> None:
    if plan.rule is None:
        if inputs.index_kind != "ivf_pq":
            share = float(plan.chosen.forecast.search_seconds.sum() / plan.chosen.forecast.seconds.sum())
            line(
                f"The index ({inputs.index_kind}) cannot be split, so the plan covers KV only. Search takes "
                f"{share:.0%} of the time to the first token"
                + (": ivf_pq would help (index.kind)." if share > 0.25 else ": ivf_pq would help little.")
            )
        else:
            line("The index has no lists yet (too few chunks to train on), so the plan covers KV only.")
        return
    from stillroom.planner.constraints import Sufficient

    rule = plan.rule
    if isinstance(rule, Sufficient):
        line(
            f"VectorLiteRAG's rule (Eq. 7 to 10), beside the model, needs a hit rate of at least {rule.hit_rate:.0%}: "
            f"{rule.queries_per_second:.3g} searches per second in batches of {rule.batch_size}."
        )
    elif math.isinf(rule.needed):
        line(
            "VectorLiteRAG's rule (Eq. 7 to 10), beside the model: no hit rate is enough, because prefill and the wait "
            "for the model take the whole target."
        )
    else:
        line(
            "VectorLiteRAG's rule (Eq. 7 to 10), beside the model: no hit rate is enough, "
            f"{rule.binding} is the limit: {rule.possible:.3g} searches per second with all lists in RAM, "
            f"{rule.needed:.3g} needed."
        )


def show_accuracy(p95_seconds: float, accuracy: "Accuracy | None") -> None:
    """Say what predicted times, such as this 95th percentile, are good for."""
    if accuracy is None:
        line(
            "Good for the order of choices, not for times: no plan was validated here. Elsewhere, measured p50 and p95 "
            "were 0.9 to 1.6 and 1.8 to 3.4 times the predicted; --validate measures it."
        )
        return
    line(
        f"Validated here with {count(accuracy.num_requests, 'request')} at {accuracy.rate:g}/s: measured p50 was "
        f"{accuracy.p50_factor:.2g} times the predicted, p95 {accuracy.p95_factor:.2g} times."
    )
    if not accuracy.is_good:
        corrected = duration(p95_seconds * accuracy.p95_factor)
        line(f"So use the figures for the order of choices, not as times; by that factor, p95 is {corrected}.")


def _show_effect(effect: "Effect", plan: "Plan") -> None:
    remark = f"  {effect.remark}" if effect.remark else ""
    if effect.forecast is None:
        line(f"{effect.name:<{_WIDTH}}  {'-':>8}{remark}")
        return
    found = effect.forecast.percentile(plan.target.percent)
    change = found / plan.chosen.forecast.percentile(plan.target.percent) - 1
    line(f"{effect.name:<{_WIDTH}}  {duration(found):>8}  {change:+7.1%}{remark}")


def show_nodes(nodes: "Sequence[NodesForecast]", plan: "Plan") -> None:
    """Print the forecasts for several machines."""
    if not nodes:
        return
    name = f"p{plan.target.percent:g}"
    line()
    line(
        f"Machines with the planned memory each, behind a router, at {plan.rate:g}/s; sustained: the rate up to which "
        f"{name} is at most {duration(plan.target.seconds)}."
    )
    head = ("machines", "p50", "p95", "p99", "KV kept", "busiest", "sustained")
    line("".join(f"{cell:>11}" for cell in head))
    for one in nodes:
        if one.has_tier and one.num_nodes == 1:
            line("With a KV tier that they share in place of their disks:")
        times = [duration(one.percentile(percent)) for percent in _PERCENTILES]
        rate = f"{'>= ' if one.sustains_more else ''}{one.sustained_rate:.3g}/s"
        cells = (f"{one.num_nodes:,}", *times, f"{one.kept_share:.0%}", f"{one.busiest:.2f}x", rate)
        line("".join(f"{cell:>11}" for cell in cells))
    line(
        "KV kept: of the prompt tokens. Busiest: requests of the machine that got most, divided by the mean. Here "
        "search and engine have cores of their own, also with one machine, and the network takes no time: engines "
        "that share the cores of one machine gain less."
    )


def show_validation(predicted: "Forecast", measured: "Measured") -> None:
    """Print predicted next to measured times."""
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
