"""Parsing processes: the same documents as in one process, and a crash fails one file only."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.errors import DocumentError, ReaderUnavailableError
from stillroom.retrieval.intake.parsing import ParserPool
from stillroom.retrieval.loaders.load_file import load
from tests.retrieval.loaders.make import epub, pdf, word, workbook

SLOW = "*a **b " * 60_000
"""Markdown that takes the parser many seconds."""


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    contents = {
        "a.pdf": pdf([[(11, "The vault.")], [(16, "Keys"), (11, "Rotate them.")]], info={"Author": "Ann"}),
        "b.docx": word(lambda document: document.add_heading("Keys", 1)),
        "c.xlsx": workbook({"Keys": [["Name", "Days"], ["cellar", 30]]}),
        "d.epub": epub({"a.xhtml": "<h1>Keys</h1><p>Iron.</p>"}),
        "e.md": b"# Keys\n\n## Old\n\nRust \xe2\x82\xac.\n",
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    return [tmp_path / name for name in contents]


def test_pool_returns_the_documents_of_the_loaders(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "bad.pdf").write_bytes(b"no PDF")
    pool = ParserPool(DocumentsConfig(num_workers=2))
    try:
        futures = [pool.submit(path) for path in (files[0], tmp_path / "bad.pdf", *files[1:])]
        with pytest.raises(DocumentError, match=r"bad\.pdf: damaged, cut off, or not a PDF"):
            futures.pop(1).result()
        assert [[future.result()] for future in futures] == [list(load(path)) for path in files]
    finally:
        pool.close()


def test_file_over_time_or_memory_limit_fails_and_the_next_file_is_parsed(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "slow.md").write_text(SLOW)
    (tmp_path / "large.html").write_text("<p>a" * 500_000)
    for name, limits, reason in (
        ("slow.md", DocumentsConfig(num_workers=1, timeout_s=1.0), r"took longer than documents\.timeout_s \(1 s\)"),
        ("large.html", DocumentsConfig(num_workers=1, max_reader_bytes=60 << 20, timeout_s=20.0), "needs more memory"),
    ):
        pool = ParserPool(limits)
        try:
            with pytest.raises(DocumentError, match=f"{name}: {reason}"):
                pool.submit(tmp_path / name).result()
            assert not pool._all, "its process was ended"
            assert pool.submit(files[-1]).result().paragraphs
        finally:
            pool.close()


def test_crash_of_a_parsing_process_fails_one_file(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "slow.md").write_text(SLOW)
    pool = ParserPool(DocumentsConfig(num_workers=1))
    try:
        assert pool.submit(files[0]).result().paragraphs
        (process,) = pool._all
        future = pool.submit(tmp_path / "slow.md")
        os.kill(process.pid, signal.SIGSEGV)
        with pytest.raises(DocumentError, match=r"slow\.md: its reader crashed \(SIGSEGV\)"):
            future.result()
        assert pool.submit(files[-1]).result().paragraphs
    finally:
        pool.close()


@pytest.mark.parametrize("ends_at_once", [True, False])
def test_process_that_ends_before_it_is_ready_does_not_fail_the_file(
    files: list[Path], ends_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the process ends before or after it receives its first message
    start = _start_and_end if ends_at_once else _start_and_end_at_first_message
    monkeypatch.setattr("stillroom.retrieval.intake.parsing._start", start)
    pool = ParserPool(DocumentsConfig(num_workers=1))
    try:
        with pytest.raises(ReaderUnavailableError, match=r"a\.pdf: its reader ended"):
            pool.submit(files[0]).result()
        monkeypatch.undo()
        assert pool.submit(files[0]).result().paragraphs
    finally:
        pool.close()


def _start_and_end(descriptor: int) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(["/bin/false"], pass_fds=(descriptor,))
    process.wait()
    return process


def _start_and_end_at_first_message(descriptor: int) -> "subprocess.Popen[bytes]":
    reads_and_ends = f"import os, sys; os.read({descriptor}, 1 << 16); sys.exit(1)"
    return subprocess.Popen([sys.executable, "-c", reads_and_ends], pass_fds=(descriptor,))


def test_failed_process_start_leaks_no_connection(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillroom.retrieval.intake.parsing.sys.executable", "/nowhere/python")
    pool = ParserPool(DocumentsConfig(num_workers=1))
    try:
        num_open = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else None
        for _ in range(3):
            with pytest.raises(ReaderUnavailableError, match="no parsing process could be started"):
                pool.submit(files[0]).result()
        if num_open is not None:
            assert len(os.listdir("/proc/self/fd")) <= num_open
    finally:
        pool.close()


def test_close_cancels_running_files(tmp_path: Path) -> None:
    (tmp_path / "slow.md").write_text(SLOW)
    pool = ParserPool(DocumentsConfig(num_workers=1))
    futures = [pool.submit(tmp_path / "slow.md") for _ in range(3)]
    pool.close()
    pool.close()
    assert all(future.cancelled() or isinstance(future.exception(), DocumentError) for future in futures)
    assert not pool._all
