"""Tests the command `stillroom bench pipeline reordering`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stillroom_bench.experiments import reordering
from stillroom_bench.experiments.experiment_options import ReorderingOptions
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from tests.cli.harness import Run

Calls = list[tuple[ReorderingOptions, Path]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    seen: Calls = []

    def measure(options: ReorderingOptions, work_dir: Path, *, on_progress: Callable[[str], None]) -> BenchResult:
        seen.append((options, work_dir))
        on_progress("1.5x/first come, run 1")
        tables = {"order of admission": [{"order": "first come", "mean s": 1.0}]}
        return BenchResult(
            "stillroom bench pipeline reordering", record_environment(["x"]), {}, Samples(), tables=tables
        )

    monkeypatch.setattr(reordering, "run_reordering", measure)
    return seen


def test_default_flags_give_default_options(run: Run, calls: Calls) -> None:
    result = run("bench", "pipeline", "reordering", "--work-dir", "w", "--output", "found.json")

    assert "| first come | 1 |" in result.out
    assert result.err == "1.5x/first come, run 1\nresult saved in found.json\n" and Path("found.json").exists()
    assert calls == [(ReorderingOptions(), Path("w"))]


def test_every_flag_sets_its_option(run: Run, calls: Calls) -> None:
    Path("set").mkdir()
    flags = "--dataset set --model set --curve nq --k 3 --companions fixed --load 1.1 --load 2 --window 0 --window 64"
    flags += " --requests 9 --warmup 7 --documents 50 --device-share 0.1 --host-share 0.2 --repeat 5 --seed 6"
    result = run("bench", "pipeline", "reordering", "--work-dir", "w", *flags.split(), "--quiet", "--json")

    assert result.err == "" and result.json["benchmark"] == "stillroom bench pipeline reordering"
    options = ReorderingOptions(
        dataset=Path("set"),
        model=Path("set"),
        curve="nq",
        k=3,
        companions="fixed",
        loads=(1.1, 2.0),
        windows=(0, 64),
        num_requests=9,
        num_warm=7,
        num_documents=50,
        device_share=0.1,
        host_share=0.2,
        repeat=5,
        seed=6,
    )
    assert calls == [(options, Path("w"))]


def test_invalid_flags_are_refused(run: Run, calls: Calls) -> None:
    for flags, words in ((["--curve", "x"], "unknown curves x"), (["--load", "-1"], "must be positive multiples")):
        result = run("bench", "pipeline", "reordering", *flags)
        assert result.code == 2 and words in result.err
    assert not calls
