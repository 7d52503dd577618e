"""Tests `stillroom bench tiered --predict` at a tiny size, and its summary."""

from pathlib import Path

import pytest

from stillroom.errors import UsageError
from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.tiered_model import PREDICTORS, run_prediction, summary
from stillroom_bench.experiments.tiered_throughput import SKEWS


@pytest.mark.slow  # half a minute
def test_every_cell_is_predicted_and_measured(tmp_path: Path) -> None:
    scope = TieredOptions(size=8000, nlist=64, nprobe=4, shares=(0.25,), batch_sizes=(1, 4), num_batches=2, repeat=2)
    result = run_prediction(scope, tmp_path)
    cells = result.tables["Queries per second"]
    assert [row["questions like"] for row in cells] == [f"{skew}, batch {size}" for skew in SKEWS for size in (1, 4)]
    for row in cells:
        assert row["measured"] > 0 and row["predicted"] > 0
        low, _, high = row["interval"].partition(" to ")
        assert (row["holds"] == "yes") == (float(low) <= row["measured"] <= float(high))
        assert row[f"error, {PREDICTORS[0]}"] == f"{row['predicted'] / row['measured'] - 1:+.1%}"
    assert [row["prediction"] for row in result.tables["Summary"]] == list(PREDICTORS)
    assert len(result.tables["What was fitted"]) == 2
    assert not list(tmp_path.iterdir())


def test_summary_equals_hand_computed_values() -> None:
    rows = [
        {"holds": holds, **{f"error, {name}": error for name in PREDICTORS}}
        for holds, error in (("yes", "+10.0%"), ("no", "-30.0%"), ("yes", "+4.0%"))
    ]
    first = summary(rows)[0]
    assert (first["median error"], first["largest error"]) == ("10.0%", "30.0%")
    assert (first["cells in the interval"], summary(rows)[2]["cells in the interval"]) == ("67%", "")


def test_too_few_vectors_for_the_lists_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too few"):
        run_prediction(TieredOptions(size=1000, nlist=64), tmp_path)
