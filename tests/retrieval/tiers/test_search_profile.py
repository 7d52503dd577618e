"""Profile of a tiny real index: counts are exact, and predicted times have the right magnitude."""

from pathlib import Path

import numpy as np
import pytest

from stillroom.retrieval.tiers.division import hottest_in_ram
from stillroom.retrieval.tiers.search_profile import Effort, measure_device, measure_profile
from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.tiered_throughput import made_lists

SCOPE = TieredOptions(size=8000, nlist=64, nprobe=8)


@pytest.mark.slow  # times searches
def test_a_profile_counts_the_lists_and_predicts_from_them(tmp_path: Path) -> None:
    lists = made_lists(SCOPE)
    queries = np.ascontiguousarray(lists.quantizer.reconstruct_n(0, 20))
    told: list[tuple[int, int]] = []

    profile = measure_profile(
        lists, queries, 8, tmp_path, Effort(batch_sizes=(1, 4), num_queries=8), lambda *at: told.append(at)
    )

    assert profile.sizes.sum() == 8000 and profile.list_bytes == 8000 * (48 + 8)
    assert profile.probed.shape == (20, 8) and profile.accesses().sum() == 160
    assert profile.accesses(slice(0, 5)).sum() == 40
    assert (profile.probed[:, 0] == np.arange(20)).all(), "a list's centre probes it first"
    assert profile.model.times.batch_sizes == (1, 4)
    division = hottest_in_ram(profile.accesses(), profile.sizes, profile.bytes_per_vector, profile.list_bytes // 2)
    prediction = profile.model.throughput(division, [profile.probed[:4], profile.probed[4:8]], 10)
    assert 0 < prediction.low < prediction.value < prediction.high
    assert told[-1][0] == told[-1][1] == pytest.approx(len(told))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # times searches
def test_device_is_timed_with_the_lists_that_fit() -> None:
    """Runs on the CPU with the same code."""
    lists = made_lists(SCOPE)
    queries = np.ascontiguousarray(lists.quantizer.reconstruct_n(0, 20))
    effort = Effort(batch_sizes=(1, 4), num_queries=8)

    costs = measure_device(lists, queries, 8, "cpu", 4000 * 48, effort)

    assert costs is not None and min(costs.per_launch, costs.per_query, costs.per_code) >= 0
    assert 0 < costs.seconds(np.array([1.0, 4.0, 4 * 1000.0])) < 10
    assert measure_device(lists, queries, 8, "cpu", 47, effort) is None, "no list fits"
