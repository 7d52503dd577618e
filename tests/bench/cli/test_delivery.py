"""Tests the outputs of a bench command: text, JSON, result file, HTML page, comparison."""

import errno
import json
import tempfile
from pathlib import Path

import pytest

from stillroom.cli import main
from stillroom_bench.cli import delivery
from stillroom_bench.experiments import structures
from stillroom_bench.instrument import bench_report
from stillroom_bench.instrument.bench_report import BenchResult
from tests.cli.harness import Run

FLAGS = ("bench", "structures", "--repeat", "2", "--operations", "200")


@pytest.fixture(autouse=True)
def without_large_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the arms that take long: the tests are about what is done with the samples."""
    monkeypatch.setattr(structures, "prefix_sharing_arms", lambda *_: [])


def test_result_is_printed_saved_plotted_and_compared(run: Run, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    first = run(*FLAGS, "--output", str(old), "--html", str(tmp_path / "page.html"))
    assert first.code == 0 and "| sketch/stillroom | operation_seconds |" in first.out
    assert "run 2: " in first.err and "result saved in" in first.err
    assert "<svg" in (tmp_path / "page.html").read_text()
    assert len(json.loads(old.read_text())["arms"]["sketch/stillroom"]["operation_seconds"]["samples"]) == 2

    second = run(*FLAGS, "--quiet", "--compare", str(old))
    assert second.code == 0 and second.err == ""
    assert "figures differ significantly" in second.out

    third = run(*FLAGS, "--quiet", "--json", "--compare", str(old))
    assert third.json["benchmark"] == "stillroom bench structures"
    assert {change["is_regression"] for change in third.json["changes"]} <= {True, False}


def test_invalid_result_file_is_refused_before_the_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    result = run(*FLAGS, "--compare", str(tmp_path / "other.json"))
    assert result.code == 2 and "is not a result of stillroom bench" in result.err
    assert "warming up" not in result.err


def test_only_results_of_the_same_benchmark_are_compared(run: Run, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    assert run(*FLAGS, "--quiet", "--output", str(old)).code == 0
    other = run("bench", "tiered", "--compare", str(old))
    assert other.code == 2 and "`stillroom bench structures`, which `stillroom bench tiered` cannot be" in other.err
    old.write_text(old.read_text().replace("stillroom bench structures", "stillroom bench tiered --drift"))
    other = run("bench", "tiered", "--quiet", "--compare", str(old))
    assert other.code == 2 and "`stillroom bench tiered` cannot be compared" in other.err

    assert run(*FLAGS, "--quiet", "--output", str(old)).code == 0
    more = run(*FLAGS[:-1], "300", "--quiet", "--compare", str(old))
    assert more.code == 0 and "operations (200 then, 300 now)" in more.out
    assert "cannot be told with 2 runs" in more.out


@pytest.mark.parametrize("flag", ["--output", "--html"])
def test_unwritable_output_is_refused_before_the_run(run: Run, tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").touch()
    for path, message in ((tmp_path, "is a folder"), (tmp_path / "file" / "r", "cannot be written")):
        result = run(*FLAGS, flag, str(path))
        assert result.code == 2 and message in result.err and "warming up" not in result.err
    assert run(*FLAGS, "--quiet", flag, str(tmp_path / "new" / "r")).code == 0


def test_samples_are_saved_despite_a_full_disk_or_a_broken_pipe(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(result: BenchResult, path: Path) -> None:
        if path.parent == tmp_path:
            raise OSError(errno.ENOSPC, "No space left on device")
        kept(result, path)

    kept = bench_report.save
    monkeypatch.setattr(bench_report, "save", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run(*FLAGS, "--quiet", "--output", str(tmp_path / "r.json"))
    assert result.code == 1 and "No space left" in result.err and "| sketch/stillroom |" in result.out
    (rescued,) = tmp_path.glob("stillroom-bench-*/r.json")
    assert str(rescued) in result.err and json.loads(rescued.read_text())["arms"]

    def gone(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(bench_report, "save", kept)
    monkeypatch.setattr(delivery, "line", gone)
    assert run(*FLAGS, "--quiet", "--output", str(tmp_path / "r.json")).code == main.NO_READER
    assert json.loads((tmp_path / "r.json").read_text())["arms"]


def test_repeated_values_are_measured_once(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"retrieved_docs": ["one text", "another text"]}\n' * 3)
    flags = ("bench", "savings", "--trace", str(trace), "--trace", str(tmp_path / "." / "trace.jsonl"))
    ratios = ("--ratio", "0.15", "--ratio", "0.154", "--ratio", "0.15", "--capacity", "0.5", "--capacity", "0.50")
    result = run(*flags, *ratios, "--json", "--quiet")
    assert result.json["parameters"]["ratios"] == [0.15, 0.154]
    rows = result.json["tables"]["Tokens computed"]
    assert len({(row["room"], row["arm"]) for row in rows}) == len(rows) == 1 + 2 * (2 + 2)
