"""Tests `stillroom bench tiered --drift` at a tiny size."""

from pathlib import Path

import pytest

from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.tiered_drift import DriftOptions, run_drift


@pytest.mark.slow  # 2,300 batches of searches
def test_exchanging_lists_recovers_the_hit_rate_and_the_initial_choice_does_not(tmp_path: Path) -> None:
    scope = TieredOptions(size=8000, nlist=64, nprobe=2, repeat=1)
    drift = DriftOptions(num_before=256, num_after=2048, window=64, drop_every=64, half_lives=(50.0,))
    result = run_drift(scope, drift, tmp_path)
    moving, staying = "exchanging, half-life 50", "first choice stays"
    assert set(result.samples.values) == {moving, staying}
    for arm in (moving, staying):
        (before,) = result.samples.of(arm, "before_hit_rate")
        assert before > 0.7 and result.samples.of(arm, "right_after_hit_rate")[0] < 0.9 * before
        assert result.samples.of(arm, "recovery_search_seconds")[0] > 0
    assert result.samples.of(moving, "is_recovered") == [1.0] and result.samples.of(moving, "exchanged_lists")[0] > 0
    assert result.samples.of(moving, "recovery_queries")[0] <= 2048
    assert result.samples.of(staying, "is_recovered") == [0.0] and result.samples.of(staying, "exchanged_lists") == [0]
    assert result.samples.of(staying, "recovery_queries") == [2048]
    (rows,) = result.tables.values()
    assert rows[0]["questions from"] == -64 and rows[-1]["questions from"] == 2048 - 64
    assert not list(tmp_path.iterdir()), "temporary files are removed"
