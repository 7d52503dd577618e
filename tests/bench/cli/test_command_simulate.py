"""Tests the command `stillroom bench simulate`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stillroom_bench.experiments import simulate, simulate_validation
from stillroom_bench.experiments.experiment_options import SimulateOptions
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from tests.cli.harness import Run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []

    def result() -> BenchResult:
        tables = {"Figure 13": [{"arm": "ours", "s": 0.5}]}
        return BenchResult("stillroom bench simulate", record_environment(["x"]), {}, Samples(), tables=tables)

    def run(options: SimulateOptions, on_progress: Callable[[str], None]) -> BenchResult:
        seen.append(options)
        on_progress("overall")
        return result()

    def validate(work_dir: Path, *, seed: int, on_progress: Callable[[str], None]) -> BenchResult:
        seen.append((work_dir, seed))
        return result()

    monkeypatch.setattr(simulate, "run_simulate", run)
    monkeypatch.setattr(simulate_validation, "run_validation", validate)
    return seen


def test_default_flags_give_default_options(run: Run, calls: list[Any]) -> None:
    result = run("bench", "simulate", "--output", "r.json")

    assert "| ours | 0.5 |" in result.out and "overall" in result.err
    assert calls == [SimulateOptions()] and Path("r.json").exists()


def test_every_flag_sets_its_option(run: Run, calls: list[Any]) -> None:
    flags = (
        "--experiment policies --experiment top-k --requests 5 --warmup 6 --documents 70 --companions drawn --seed 2"
    )
    result = run("bench", "simulate", *flags.split(), "--json", "--quiet")

    assert result.err == "" and result.json["tables"]["Figure 13"] == [{"arm": "ours", "s": 0.5}]
    expected = SimulateOptions(
        experiments=("policies", "top-k"),
        num_requests=5,
        num_warm=6,
        num_documents=70,
        companions="drawn",
        seed=2,
    )
    assert calls == [expected]


def test_validate_runs_the_validation(run: Run, calls: list[Any]) -> None:
    run("bench", "simulate", "--validate", "--work-dir", "w", "--seed", "4", "--quiet")

    assert calls == [(Path("w"), 4)]


@pytest.mark.parametrize(
    "flags", ["--requests 500", "--warmup 5", "--documents 9", "--companions drawn", "--experiment policies"]
)
def test_flags_without_effect_on_the_validation_are_refused(run: Run, calls: list[Any], flags: str) -> None:
    result = run("bench", "simulate", "--validate", *flags.split())

    assert result.code == 2 and f"{flags.split()[0]} has no effect with --validate" in result.err and not calls


def test_unknown_experiment_is_refused(run: Run) -> None:
    result = run("bench", "simulate", "--experiment", "x")

    assert result.code == 2 and "known are overall" in result.err
