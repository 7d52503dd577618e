"""Tests the command `stillroom bench reuse`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stillroom_bench.experiments import reuse_rates
from stillroom_bench.experiments.reuse_options import ReuseOptions
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from tests.cli.harness import Run

Calls = list[tuple[ReuseOptions, Path]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    seen: Calls = []

    def measure(options: ReuseOptions, work_dir: Path, *, on_progress: Callable[[str], None]) -> BenchResult:
        seen.append((options, work_dir))
        on_progress("warming up off")
        tables = {"time to first token": [{"arm": "off", "mean": "1 s"}]}
        return BenchResult("stillroom bench reuse", record_environment(["x"]), {}, Samples(), tables=tables)

    monkeypatch.setattr(reuse_rates, "run_reuse", measure)
    return seen


def test_default_flags_give_default_options(run: Run, calls: Calls) -> None:
    result = run("bench", "reuse", "--work-dir", "w")

    assert "| off | 1 s |" in result.out and result.err == "warming up off\n"
    assert calls == [(ReuseOptions(), Path("w"))]


def test_every_flag_sets_its_option(run: Run, calls: Calls) -> None:
    Path("set").mkdir()
    Path("trace.csv").touch()
    flags = "--dataset set --model set --curve nq --curve mmlu --k 1 --k 5 --rate 0.5 --rate 2 --requests 9 --warmup 7"
    flags += (
        " --documents 50 --companions fixed --max-tokens 4 --repeat 3 --seed 6 --arm off --peer vllm=py --quiet --json"
        " --arrivals trace.csv --slo-ttft 0.5"
    )
    result = run(
        "bench", "reuse", "--work-dir", "w", "--peer", "vllm plenty=py", "--arm", "anywhere 30%", *flags.split()
    )

    assert result.err == "" and result.json["benchmark"] == "stillroom bench reuse"
    options = ReuseOptions(
        dataset=Path("set"),
        model=Path("set"),
        arrivals=Path("trace.csv"),
        peers=("vllm plenty=py", "vllm=py"),
        curves=("nq", "mmlu"),
        ks=(1, 5),
        rates=(0.5, 2.0),
        num_requests=9,
        num_warm=7,
        num_documents=50,
        companions="fixed",
        max_tokens=4,
        slo_ttft=0.5,
        repeat=3,
        seed=6,
        arms=("anywhere 30%", "off"),
    )
    assert calls == [(options, Path("w"))]


def test_invalid_flags_are_refused(run: Run, calls: Calls) -> None:
    for flags, words in (
        (["--peer", "vllm"], "--peer vllm=PATH"),
        (["--curve", "x"], "unknown curves x"),
        (["--arm", "x"], "unknown arms x"),
    ):
        result = run("bench", "reuse", *flags)
        assert result.code == 2 and words in result.err
    assert not calls
