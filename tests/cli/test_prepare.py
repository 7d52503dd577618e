"""`stillroom prepare` on real files with the bundled decoder."""

import json
from pathlib import Path

import pytest

from stillroom.backends.document_windows import DocumentWindow, DocumentWindows
from stillroom.cli import main
from stillroom.core.cancellation import Cancellation
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


@pytest.fixture
def long_kb(run: Run) -> None:
    """A document of several windows."""
    Path("docs").mkdir()
    lines = (f"Pevin Jimlow was born in the year {year} . He was taught by Rana Gevdt ." for year in range(30))
    text = "\n\n".join(lines)
    Path("docs/pevin.txt").write_text(text)
    Path("small.toml").write_text("[chunker]\nmax_tokens = 32\n[prepare]\nwindow_tokens = 200\n")
    assert run("add", "docs", "--kb", "kb", "--quiet", "--config", "small.toml").code == 0


@pytest.mark.parametrize(("signal", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_interrupted_command_prints_what_it_did(
    run: Run,
    long_kb: None,
    signal: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    compute = DocumentWindows.compute
    windows: list[DocumentWindow] = []

    def interrupted(self: DocumentWindows, window: DocumentWindow, stop: Cancellation) -> bool:
        windows.append(window)
        if len(windows) == 3:
            raise signal
        return compute(self, window, stop)

    monkeypatch.setattr(DocumentWindows, "compute", interrupted)
    command = ["prepare", "--config", "small.toml", "--kb", "kb", "--model", "bundled:microworld", "--json"]
    capfd.readouterr()
    try:
        ended = main.run([*command, "--reuse", "prepared"])
    except SystemExit as ending:
        ended = int(ending.code or 0)
    monkeypatch.setattr(DocumentWindows, "compute", compute)
    first = json.loads(capfd.readouterr().out)
    assert ended == code
    assert first["is_interrupted"] and 0 < first["num_computed"] == first["num_chunks"] < first["num_chunks_total"]
    rest = run(*command, "--reuse", "prepared").json
    assert not rest["is_interrupted"] and rest["num_chunks"] == rest["num_chunks_total"]
    assert rest["num_computed"] == rest["num_chunks"] - first["num_chunks"]


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
