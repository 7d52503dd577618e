"""What a bench command leaves behind: text or JSON, a result file, a page, a comparison."""

import json
from pathlib import Path

from tests.cli.harness import Run

FLAGS = ("bench", "structures", "--repeat", "2", "--operations", "1500")


def test_a_result_is_printed_kept_drawn_and_compared(run: Run, tmp_path: Path) -> None:
    first = run(*FLAGS, "--output", str(tmp_path / "old.json"), "--html", str(tmp_path / "page.html"))
    assert first.code == 0 and "| sketch/stillroom | operation_seconds |" in first.out
    assert "run 2: " in first.err and "kept in" in first.err
    assert "<svg" in (tmp_path / "page.html").read_text()
    old = json.loads((tmp_path / "old.json").read_text())
    assert len(old["arms"]["sketch/stillroom"]["operation_seconds"]["samples"]) == 2

    second = run(*FLAGS, "--quiet", "--compare", str(tmp_path / "old.json"))
    assert second.code == 0 and second.err == ""
    assert "figures differ significantly" in second.out


def test_json_holds_samples_and_changes(run: Run, tmp_path: Path) -> None:
    run(*FLAGS, "--quiet", "--output", str(tmp_path / "old.json"))
    result = run(*FLAGS, "--quiet", "--json", "--compare", str(tmp_path / "old.json"))
    assert result.json["benchmark"] == "stillroom bench structures"
    assert {change["is_regression"] for change in result.json["changes"]} <= {True, False}


def test_a_foreign_file_cannot_be_compared_with(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    result = run(*FLAGS, "--quiet", "--compare", str(tmp_path / "other.json"))
    assert result.code == 2 and "is not a result of stillroom bench" in result.err
