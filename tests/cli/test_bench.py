"""`stillroom bench retrieval`: what it calls, and what it prints."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from stillroom.bench import relevance
from stillroom.bench.relevance import ModeResult, RetrievalReport
from stillroom.config.settings import SearchMode, StillroomConfig
from stillroom.errors import UsageError
from tests.cli.harness import Run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Path, Sequence[SearchMode]]]:
    seen: list[tuple[Path, Path, Sequence[SearchMode]]] = []

    def measure(dataset: Path, work_dir: Path, config: StillroomConfig, modes: Sequence[SearchMode]) -> RetrievalReport:
        if dataset.name == "broken":
            raise UsageError("corpus.jsonl is missing")
        seen.append((dataset, work_dir, modes))
        results = tuple(ModeResult(mode, 0.25, 0.5, 0.0123, 0.2) for mode in modes)
        return RetrievalReport(dataset.name, 3633, 1, 323, 65.0, results)

    monkeypatch.setattr(relevance, "run_retrieval", measure)
    for name in ("first", "second", "broken"):
        Path(name).mkdir()
    return seen


def test_table(run: Run, calls: list[tuple[Path, Path, Sequence[SearchMode]]]) -> None:
    result = run("bench", "retrieval", "--dataset", "first", "--work-dir", "w")

    assert result.err == "measuring first ...\n"
    assert result.out == (
        "first: 3,633 documents, 1 chunk, 323 queries; index ready in 1 min 5 s\n"
        "  mode    recall@5  recall@10  mean search  slowest\n"
        "  hybrid    0.2500     0.5000      12.3 ms   200 ms\n"
        "  dense     0.2500     0.5000      12.3 ms   200 ms\n"
        "  sparse    0.2500     0.5000      12.3 ms   200 ms\n"
    )
    assert calls == [(Path("first"), Path("w"), ["hybrid", "dense", "sparse"])]


def test_json_of_several_data_sets(run: Run, calls: list[tuple[Path, Path, Sequence[SearchMode]]]) -> None:
    flags = "--dataset first --dataset second --mode dense --mode sparse --json --quiet"

    result = run("bench", "retrieval", *flags.split())

    assert result.err == ""
    assert [report["dataset"] for report in result.json["reports"]] == ["first", "second"]
    assert result.json["reports"][0]["modes"][0]["recall_at_10"] == 0.5
    assert [list(modes) for _, _, modes in calls] == [["dense", "sparse"]] * 2


def test_indexes_are_kept_in_the_users_cache(
    run: Run, calls: list[tuple[Path, Path, Sequence[SearchMode]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")

    run("bench", "retrieval", "--dataset", "first")

    assert calls[0][1] == Path("/cache/stillroom/bench")


def test_folder_that_is_no_data_set_is_a_wrong_call(
    run: Run, calls: list[tuple[Path, Path, Sequence[SearchMode]]]
) -> None:
    assert run("bench", "retrieval", "--dataset", "broken").code == 2
    assert run("bench", "retrieval", "--dataset", "nowhere").code == 2
    assert run("bench", "retrieval").code == 2


def test_unknown_mode_is_a_wrong_call(run: Run, calls: list[tuple[Path, Path, Sequence[SearchMode]]]) -> None:
    result = run("bench", "retrieval", "--dataset", "first", "--mode", "magic")

    assert result.code == 2
    assert "--mode magic: it must be one of hybrid, dense, sparse" in result.err
    assert calls == []
