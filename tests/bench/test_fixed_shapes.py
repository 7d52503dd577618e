"""The command that measures `runtime.fixed_shapes`."""

import pytest

from stillroom.bench.fixed_shapes import main, questions


def test_with_fixed_shapes_it_finds_no_bit_that_differs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--questions", "2"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["| no", "| yes"]
    assert rows[1][1:4] == ["0 of 2", "0 of 2", "0"]


def test_the_same_seed_asks_the_same_questions() -> None:
    assert questions(900, 3, 1) == questions(900, 3, 1) != questions(900, 3, 2)
