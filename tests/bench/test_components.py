"""Tests `stillroom bench components`: every part is measured, with the percentiles of its own operations."""

import numpy as np
import pytest

from stillroom_bench.experiments.components import BM25, HNSW, HYBRID, KV, SCHEDULER, run_components
from stillroom_bench.experiments.experiment_options import ComponentsOptions
from stillroom_bench.experiments.prefix_sharing import CallTimes


@pytest.mark.slow  # builds every index twice
def test_every_part_has_times_in_order_and_memory() -> None:
    values = run_components(ComponentsOptions(repeat=1, num_requests=64)).samples.values

    assert set(values) == {KV, SCHEDULER, BM25, HNSW, HYBRID}
    for part, operation in ((KV, "attach"), (BM25, "search"), (HNSW, "search"), (HYBRID, "search")):
        times = [values[part][f"{operation}_p{percent}_seconds"][0] for percent in (50, 95, 99)]
        assert times == sorted(times) and times[-1] > 0
    assert {"decision_cpu_seconds", "slow_decision_cpu_seconds", "submit_cpu_seconds"} <= set(values[SCHEDULER])
    assert all("peak_rss_delta_bytes" in metrics and "wall_seconds" not in metrics for metrics in values.values())


def test_calls_are_timed_by_the_clock_that_is_given() -> None:
    moments = iter([0.0, 1.0, 5.0, 8.0])
    times = CallTimes(clock=lambda: next(moments))

    assert [times.call("add", lambda a, b: a + b, 1, 2), times.call("add", lambda: 7)] == [3, 7]
    assert times.seconds == {"add": [1.0, 3.0]} and times.metrics()["add_p50_seconds"] == np.median([1.0, 3.0])
