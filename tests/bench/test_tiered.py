"""Tests `stillroom bench tiered` at a tiny size."""

from pathlib import Path

import pytest

from stillroom.errors import UsageError
from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.tiered_throughput import SKEWS, run_tiered


@pytest.mark.slow  # measures twelve arms
def test_every_arm_is_measured(tmp_path: Path) -> None:
    scope = TieredOptions(size=8000, nlist=64, nprobe=2, shares=(0.25,), batch_sizes=(1, 4), num_batches=2, repeat=2)
    result = run_tiered(scope, tmp_path)
    groups = [f"{skew}, batch {size}" for skew in SKEWS for size in (1, 4)]
    arms = ("all on disk", "25% of lists in RAM", "all in RAM")
    assert set(result.samples.values) == {f"{group}/{arm}" for group in groups for arm in arms}
    for group in groups:
        assert all(seconds > 0 for seconds in result.samples.of(f"{group}/all on disk", "mean_seconds"))
        waits, whole = (
            result.samples.of(f"{group}/25% of lists in RAM", name)
            for name in ("mean_seconds", "without_dispatcher_mean_seconds")
        )
        assert all(wait <= batch for wait, batch in zip(waits, whole, strict=True))
    (rows,) = result.tables.values()
    shares = [float(str(row["accesses of the hottest 10 %"]).rstrip("%")) for row in rows]
    assert shares == [pytest.approx(40, abs=6), pytest.approx(80, abs=6)]
    assert not list(tmp_path.iterdir()), "temporary files are removed"


def test_too_few_vectors_for_the_lists_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too few"):
        run_tiered(TieredOptions(size=1000, nlist=64), tmp_path)
