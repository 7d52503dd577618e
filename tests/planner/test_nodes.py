"""Tests the forecast for several machines against the plan's own simulation and simulations of the cluster."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from stillroom.cli.plan_report import show_nodes
from stillroom.config.settings import PrepareConfig, ReuseConfig
from stillroom.planner.choice import Target
from stillroom.planner.forecast import Forecaster, Variation
from stillroom.planner.inputs import PlanInputs
from stillroom.planner.nodes import NodesForecast, NodesForecaster, forecast_nodes
from stillroom.planner.plan_json import plan_as_json
from stillroom.planner.planner import make_plan
from stillroom.planner.splits import Budgets, Split
from stillroom.planner.sustained import MOST_RATE, sustained
from tests.planner.made import make_inputs, with_documents

SMALL = Split(device_kv=480, host_kv=0, disk_kv=0)
"""Of a machine: the running prompts and the KV of about two of ten documents."""
TARGET = Target(0.5, 95.0)


def inputs(rate: float = 1.0, num_requests: int = 20) -> PlanInputs:
    return make_inputs(has_lists=False, rate=rate, num_requests=num_requests)


def nodes(made: PlanInputs, split: Split = SMALL, tier: float | None = None) -> NodesForecaster:
    return NodesForecaster(Forecaster(made), split, tier)


def test_one_machine_is_as_fast_as_the_plan_says_where_nothing_waits() -> None:
    """So rare questions neither wait nor share cores, and the caches are those of the plan."""
    made = inputs(rate=0.001)
    plan = Forecaster(made).forecast(SMALL, Variation())
    found = nodes(made).forecast(1, TARGET)
    assert found.seconds == pytest.approx(plan.seconds, rel=1e-6)
    assert found.kept_share == pytest.approx(plan.kept_share)


def test_more_machines_keep_more_and_sustain_more() -> None:
    one, two, four = (nodes(inputs(rate=5.0)).forecast(number, TARGET) for number in (1, 2, 4))
    assert one.kept_share < two.kept_share < four.kept_share
    assert 0 < one.sustained_rate < two.sustained_rate < four.sustained_rate
    assert one.throughput < two.throughput < four.throughput
    assert four.percentile(95) <= two.percentile(95) <= one.percentile(95)
    assert one.busiest == 1.0 <= two.busiest


def test_sustained_rate_meets_the_target() -> None:
    found = nodes(inputs(rate=5.0))
    forecast = found.forecast(2, TARGET)
    run = found.run(2, forecast.sustained_rate / 5.0, has_tier=False)
    assert np.percentile(run.seconds, TARGET.percent) <= TARGET.seconds
    assert forecast.sustained_rate <= forecast.throughput and not forecast.sustains_more


def test_target_that_one_question_misses_sustains_nothing() -> None:
    assert nodes(inputs()).forecast(2, Target(1e-6, 95.0)).sustained_rate == 0.0


def test_tier_that_costs_nothing_to_read_keeps_more() -> None:
    """Two machines hold four of ten documents, a tier holds all."""
    found = nodes(inputs(rate=0.1), tier=1e12)
    without, with_tier = (found.run(2, 1.0, has_tier=tier) for tier in (False, True))
    assert with_tier.kept_share > without.kept_share + 0.1
    assert with_tier.seconds.mean() < without.seconds.mean()


@pytest.mark.parametrize("number", [1, 2])
def test_prepared_documents_are_found_by_first_questions(number: int) -> None:
    made = with_documents(make_inputs(has_lists=False, num_requests=10), [[4 * number] for number in range(10)])
    reuse = ReuseConfig(mode="prepared", audit_share=0.0, policy="lru")
    prepared = replace(made, policy=replace(made.policy, reuse=reuse, prepare=PrepareConfig(bits=16)))
    room = Split(device_kv=512, host_kv=2**20, disk_kv=2**20)
    without, found = (nodes(one, room).run(number, 1.0, has_tier=False) for one in (made, prepared))
    assert found.kept_share > without.kept_share


@pytest.mark.parametrize(
    ("most", "tier", "expected"),
    [
        (1, None, [(1, False)]),
        (2, None, [(1, False), (2, False)]),
        (4, 1e9, [(1, False), (2, False), (4, False), (1, True), (2, True), (4, True)]),
    ],
)
def test_one_two_and_the_given_number_are_simulated(
    most: int, tier: float | None, expected: list[tuple[int, bool]]
) -> None:
    told: list[tuple[int, int]] = []
    found = forecast_nodes(
        Forecaster(inputs(num_requests=5)), SMALL, TARGET, most, tier, lambda *both: told.append(both)
    )
    assert [(one.num_nodes, one.has_tier) for one in found] == expected
    assert told == [(done, len(expected)) for done in range(len(expected) + 1)]


def test_report_names_every_row_and_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    forecaster = Forecaster(inputs(num_requests=5))
    plan = make_plan(forecaster, Budgets(device=480, ram=0, disk=0), TARGET)
    assert plan_as_json(plan, forecaster.inputs)["nodes"] == []
    show_nodes([], plan)
    assert not capsys.readouterr().out
    one, two = (_forecast(number, [0.1, 0.3]) for number in (1, 2))
    told = plan_as_json(plan, forecaster.inputs, None, [one, two])["nodes"]
    assert [(row["nodes"], row["p50_seconds"], row["sustained_rate"]) for row in told] == [(1, 0.2, 7.0), (2, 0.2, 7.0)]
    show_nodes([one, two, replace(one, has_tier=True)], plan)
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "1"] and rows[0][-1] == "7/s"
    assert "With a KV tier" in text and "cores of their own" in text and "network takes no time" in text


def _forecast(num_nodes: int, seconds: Sequence[float]) -> NodesForecast:
    return NodesForecast(num_nodes, False, np.array(seconds), 0.5, 1.0, 9.0, 7.0, False)


@pytest.mark.parametrize("limit", [0.2, 0.9, 3.0, 17.0])
def test_bisection_finds_the_limit_to_five_per_cent(limit: float) -> None:
    found = sustained(lambda times: times <= limit, MOST_RATE)
    assert found <= limit < 1.06 * found


def test_bisection_ends_at_the_highest_and_at_the_least_rate() -> None:
    assert sustained(lambda times: True, 5.0) == 5.0
    assert sustained(lambda times: False, MOST_RATE) == 0.0
