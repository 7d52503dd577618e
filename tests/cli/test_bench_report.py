"""What a bench command leaves behind: text or JSON, a result file, a page, a comparison."""

import json
from pathlib import Path

from tests.cli.harness import Run

FLAGS = ("bench", "structures", "--repeat", "2", "--operations", "200")


def test_a_result_is_printed_kept_drawn_and_compared(run: Run, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    first = run(*FLAGS, "--output", str(old), "--html", str(tmp_path / "page.html"))
    assert first.code == 0 and "| sketch/stillroom | operation_seconds |" in first.out
    assert "run 2: " in first.err and "kept in" in first.err
    assert "<svg" in (tmp_path / "page.html").read_text()
    assert len(json.loads(old.read_text())["arms"]["sketch/stillroom"]["operation_seconds"]["samples"]) == 2

    second = run(*FLAGS, "--quiet", "--compare", str(old))
    assert second.code == 0 and second.err == ""
    assert "figures differ significantly" in second.out

    third = run(*FLAGS, "--quiet", "--json", "--compare", str(old))
    assert third.json["benchmark"] == "stillroom bench structures"
    assert {change["is_regression"] for change in third.json["changes"]} <= {True, False}


def test_a_foreign_file_is_refused_before_anything_is_measured(run: Run, tmp_path: Path) -> None:
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
