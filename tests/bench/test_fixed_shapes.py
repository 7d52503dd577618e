"""Tests `stillroom bench fixed-shapes`."""

import pytest

from stillroom_bench.quality.fixed_shapes import questions, run_fixed_shapes
from stillroom_bench.quality.quality_options import FixedShapesOptions


@pytest.mark.slow  # measures every arm
def test_fixed_shapes_make_reuse_bit_identical() -> None:
    result = run_fixed_shapes(FixedShapesOptions(num_questions=2, repeat=1))
    [rows] = result.tables.values()
    assert [row["fixed shapes"] for row in rows] == ["no", "yes"]
    assert rows[1]["log probabilities that differ"] == rows[1]["answers that differ"] == 0
    assert set(result.samples.values) == {"off", "exact", "off, fixed shapes", "exact, fixed shapes"}


def test_questions_are_reproducible_from_the_seed() -> None:
    assert questions(900, 3, 1) == questions(900, 3, 1) != questions(900, 3, 2)
