"""`stillroom prepare` on real files with the bundled decoder."""

from pathlib import Path

import pytest

from tests.cli.harness import Run

pytestmark = pytest.mark.microworld


@pytest.fixture
def kb(run: Run) -> None:
    Path("docs").mkdir()
    Path("docs/pevin.txt").write_text("Pevin Jimlow was born in Velwick . He was taught by Rana Gevdt .")
    assert run("add", "docs", "--kb", "kb", "--quiet").code == 0


def test_documents_are_prepared_once_and_then_found(run: Run, kb: None) -> None:
    mode = ("--kb", "kb", "--model", "bundled:microworld", "--reuse", "prepared")
    first = run("prepare", *mode)
    assert first.code == 0 and first.out.startswith("prepared 1 of 1 chunk in ") and "1 computed now" in first.out
    again = run("prepare", *mode, "--json").json
    assert (again["mode"], again["num_chunks"], again["num_computed"], again["is_full"]) == ("prepared", 1, 0, False)
    assert run("ask", "Who taught Pevin Jimlow ?", *mode, "--quiet").code == 0
    shown = run("explain", "--kb", "kb").out
    assert "prepared  " in shown and "at the beginning of its document; read in 8 bits a number; saves" in shown


def test_reader_keeps_no_kv_and_the_error_says_what_to_do(run: Run, kb: None) -> None:
    result = run("prepare", "--kb", "kb", "--model", "bundled:reader")
    assert result.code == 2 and "keeps no KV" in result.err and "--model" in result.err


def test_unknown_document_is_named(run: Run, kb: None) -> None:
    result = run("prepare", "missing.txt", "--kb", "kb", "--model", "bundled:microworld")
    assert result.code != 0 and "missing.txt" in result.err


@pytest.mark.parametrize("setting", ["STILLROOM_REUSE__DISK_BYTES", "STILLROOM_PREPARE__DISK_BYTES"])
def test_nothing_is_prepared_that_would_be_lost_at_the_end(
    run: Run, kb: None, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting, "0")
    result = run("prepare", "--kb", "kb", "--model", "bundled:microworld")
    assert result.code == 2 and "disk_bytes" in result.err


def test_full_budget_is_reported_and_nothing_prepared_is_a_failure(
    run: Run, kb: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STILLROOM_PREPARE__DISK_BYTES", "1000")
    result = run("prepare", "--kb", "kb", "--model", "bundled:microworld", "--reuse", "prepared")
    assert result.code == 1 and "prepared 0 of 1 chunk" in result.out and "the budget is full" in result.out
