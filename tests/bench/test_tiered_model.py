"""Tests `stillroom bench tiered --predict` at a tiny size, and its summary."""

from pathlib import Path
from typing import Any

import pytest

from stillroom.errors import UsageError
from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.tiered_model import PREDICTORS, ranking, run_prediction, summary, widths
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


def cells(predicted: dict[tuple[int, int], float]) -> list[dict[str, Any]]:
    """Return rows of two kinds of questions; 100 queries per second more for each batch size and share."""
    rows = []
    for skew in SKEWS:
        for (batch, share), value in predicted.items():
            measured = 100.0 * batch + 10.0 * share
            row = {"questions like": f"{skew}, batch {batch}", "division": f"{share}% of lists in RAM"}
            row |= {f"error, {name}": f"{value / measured - 1:+.6%}" for name in PREDICTORS}
            low, high = value * 0.5, value * 2
            row |= {"interval": f"{low} to {high}", "holds": "yes" if low <= measured <= high else "no"}
            rows.append(row | {"measured": measured, "predicted": value})
    return rows


def test_tau_is_one_where_the_order_is_right_and_minus_one_where_it_is_reversed() -> None:
    grid = [(batch, share) for batch in (1, 2, 4) for share in (1, 2, 3)]
    right = ranking(cells({one: 100.0 * one[0] + 10 * one[1] for one in grid}), 30)
    reversed_ = ranking(cells({one: 900.0 - 100 * one[0] - 10 * one[1] for one in grid}), 30)

    assert [(row["choice"], row["groups"], row["configurations"]) for row in right] == [
        ("share of the lists", 6, 3),
        ("batch size", 6, 3),
        ("both", 2, 9),
    ]
    assert {row[name] for row in right for name in PREDICTORS} == {"1 [1, 1]"}
    assert {row[name] for row in reversed_ for name in PREDICTORS} == {"-1 [-1, -1]"}
    assert [row["more of it"] for row in reversed_] == ["1 [1, 1]", "1 [1, 1]", ""]


def test_width_is_that_of_the_intervals_and_beside_it_what_would_have_been_enough() -> None:
    rows = cells({(batch, share): 2.0 * (100 * batch + 10 * share) for batch in (1, 2) for share in (1, 2)})

    own, enough = widths(rows)

    assert (own["low"], own["high"], own["contains"]) == ("-50%", "+100%", "100%")
    assert (enough["low"], enough["high"]) == ("-50%", "+100%"), "every prediction is twice the measurement"


def test_too_few_vectors_for_the_lists_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too few"):
        run_prediction(TieredOptions(size=1000, nlist=64), tmp_path)
