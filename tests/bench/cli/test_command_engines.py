"""Tests the command `stillroom bench engines`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stillroom.config.settings import StillroomConfig
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.quality import engines
from stillroom_bench.quality.quality_options import EnginesOptions
from tests.cli.harness import Run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []

    def run(
        options: EnginesOptions, work_dir: Path, config: StillroomConfig, on_progress: Callable[[str], None]
    ) -> BenchResult:
        seen.append(options)
        samples = Samples()
        samples.add("one process", {"start_seconds": 2.0})
        return BenchResult("stillroom bench engines", record_environment(["x"]), {}, samples)

    monkeypatch.setattr(engines, "run_engines", run)
    Path("asked.txt").write_text("Who is the director?\n", encoding="utf-8")
    Path("docs").mkdir()
    return seen


NEEDED = ("--documents", "docs", "--questions", "asked.txt")


def test_default_flags_give_default_options(run: Run, calls: list[Any]) -> None:
    result = run("bench", "engines", *NEEDED, "--output", "r.json")

    assert "start_seconds" in result.out and Path("r.json").exists()
    assert calls == [EnginesOptions(documents=(Path("docs"),), questions=Path("asked.txt"))]


def test_every_flag_sets_its_option(run: Run, calls: list[Any]) -> None:
    flags = (
        "--experiment routing --model MODEL --different 9 --tokens 8 --clients 2 --threads 3 --engines 4 --requests 7 "
        "--zipf 1.5 --share 0.25 --repeat 2 --seed 5"
    )
    run("bench", "engines", *NEEDED, *flags.split(), "--quiet")

    expected = EnginesOptions(
        documents=(Path("docs"),),
        questions=Path("asked.txt"),
        experiment="routing",
        model="MODEL",
        num_questions=9,
        num_tokens=8,
        num_clients=2,
        num_threads=3,
        num_engines=4,
        num_requests=7,
        zipf=1.5,
        share=0.25,
        repeat=2,
        seed=5,
    )
    assert calls == [expected]


@pytest.mark.parametrize("flags", ["--engines 2", "--requests 60", "--zipf 0.6", "--share 0.5"])
def test_flags_of_routing_are_refused_without_it(run: Run, calls: list[Any], flags: str) -> None:
    result = run("bench", "engines", *NEEDED, *flags.split())

    assert result.code == 2 and f"{flags.split()[0]} has no effect with --experiment split" in result.err and not calls
