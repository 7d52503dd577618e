"""Overheads beyond the cost profile, and how accurate plans were, on synthetic inputs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stillroom.planner.accuracy import Accuracy, accuracy_file, accuracy_of, load_accuracy, save_accuracy
from stillroom.planner.choice import Option, Target
from stillroom.planner.constraints import Shortfall, Sufficient
from stillroom.planner.forecast import Forecaster, Variation
from stillroom.planner.inputs import Overheads
from stillroom.planner.overheads import ObservedOverheads, with_overheads
from stillroom.planner.planner import sufficient_hit_rate
from stillroom.planner.simulation.search_station import SharedCores
from stillroom.planner.splits import Split
from stillroom.planner.validation import Measured
from tests.planner.made import LIST_BYTES, NUM_LISTS, make_inputs, with_costs

ALL = NUM_LISTS * LIST_BYTES
ROOMY = Split(device_kv=512, host_kv=10_000, disk_kv=0, host_lists=ALL)


def test_what_is_measured_beyond_the_model_is_added_to_steps_and_requests() -> None:
    """A repeated question computes its 3 tokens in a step of 13 ms, and each token after the first takes one of 11."""
    seen = ObservedOverheads([0, 1], [0.040, 0.042], [0.016, 0.018], [1.5, 3.0, 2.0], [0.9, 0.8])

    found = with_overheads(make_inputs(), seen)

    assert found.overheads.step_seconds == pytest.approx(0.017 - 0.011, abs=1e-6)
    assert found.hardware.step_seconds == found.overheads.step_seconds
    assert found.overheads.request_seconds == pytest.approx(0.041 - 0.013 - 0.006, abs=1e-6)
    assert found.overheads.cores == SharedCores(2.0, 1.0)  # a search does not speed up the model


def test_faster_than_modelled_takes_nothing_away() -> None:
    found = with_overheads(make_inputs(), ObservedOverheads([0], [1e-4], [1e-5], [], []))

    assert found.overheads == Overheads()


def test_a_question_alone_pays_the_overheads_and_waits_for_no_core() -> None:
    made = replace(make_inputs(), workload=replace(make_inputs().workload, warm=(3,), asked=(3,), dues=(5.0,)))
    cores = SharedCores(3.0, 3.0)
    shared = replace(made, overheads=Overheads(0.007, 0.0, cores))

    for variation in (Variation(), Variation(is_alone=True)):
        plain, found = Forecaster(made).forecast(ROOMY, variation), Forecaster(shared).forecast(ROOMY, variation)
        assert found.seconds.tolist() == pytest.approx((plain.seconds + 0.007).tolist(), abs=1e-6)


def test_shared_cores_slow_search_and_model_down_under_load() -> None:
    """Question 3 is computed while question 5 is searched for."""
    workload = replace(make_inputs().workload, warm=(), asked=(3, 5), dues=(0.0, 0.021))
    made = replace(make_inputs(), workload=workload)
    plain = Forecaster(made).forecast(ROOMY)
    found = Forecaster(replace(made, overheads=Overheads(cores=SharedCores(2.0, 1.5)))).forecast(ROOMY)

    # the step of 3 takes 125 ms; the search of 5 needs 42 of them, in which the step does 28
    assert plain.seconds[0] == pytest.approx(0.021 + 0.125, abs=1e-3)
    assert found.search_seconds.tolist() == pytest.approx([0.021, 0.042], abs=1e-5)
    assert found.seconds[0] == pytest.approx(0.021 + 0.125 + 0.042 - 0.028, abs=1e-3)


def test_a_gpu_leaves_the_cores_to_the_searches() -> None:
    made = make_inputs(rate=20.0)
    shared = replace(made, overheads=Overheads(cores=SharedCores(2.0, 2.0)))
    faster = Variation(speed=10.0)

    assert np.array_equal(
        Forecaster(made).forecast(ROOMY, faster).seconds, Forecaster(shared).forecast(ROOMY, faster).seconds
    )
    assert Forecaster(shared).forecast(ROOMY).percentile(50) > Forecaster(made).forecast(ROOMY).percentile(50)


def test_the_papers_rule_counts_the_wait_for_the_model_and_shared_cores() -> None:
    def rule(rate: float, cores: SharedCores) -> Sufficient | Shortfall | None:
        made = with_costs(make_inputs(rate=rate), 0.1)  # the model answers 1.7 questions per second
        forecaster = Forecaster(replace(made, overheads=Overheads(cores=cores)))
        return sufficient_hit_rate(forecaster, Option(ROOMY, forecaster.forecast(ROOMY)), Target(4.0, 95.0))

    alone, busy = rule(0.01, SharedCores()), rule(0.01, SharedCores(search_slowdown=4.0))
    assert isinstance(alone, Sufficient) and isinstance(busy, Sufficient)
    assert alone.hit_rate == 0.0 < busy.hit_rate  # 5 searches per second without a list in RAM, 1.25 beside the model
    crowded = rule(30.0, SharedCores())
    assert isinstance(crowded, Shortfall) and crowded.binding == "latency"  # the wait takes the whole target


@pytest.mark.parametrize(("p50", "p95", "good_for"), [(1.0, 1.4, "times"), (1.0, 1.6, "order"), (0.5, 1.0, "order")])
def test_accuracy_is_kept_beside_the_profile(tmp_path: Path, p50: float, p95: float, good_for: str) -> None:
    path = accuracy_file(tmp_path / "profiles" / "m.json")
    accuracy = Accuracy(p50, p95, 60, 2.0)
    save_accuracy(path, accuracy)

    assert load_accuracy(path) == accuracy and accuracy.as_json()["good_for"] == good_for
    assert not list(tmp_path.glob("**/*.tmp"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "p50_factor": "x"}'])
def test_a_damaged_file_is_no_accuracy(tmp_path: Path, content: str) -> None:
    (tmp_path / "m.plan.json").write_text(content)

    assert load_accuracy(tmp_path / "m.plan.json") is None and load_accuracy(tmp_path / "none.json") is None


def test_accuracy_divides_measured_by_predicted() -> None:
    predicted = Forecaster(make_inputs()).forecast(ROOMY)

    found = accuracy_of(predicted, Measured(3 * predicted.seconds, predicted.search_seconds, 0.5), 4.0)

    assert (found.p50_factor, found.p95_factor) == pytest.approx((3.0, 3.0))
    assert (found.num_requests, found.rate) == (30, 4.0)
