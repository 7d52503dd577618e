"""Tests `stillroom bench preloading` with a tiny model."""

from pathlib import Path

import pytest

from stillroom_bench.experiments.experiment_options import AnywhereBenchOptions
from stillroom_bench.experiments.preloading import PLACES, run_preloading
from tests.bench.test_anywhere import TINY

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow  # measures every arm
def test_every_place_way_and_moment_is_measured(tmp_path: Path) -> None:
    scope = AnywhereBenchOptions(
        num_chunks=3, chunk_tokens=20, question_tokens=8, ratios=(0.25,), dtype="float32", repeat=2
    )
    result = run_preloading(scope, tmp_path, shape=TINY)
    arms = {
        f"{moment}/{place.label}, {way.label}"
        for moment in ("idle", "waiting")
        for place in PLACES
        for way in place.ways
    }
    assert set(result.samples.values) == arms and len(arms) == 24
    assert all(len(result.samples.of(arm, "ttft_seconds")) == 2 for arm in arms)
    (rows,) = result.tables.values()
    assert len(rows) == 6 and all(1 <= row["Eq. 16 depth"] <= TINY.num_layers for row in rows)
    assert result.baseline == "from device, at once" and not list(tmp_path.rglob("*.kv"))
