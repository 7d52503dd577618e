"""Tests `stillroom bench tiered --answers` at a tiny size, and the rule that chooses the divisions."""

import queue
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.planner.simulation.search_station import SharedCores
from stillroom.planner.simulation.simulated_runtime import HardwareModel
from stillroom.retrieval.tiers.faiss_lists import write_bare_list_file
from stillroom.retrieval.tiers.search_profile import Effort, SearchProfile, measure_profile
from stillroom.retrieval.tiers.tiered_ivf import TieredLists
from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.reuse_engine import system_of
from stillroom_bench.experiments.reuse_search import Asked
from stillroom_bench.experiments.tiered_answers import BatchedSearch, TieredAnswersOptions, run_answers
from stillroom_bench.experiments.tiered_forecast import Forecasts, Overheads, request_overhead
from stillroom_bench.experiments.tiered_plans import (
    PlannedDivision,
    SimulatedDivision,
    UnloadedModel,
    memory_by_target,
    plan_for,
    plan_row,
    smallest_within,
    within_rows,
)
from stillroom_bench.experiments.tiered_throughput import SkewedQuestions, made_lists
from stillroom_bench.quality.runtime import Shape

SCOPE = TieredOptions(size=8000, nlist=64, nprobe=4, repeat=2)
SHAPE = Shape(vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def questions() -> SkewedQuestions:
    return SkewedQuestions(made_lists(SCOPE), 0.8, SCOPE)


@pytest.fixture(scope="module")
def profile(questions: SkewedQuestions, tmp_path_factory: pytest.TempPathFactory) -> SearchProfile:
    effort = Effort(batch_sizes=(1, 4), num_queries=8)
    lists = made_lists(SCOPE)
    return measure_profile(lists, questions.draw(200, -2), SCOPE.nprobe, tmp_path_factory.mktemp("disk"), effort)


@pytest.mark.slow  # a model behind a search, for each division
def test_every_division_is_measured_with_and_without_the_dispatcher(tmp_path: Path) -> None:
    asked = TieredAnswersOptions(slos=(1.0001, 1e6), num_requests=6, num_warm=4, num_documents=40)

    result = run_answers(SCOPE, replace(asked, together=True), tmp_path, shape=SHAPE)

    arms = {f"{name}{end}" for name in ("all on disk", "all in RAM") for end in ("", ", batches end together")}
    assert set(result.samples.values) == arms, (
        "the rule finds no division for one target, and needs nothing in RAM for the other"
    )
    hard, easy = result.tables["Plans for 95 % within the target"]
    assert hard["its lists in RAM"] == "" and hard["rule (Eq. 7 to 10)"].startswith("no hit rate: latency")
    assert easy["its lists in RAM"] == easy["its lists"] == "all on disk" and easy["simulation"] == "100%"
    within = result.tables["Share within the target: planned and measured"]
    assert [row["rule"] for row in within] == ["below 0.95"] * 2 + ["at least 0.95"] * 2
    assert [row["simulation"] for row in within[2:]] == ["1.000"] * 2
    assert within[2]["measured"].startswith("1 [")
    for arm in arms:
        waits, firsts = (result.samples.of(arm, f"mean_{what}_seconds") for what in ("search", "ttft"))
        assert all(0 < wait < first for wait, first in zip(waits, firsts, strict=True))
    assert not list(tmp_path.glob("*.ivf"))


def test_the_simulation_chooses_the_fewest_lists_that_keep_a_target() -> None:
    times = [np.array([0.1] * 18 + [0.9] * 2), np.array([0.1] * 19 + [0.9]), np.full(20, 0.1)]
    simulated = [SimulatedDivision(np.arange(size), seconds) for size, seconds in zip((0, 3, 8), times, strict=True)]

    found = smallest_within(simulated, 0.5)
    assert found is simulated[1], "19 of 20 are 95 %"
    assert smallest_within(simulated, 0.05) is None and smallest_within(simulated, 1.0) is simulated[0]
    row = plan_row(PlannedDivision(0.05, np.arange(0), "hit rate 0%"), simulated, 8)
    assert (row["its lists in RAM"], row["simulation"]) == ("all on disk", "none keeps it, 0% at most")


def test_planned_shares_stand_beside_measured_ones_with_an_interval_over_runs() -> None:
    plan = PlannedDivision(0.5, np.arange(2), "hit rate 30%")
    divisions = {"all on disk": np.arange(0), "all in RAM": np.arange(4)}
    forecast = {"all on disk": np.array([0.4, 0.6]), "all in RAM": np.array([0.1, 0.2])}
    values = {name: {"within_500_ms": [0.5, 0.7]} for name in divisions}

    disk, ram = within_rows(plan, divisions, forecast, values)

    assert (disk["rule"], ram["rule"]) == ("below 0.95", "at least 0.95")
    assert (disk["simulation"], ram["simulation"]) == ("0.500", "1.000")
    assert disk["measured"].startswith("0.6 [")
    once = within_rows(plan, divisions, forecast, {name: {"within_500_ms": [0.5]} for name in divisions})
    assert once[0]["measured"] == "0.500", "one run has no interval"


@pytest.mark.slow  # measures a profile
def test_forecasts_of_an_idle_machine_are_search_and_steps(profile: SearchProfile, questions: SkewedQuestions) -> None:
    """Two requests that do not meet take their search, their step and the overhead of a request."""

    class Two:
        def prompts(self, repetition: int) -> list[Any]:
            return [[[1, 2], [repetition, number], [3]] for number in range(2)]

        def arrivals(self, repetition: int) -> list[float]:
            return [0.0, 1e6]

    machine = HardwareModel(
        costs=linear_profile(5.0, 0.0, 0.0), bytes_per_token=1, num_layers=2, device_bytes=4096, max_model_len=64
    )
    policy, overheads = system_of("off", 0, 0), Overheads(2.0, SharedCores(3.0, 3.0))
    lists = made_lists(SCOPE)
    forecasts = Forecasts(machine, policy, overheads, profile, Two(), questions, lists, SCOPE.nprobe)

    seconds = forecasts.seconds(np.arange(0))
    assert len(seconds) == 10 and seconds.min() > 7.0 and seconds.max() < 7.0 + 1.0
    assert request_overhead([9.0, 9.0], machine, policy, Two().prompts(0), 0) == pytest.approx(4.0)


@pytest.mark.slow  # measures a profile
def test_tighter_target_needs_at_least_as_many_lists_in_ram(profile: SearchProfile) -> None:
    rate = 0.5 / float(np.max(profile.model.times.scan_seconds))
    counts = []
    for slo in np.geomspace(1e-4, 1.0, 25).tolist():
        plan = plan_for(1.0 + slo, UnloadedModel(1.0, rate), profile, SCOPE.nprobe)
        counts.append(SCOPE.nlist + 1 if plan.held is None else len(plan.held))
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 0


@pytest.mark.slow  # measures a profile
def test_memory_falls_with_the_target_of_the_search(profile: SearchProfile) -> None:
    rows = memory_by_target(UnloadedModel(1.0, 1e-3), profile, SCOPE.nprobe)
    held = [SCOPE.nlist + 1 if "lists in RAM" not in row else row["lists in RAM"] for row in rows]
    assert held == sorted(held, reverse=True) and held[-1] == 0
    assert rows[-1]["MB in RAM"] == 0 and rows[-1]["of all bytes"] == "0.0%"
    targets = [row["search within, ms"] for row in rows]
    assert targets == sorted(targets) and targets[0] == pytest.approx(targets[-1] / 2)


@pytest.mark.slow  # measures a machine first
@pytest.mark.parametrize("dispatches", [True, False])
def test_waiting_requests_are_searched_as_one_batch(
    questions: SkewedQuestions, tmp_path: Path, dispatches: bool
) -> None:
    tiers = TieredLists(write_bare_list_file(made_lists(SCOPE), tmp_path / "lists"), np.arange(20))
    asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
    for number in range(5):
        asked.put((number, [[number]]))
    ended: list[Asked] = []
    search = BatchedSearch(tiers, questions.draw(5, 0), SCOPE.nprobe, dispatches)

    thread = threading.Thread(target=search, args=(asked, ended.append))
    thread.start()
    while len(ended) < 5:
        threading.Event().wait(0.001)
    search.stop(asked)
    thread.join(30)

    assert search.num_batches == 1 and sorted(ended) == [(number, [[number]]) for number in range(5)]
    tiers.close()
