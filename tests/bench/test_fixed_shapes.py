"""The command that measures `runtime.fixed_shapes`."""

from stillroom_bench.quality.fixed_shapes import questions, run_fixed_shapes
from stillroom_bench.quality.options import FixedShapesOptions


def test_with_fixed_shapes_no_bit_differs() -> None:
    result = run_fixed_shapes(FixedShapesOptions(num_questions=2, repeat=1))
    [rows] = result.tables.values()
    assert [row["fixed shapes"] for row in rows] == ["no", "yes"]
    assert rows[1]["log probabilities that differ"] == rows[1]["answers that differ"] == 0
    assert set(result.samples.values) == {"off", "exact", "off, fixed shapes", "exact, fixed shapes"}


def test_the_same_seed_asks_the_same_questions() -> None:
    assert questions(900, 3, 1) == questions(900, 3, 1) != questions(900, 3, 2)
