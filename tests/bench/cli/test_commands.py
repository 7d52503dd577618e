"""Tests the commands `stillroom bench retrieval` and `stillroom bench policies`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stillroom.config.settings import StillroomConfig
from stillroom.errors import UsageError
from stillroom_bench.cli import quality
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.quality import retrieval_quality
from stillroom_bench.quality.quality_options import RetrievalOptions
from tests.cli.harness import Run

Calls = list[tuple[list[str], Path, int]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    seen: Calls = []

    def measure(
        options: RetrievalOptions, work_dir: Path, config: StillroomConfig, on_step: Callable[[str], None]
    ) -> BenchResult:
        if any(dataset.name == "broken" for dataset in options.datasets):
            raise UsageError("corpus.jsonl is missing")
        assert options.split in ("test", "dev")
        seen.append(([dataset.name for dataset in options.datasets], work_dir, options.seed))
        on_step("indexing")
        tables = {"ndcg_at_10 per set": [{"rule": "RRF", "first": 0.25}]}
        return BenchResult("stillroom bench retrieval", record_environment(["x"]), {}, Samples(), tables=tables)

    monkeypatch.setattr(retrieval_quality, "run_quality", measure)
    for name in ("first", "second", "broken"):
        Path(name).mkdir()
    return seen


def test_table_is_printed(run: Run, calls: Calls) -> None:
    result = run("bench", "retrieval", "--dataset", "first", "--dataset", "second", "--work-dir", "w", "--seed", "3")

    assert result.err == "indexing\n"
    assert "| RRF | 0.25 |" in result.out
    assert calls == [(["first", "second"], Path("w"), 3)]


def test_json_is_printed(run: Run, calls: Calls) -> None:
    result = run("bench", "retrieval", "--dataset", "first", "--json", "--quiet")

    assert result.err == ""
    assert result.json["tables"]["ndcg_at_10 per set"] == [{"rule": "RRF", "first": 0.25}]


def test_help_of_bits_names_the_accepted_values(run: Run) -> None:
    shown = [word for word in run("bench", "contexts", "--help").out.split() if word.isascii()]
    assert "--bits 8|4" in " ".join(shown) and "8 or 4, and compare with 16" in " ".join(shown)


def test_work_folder_defaults_to_the_users_cache(run: Run, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")

    run("bench", "retrieval", "--dataset", "first")

    assert calls[0][1] == Path("/cache/stillroom/bench")


def test_folder_without_data_set_is_refused(run: Run, calls: Calls) -> None:
    result = run("bench", "retrieval", "--dataset", "broken")

    assert result.code == 2
    assert "corpus.jsonl is missing" in result.err


def test_policies_of_a_few_requests(run: Run) -> None:
    result = run(
        "bench",
        "policies",
        "--requests",
        "20",
        "--top-k",
        "1",
        "--capacity",
        "0.2",
        "--repeat",
        "1",
        "--output",
        "p.json",
    )

    assert "mmlu-like, k=1, 20% of its KV fits" in result.err
    assert "| mmlu-like, k=1 | 20% |" in result.out
    assert Path("p.json").exists()


def test_missing_relevance_metrics_are_named_with_the_command_that_installs_them(
    run: Run, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "find_spec", lambda name: None)
    result = run("bench", "retrieval", "--dataset", "first")

    assert result.code == 2 and "pip install 'stillroom[bench]'" in result.err and not calls
