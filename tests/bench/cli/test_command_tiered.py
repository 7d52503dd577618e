"""Tests the command `stillroom bench tiered`: which benchmark the flags select, and which flags are refused."""

from pathlib import Path
from typing import Any

import pytest

from stillroom_bench.experiments import tiered_answers, tiered_drift, tiered_model, tiered_parts, tiered_throughput
from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.tiered_drift import DriftOptions
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from tests.cli.harness import Run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []

    def fake(module: Any, name: str) -> None:
        def run(*scopes: Any, **_: Any) -> BenchResult:
            seen.append((name, *(one for one in scopes if not callable(one) and not isinstance(one, Path))))
            return BenchResult("stillroom bench tiered", record_environment(["x"]), {}, Samples())

        monkeypatch.setattr(module, name, run)

    fake(tiered_throughput, "run_tiered")
    fake(tiered_answers, "run_answers")
    fake(tiered_drift, "run_drift")
    fake(tiered_model, "run_prediction")
    fake(tiered_parts, "run_parts")
    return seen


def test_each_benchmark_gets_its_flags(run: Run, calls: list[Any]) -> None:
    assert run("bench", "tiered", "--share", "0.2", "--share", "0.3", "--batch", "2").code == 0
    assert run("bench", "tiered", "--drift", "--share", "0.3", "--half-life", "9").code == 0
    assert run("bench", "tiered", "--answers", "--probes", "256").code == 0
    assert run("bench", "tiered", "--predict", "--batch", "3").code == 0
    assert run("bench", "tiered", "--answers", "--together").code == 0
    assert run("bench", "tiered", "--parts", "--batch", "2").code == 0
    assert [name for name, *_ in calls] == [
        "run_tiered",
        "run_drift",
        "run_answers",
        "run_prediction",
        "run_answers",
        "run_parts",
    ]
    assert [calls[place][2].together for place in (2, 4)] == [False, True] and calls[5][1].batch_sizes == (2,)
    assert calls[0][1] == TieredOptions(shares=(0.2, 0.3), batch_sizes=(2,))
    assert calls[1][2] == DriftOptions(share=0.3, half_lives=(9.0,))
    assert calls[2][1].nprobe == 256 and calls[3][1].batch_sizes == (3,)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--answers --share 0.2", "--share has no effect with --answers"),
        ("--answers --batch 1", "--batch has no effect with --answers"),
        ("--drift --batch 1", "--batch has no effect with --drift"),
        ("--drift --share 0.2 --share 0.3", "--drift takes one --share"),
        ("--drift --answers", "--drift and --answers are different benchmarks"),
        ("--predict --answers --drift", "--drift and --answers and --predict are different benchmarks"),
        ("--half-life 500", "--half-life has no effect without --drift"),
        ("--parts --share 0.2", "--share has no effect with --parts"),
        ("--drift --together", "--together has no effect with --drift"),
        ("--predict --half-life 500", "--half-life has no effect with --predict"),
    ],
)
def test_flags_without_effect_are_refused(run: Run, calls: list[Any], flags: str, message: str) -> None:
    result = run("bench", "tiered", *flags.split())
    assert result.code == 2 and message in result.err and not calls
