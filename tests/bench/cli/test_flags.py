"""Tests the flags that are generated from an option class."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from stillroom_bench.cli import delivery
from stillroom_bench.cli.flags import Call, add_command
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.option_flags import REQUIRED, flag, repeat_flag


@dataclass(frozen=True, slots=True)
class Sizes:
    """Options of a benchmark that only this test has."""

    datasets: tuple[Path, ...] = flag(REQUIRED, "A data set.", "--dataset", path="folder")
    size: int = flag(7, "Vectors.", min=2)
    shares: tuple[float, ...] = flag((0.1, 0.5), "Share of the lists.", "--share", min=0.0, max=1.0)
    limit: int | None = flag(None, "Questions at most.")
    is_quick: bool = flag(False, "Skip what is slow.", "--quick")
    repeat: int = repeat_flag(3)
    num_hidden: int = 4


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return []


@pytest.fixture
def app(seen: list[Any]) -> typer.Typer:
    def run(options: Sizes, call: Call) -> BenchResult:
        seen.append((options, call.work_dir, call.is_given("size")))
        return BenchResult("sizes", record_environment(["x"]), {}, Samples())

    made = typer.Typer()
    made.callback()(delivery.begin)
    add_command(made, "sizes", Sizes, run, "Measure sizes.", ["config"])
    return made


def test_defaults_are_those_of_the_option_class(app: typer.Typer, seen: list[Any], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["sizes", "--dataset", str(tmp_path), "--work-dir", "w"])

    assert result.exit_code == 0, result.output
    assert seen == [(Sizes((tmp_path,)), Path("w"), False)]


def test_every_field_with_a_flag_can_be_given(app: typer.Typer, seen: list[Any], tmp_path: Path) -> None:
    words = "--size 9 --share 0.2 --share 0.20 --share 1 --limit 3 --quick --repeat 1 --quiet"
    result = CliRunner().invoke(app, ["sizes", "--dataset", str(tmp_path), *words.split()])

    assert result.exit_code == 0, result.output
    assert seen[0][0] == Sizes((tmp_path,), 9, (0.2, 1.0), 3, True, 1) and seen[0][2]


@pytest.mark.parametrize(
    "words", ["", "--dataset missing", "--dataset . --size 1", "--dataset . --share 2", "--config x"]
)
def test_values_out_of_range_and_unknown_flags_are_refused(app: typer.Typer, seen: list[Any], words: str) -> None:
    assert CliRunner().invoke(app, ["sizes", *words.split()]).exit_code == 2
    assert not seen


def test_help_shows_defaults_of_repeatable_flags(app: typer.Typer) -> None:
    shown = CliRunner().invoke(app, ["sizes", "--help"], env={"COLUMNS": "200"}).output

    assert "Share of the lists; can be repeated. Default: 0.1, 0.5." in shown and "num-hidden" not in shown
