"""The planner against brute force over its grid, and its report if the target cannot be met."""

from dataclasses import replace

import pytest

from stillroom.cli.plan_report import show
from stillroom.errors import UsageError
from stillroom.kvstore.files import size_on_disk
from stillroom.planner.choice import Option, Target, choose
from stillroom.planner.constraints import Sufficient
from stillroom.planner.forecast import Forecaster, Variation
from stillroom.planner.plan_json import plan_as_json
from stillroom.planner.planner import make_plan
from stillroom.planner.splits import Budgets, Split, candidate_splits
from stillroom.planner.workload import QuestionCounts
from tests.planner.made import LIST_BYTES, NUM_LISTS, make_inputs, with_costs

ALL = NUM_LISTS * LIST_BYTES
KV_ON_DISK = 7 * size_on_disk(112)
"""Disk for the KV of the system prompt and six documents."""
BUDGETS = Budgets(device=512, ram=ALL + 300, disk=ALL + KV_ON_DISK)
EASY = Target(100.0, 95.0)


@pytest.mark.parametrize("percent", [pytest.param(50.0, marks=pytest.mark.slow), 95.0])
def test_choice_is_the_best_of_all_splits(percent: float) -> None:
    plan = make_plan(Forecaster(make_inputs(rate=4.0)), BUDGETS, Target(100.0, percent))

    fresh = Forecaster(make_inputs(rate=4.0))
    tried = {
        split: fresh.forecast(split).percentile(percent) for split in candidate_splits(BUDGETS, fresh.list_bytes, fresh)
    }
    best = min(tried.values())
    assert len(tried) == NUM_LISTS + 1 and plan.chosen.forecast.percentile(percent) <= 1.01 * best
    nearly = [split.host_lists for split, seconds in tried.items() if seconds <= 1.01 * best]
    assert plan.chosen.split.host_lists == min(nearly)


@pytest.mark.slow
def test_costs_decide_whether_lists_or_kv_get_the_memory() -> None:
    """If a list on disk costs nothing, RAM goes to KV."""
    free, dear = (
        make_plan(Forecaster(make_inputs(window_seconds=seconds)), BUDGETS, Target(1e3, 95.0)).chosen.split
        for seconds in (0.0, 0.1)
    )
    assert free.host_lists == 0 < dear.host_lists and dear.host_kv < free.host_kv == BUDGETS.ram


def test_equal_splits_are_settled_in_favour_of_kv() -> None:
    forecast = Forecaster(make_inputs()).forecast(Split(device_kv=512, host_kv=0, disk_kv=0, host_lists=ALL))
    options = [
        Option(Split(device_kv=1, host_kv=kv, disk_kv=0, host_lists=10 - kv), replace(forecast, seconds=seconds))
        for kv, seconds in ((2, forecast.seconds * 1.005), (5, forecast.seconds), (9, forecast.seconds * 1.5))
    ]
    assert choose(options, 95.0).split.host_kv == 5


def test_plan_that_meets_its_target_reports_the_sustained_rate() -> None:
    forecaster = Forecaster(make_inputs(rate=1.0))
    seconds = 2 * forecaster.forecast(Split(device_kv=512, host_kv=300, disk_kv=KV_ON_DISK, host_lists=ALL)).percentile(
        95
    )
    plan = make_plan(forecaster, BUDGETS, Target(seconds, 95.0))
    assert plan.is_feasible and plan.sustained_rate >= 1.0
    just = forecaster.forecast(plan.chosen.split, Variation(rate=plan.sustained_rate))
    beyond = forecaster.forecast(plan.chosen.split, Variation(rate=1.15 * plan.sustained_rate))
    assert plan.target.is_met(just) and not plan.target.is_met(beyond)


@pytest.mark.parametrize("seconds_per_token", [0.001, pytest.param(1e-6, marks=pytest.mark.slow)])
def test_rate_above_the_throughput_misses_the_target(
    seconds_per_token: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """First the decoder is slower, then the search."""
    forecaster = Forecaster(with_costs(make_inputs(rate=1000.0), seconds_per_token))
    plan = make_plan(forecaster, BUDGETS, EASY)
    assert plan.target.is_met(plan.chosen.forecast), "thirty requests end soon enough"
    assert plan.binding is not None and plan.binding.constraint == "load"
    at_once = forecaster.forecast(plan.chosen.split, Variation(at_once=True)).requests_per_second
    assert 0 < plan.sustained_rate == plan.throughput <= at_once and plan.throughput < 1 / 0.01, "searches take 10 ms"
    assert not plan.sustains_more
    payload = plan_as_json(plan, forecaster.inputs)
    assert payload["binding"]["missed_by_seconds"] == 0 and payload["sustained_rate"] == plan.throughput

    show(plan, forecaster.inputs, QuestionCounts(forecaster.inputs.texts, (1,) * 10, "made"), 1)

    printed = capsys.readouterr().out
    assert f"search and model serve only {plan.throughput:.3g}/s" in printed and "The load is the limit" in printed


def test_highest_rate_tried_is_reported_as_at_least(capsys: pytest.CaptureFixture[str]) -> None:
    forecaster = Forecaster(make_inputs(rate=0.01))
    plan = make_plan(forecaster, BUDGETS, EASY)
    assert plan.sustains_more and plan.sustained_rate == pytest.approx(0.64) and plan.throughput > 1

    show(plan, forecaster.inputs, QuestionCounts(forecaster.inputs.texts, (1,) * 10, "made"), 1)

    assert "sustained up to at least 0.64/s" in capsys.readouterr().out


@pytest.mark.slow
def test_binding_constraint_is_prefill_search_or_load() -> None:
    slow = make_plan(Forecaster(with_costs(make_inputs(), 0.1)), BUDGETS, Target(0.05, 95.0)).binding
    assert slow is not None and slow.constraint == "prefill"
    on_disk = Budgets(device=512, ram=0, disk=ALL + KV_ON_DISK)
    searched = make_plan(Forecaster(with_costs(make_inputs(), 1e-6)), on_disk, Target(0.05, 95.0)).binding
    assert searched is not None and searched.constraint == "search"
    forecaster = Forecaster(make_inputs(rate=100.0))
    split = Split(device_kv=512, host_kv=300, disk_kv=KV_ON_DISK, host_lists=ALL, disk_lists=ALL)
    alone = forecaster.forecast(split, Variation(is_alone=True)).percentile(95)
    crowded = make_plan(forecaster, BUDGETS, Target(1.5 * alone, 95.0))
    assert crowded.binding is not None and crowded.binding.constraint == "load"
    assert 0 < crowded.sustained_rate < 100


def test_lists_larger_than_the_disk_are_refused() -> None:
    with pytest.raises(UsageError, match=f"{ALL - 50} bytes are missing on disk"):
        make_plan(Forecaster(make_inputs()), Budgets(device=512, ram=100, disk=50), EASY)


def test_device_too_small_for_a_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="--device-memory"):
        make_plan(Forecaster(make_inputs()), replace(BUDGETS, device=64), EASY)


def test_every_choice_is_varied_and_purchases_come_best_first() -> None:
    forecaster = Forecaster(make_inputs(rate=4.0))
    now = Split(device_kv=512, host_kv=300, disk_kv=KV_ON_DISK, host_lists=ALL)
    plan = make_plan(forecaster, BUDGETS, EASY, now)
    names = [effect.name for effect in plan.sensitivity]
    parts = ("the lists in RAM", "the KV on the device", "the KV in host memory", "the KV on disk", "the probes")
    assert {f"{word} {part}" for word in ("half", "twice") for part in (*parts, "the requests")} == set(names)
    gains = [effect.forecast.percentile(95) for effect in plan.purchases if effect.forecast]
    assert gains == sorted(gains) and "twice the RAM" in [effect.name for effect in plan.purchases]
    assert isinstance(plan.rule, Sufficient)
    assert plan.current is not None and plan.current.forecast.list_hit_rate == 1.0
    assert plan.hits is not None and plan.hits.num_probes == 2
    assert plan.hits.mean == pytest.approx(plan.chosen.forecast.list_hit_rate, abs=1e-5)
    payload = plan_as_json(plan, forecaster.inputs)
    assert payload["is_met"] and payload["chosen"]["bytes"]["host_lists"] == plan.chosen.split.host_lists
    assert payload["search_model"]["eq_1_worst_error"] == pytest.approx(0.0, abs=1e-9)


def test_index_without_lists_is_planned_for_kv_alone() -> None:
    plan = make_plan(Forecaster(make_inputs(has_lists=False)), BUDGETS, EASY)
    assert len(plan.options) == 1 and plan.rule is None
    assert plan.chosen.split == Split(device_kv=512, host_kv=ALL + 300, disk_kv=BUDGETS.disk)
    assert not any("probes" in effect.name or "lists" in effect.name for effect in plan.sensitivity)


def test_progress_ends_at_its_total() -> None:
    seen: list[tuple[int, int]] = []
    make_plan(
        Forecaster(make_inputs(num_requests=3)),
        BUDGETS,
        EASY,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] and [done for done, _ in seen] == sorted(done for done, _ in seen)


def on_one_device(device: int, ram: int = 0) -> Budgets:
    """One device, shared with the model."""
    return Budgets(device=device, ram=ram, disk=ALL + KV_ON_DISK, device_lists=device, shares_device=True)


@pytest.mark.slow
def test_choice_with_devices_is_the_best_of_all_splits() -> None:
    few = make_inputs(rate=4.0, num_devices=1, num_requests=10)
    plan = make_plan(Forecaster(few), on_one_device(700, ram=ALL), EASY)

    fresh = Forecaster(few)
    tried = {
        (split.device_lists, split.host_lists): fresh.forecast(split).percentile(95)
        for split in candidate_splits(on_one_device(700, ram=ALL), ALL, fresh)
    }
    assert len({held for held, _ in tried}) == 6 and len(tried) > 20
    best = min(tried.values())
    chosen = plan.chosen.split
    assert (chosen.device_lists, chosen.host_lists) == min(at for at, one in tried.items() if one <= 1.01 * best)
    assert chosen.device_kv == 700 - chosen.device_lists


@pytest.mark.slow
def test_device_holds_lists_only_if_that_is_faster() -> None:
    """A query and its two lists take 4 ms in RAM."""
    fast, slow = (
        make_plan(
            Forecaster(make_inputs(num_requests=10, num_devices=1, device_seconds=seconds)),
            on_one_device(700, ram=ALL + 300),
            EASY,
        )
        for seconds in (0.001, 0.004)
    )
    assert fast.chosen.split.device_lists > 0 and fast.chosen.forecast.device_hit_rate > 0
    assert slow.chosen.split.device_lists == 0 < slow.chosen.split.host_lists


def test_device_always_keeps_memory_for_the_longest_prompt() -> None:
    plan = make_plan(Forecaster(make_inputs(num_requests=10, num_devices=1)), on_one_device(300), EASY)
    assert 115 <= min(option.split.device_kv for option in plan.options) < 300
    with pytest.raises(UsageError, match="--device-memory more than 64 bytes"):
        make_plan(Forecaster(make_inputs(num_requests=10, num_devices=1)), on_one_device(64), EASY)


def test_lists_on_devices_are_varied_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    forecaster = Forecaster(make_inputs(rate=4.0, num_requests=10, num_devices=2))
    now = Split(device_kv=512, host_kv=300, disk_kv=KV_ON_DISK, disk_lists=ALL, device_lists=64, num_devices=2)
    plan = make_plan(forecaster, on_one_device(700), EASY, now)
    assert {"half the lists on devices", "twice the lists on devices"} < {effect.name for effect in plan.sensitivity}
    assert "twice the device memory" in [effect.name for effect in plan.purchases]
    assert plan.current is not None and plan.current.forecast.device_hit_rate > 0
    assert plan.hits is not None and plan.hits.mean == pytest.approx(plan.chosen.forecast.list_hit_rate, abs=1e-5)
    payload = plan_as_json(plan, forecaster.inputs)
    assert payload["now"]["bytes"]["device_lists"] == 64 and payload["search_model"]["device"]["per_launch"] == 0.001

    show(plan, forecaster.inputs, QuestionCounts(forecaster.inputs.texts, (1,) * 10, "made"), 1)

    printed = capsys.readouterr().out
    assert "devices: lists, on each of 2" in printed and "probed lists on devices" in printed


def test_other_devices_do_not_share_the_models_memory() -> None:
    budgets = replace(BUDGETS, ram=0, device_lists=96)
    plan = make_plan(Forecaster(make_inputs(num_requests=10, num_devices=1)), budgets, EASY)
    assert {option.split.device_kv for option in plan.options} == {512}
    assert max(option.split.device_lists for option in plan.options) == 96
    assert "twice the device memory for lists" in [effect.name for effect in plan.purchases]
