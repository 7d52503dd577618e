"""Forecasts against worked examples, on synthetic inputs."""

from dataclasses import replace

import numpy as np
import pytest

from stillroom.planner.forecast import Forecaster, Variation
from stillroom.planner.splits import Split
from tests.planner.made import LIST_BYTES, NUM_LISTS, make_inputs

ALL = NUM_LISTS * LIST_BYTES
ROOMY = Split(device_kv=512, host_kv=10_000, disk_kv=0, host_lists=ALL)


def test_forecast_of_one_question_equals_a_worked_example() -> None:
    made = replace(make_inputs(), workload=replace(make_inputs().workload, warm=(3,), asked=(3,), dues=(5.0,)))
    in_ram = Forecaster(made).forecast(ROOMY)
    # embed 1 ms, search 20 ms of which 10 in the index; a step of 10 ms, and one token for each of the question's 3
    assert in_ram.search_seconds.tolist() == pytest.approx([0.021])
    assert in_ram.seconds.tolist() == pytest.approx([0.021 + 0.01 + 3 * 0.001], abs=1e-6)
    assert in_ram.kept_share == pytest.approx(112 / 115)
    # two lists on disk: a query and two lists cost the same there, and two windows 0.1 s each more
    on_disk = Forecaster(made).forecast(replace(ROOMY, host_lists=0, disk_lists=ALL))
    assert on_disk.search_seconds.tolist() == pytest.approx([0.221])
    assert (in_ram.list_hit_rate, on_disk.list_hit_rate) == (1.0, 0.0)


def test_questions_queue_for_the_index() -> None:
    asked = replace(make_inputs().workload, warm=(), asked=(1, 5), dues=(0.0, 0.0))
    found = Forecaster(replace(make_inputs(), workload=asked)).forecast(ROOMY)
    assert found.search_seconds.tolist() == pytest.approx([0.021, 0.031])


def test_repeated_question_is_not_searched_again() -> None:
    asked = replace(make_inputs().workload, warm=(3,), asked=(3, 4), dues=(5.0, 50.0))
    found = Forecaster(replace(make_inputs(caches=True), workload=asked)).forecast(ROOMY)
    assert found.search_seconds.tolist() == pytest.approx([0.0, 0.021]) and found.cached_share == 0.5


def test_search_time_grows_with_probes() -> None:
    forecaster = Forecaster(make_inputs())
    split = replace(ROOMY, host_lists=0, disk_lists=ALL)
    half, whole, twice = (
        forecaster.forecast(split, Variation(probes=probes)).search_seconds.mean() for probes in (0.5, 1.0, 2.0)
    )
    assert half < whole < twice


def test_faster_decoder_and_lower_rate_shorten_waiting() -> None:
    forecaster = Forecaster(make_inputs(rate=40.0))
    plain = forecaster.forecast(ROOMY).percentile(95)
    assert forecaster.forecast(ROOMY, Variation(speed=10.0)).percentile(95) < plain
    assert forecaster.forecast(ROOMY, Variation(rate=0.1)).percentile(95) < plain
    alone = forecaster.forecast(ROOMY, Variation(is_alone=True))
    assert alone.percentile(95) <= plain and len(alone.seconds) == 30


def test_throughput_of_the_model_excludes_search() -> None:
    forecaster = Forecaster(make_inputs(window_seconds=60.0))
    splits = ROOMY, replace(ROOMY, host_lists=0, disk_lists=ALL)
    in_ram, on_disk = (forecaster.forecast(split, Variation(at_once=True)) for split in splits)
    assert on_disk.list_hit_rate == 0.0 and not on_disk.search_seconds.any()
    assert in_ram.requests_per_second == on_disk.requests_per_second


def test_forecasts_are_deterministic() -> None:
    one, other = (Forecaster(make_inputs(rate=5.0)).forecast(ROOMY).seconds for _ in range(2))
    assert np.array_equal(one, other)


def test_lists_on_a_device_equal_a_worked_example() -> None:
    """Question 3 probes lists 3 and 4, which the one before made hot."""
    made = make_inputs(num_devices=1)
    made = replace(made, workload=replace(made.workload, warm=(3,), asked=(3,), dues=(5.0,)))
    forecaster = Forecaster(made)
    split = replace(ROOMY, host_lists=0, disk_lists=ALL, num_devices=1)
    both, one, none = (forecaster.forecast(replace(split, device_lists=room)) for room in (64, 32, 0))
    # in RAM a query and its two lists take 4 ms of the 21; on the device 1 ms; on disk 0.1 s for each window more
    assert both.search_seconds.tolist() == pytest.approx([0.021 - 0.004 + 0.001])
    assert one.search_seconds.tolist() == pytest.approx([0.021 - 0.004 + 0.003 + 0.1])
    assert none.search_seconds.tolist() == pytest.approx([0.221])
    assert [at.device_hit_rate for at in (both, one, none)] == [1.0, 0.5, 0.0]
    assert [at.list_hit_rate for at in (both, one, none)] == [1.0, 0.5, 0.0]
    next_ones = forecaster.forecast(replace(split, device_lists=32, host_lists=64))
    assert (next_ones.device_hit_rate, next_ones.list_hit_rate) == (0.5, 1.0), "RAM holds the next"
    assert next_ones.search_seconds.tolist() == pytest.approx([0.021 - 0.001])


def test_fewest_bytes_on_devices_hold_the_same_lists() -> None:
    forecaster = Forecaster(make_inputs(num_devices=2))
    assert [forecaster.least_device_bytes(room) for room in (0, 31, 32, 100, 160, 10**6)] == [0, 0, 32, 96, 160, 160]
    assert forecaster.list_bytes_within(ALL, 96) == 4 * LIST_BYTES, "six of ten lists are on the devices"
    assert Forecaster(make_inputs()).least_device_bytes(10**6) == 0
