"""Adding many files of many formats: order, several processes, a reason for each failure."""

import contextlib
import errno
import os
import socket
from itertools import pairwise
from pathlib import Path

import pytest

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.config.settings import StillroomConfig
from stillroom.retrieval.ingest import AddReport
from stillroom.retrieval.loaders import ocr_use
from stillroom.retrieval.loaders.ocr_use import how_to_read
from tests.retrieval.conftest import MakeFile, OpenKb, as_anybody
from tests.retrieval.loaders.make import image_pdf, pdf, word

TWO = StillroomConfig(documents=DocumentsConfig(num_workers=2))


def reasons(report: AddReport) -> dict[str, str]:
    return {Path(path).name: reason for path, reason in report.failures}


def test_folder_of_all_formats_is_added_and_failures_have_reasons(open_kb: OpenKb, docs: Path) -> None:
    for number in range(24):
        (docs / f"{number:02}.txt").write_text(f"Text about subject {number}.")
    (docs / "book.pdf").write_bytes(pdf([[(11, "First page.")], [(11, "All about iron keys.")]]))
    (docs / "letter.docx").write_bytes(word(lambda document: document.add_paragraph("Dear vault,")))
    (docs / "scan.pdf").write_bytes(image_pdf())
    (docs / "secret.pdf").write_bytes(pdf([[(11, "x")]], password="open"))
    (docs / "empty.docx").touch()
    (docs / "old.xls").write_bytes(b"\xd0\xcf\x11\xe0")
    os.mkfifo(docs / "pipe.md")
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(docs):
        listening.bind("socket.md")  # a path from here on: an absolute one may be too long
    (docs / "bad\udcff.md").touch()
    (docs / "loop.md").symlink_to("loop.md")
    (docs / "big.txt").write_text("word " * 20_000)
    (docs / f"{'long' * 62}.txt").write_text("The name of its sidecar would be too long.")
    kb = open_kb(StillroomConfig(documents=DocumentsConfig(num_workers=2, max_text_bytes=1 << 16)))
    report = kb.add([docs])
    assert report.num_added == 27
    assert reasons(report) == {
        "scan.pdf": f"no text on its 1 pages (scanned?); read them by OCR: {how_to_read()}; or add a text layer, for "
        "example with ocrmypdf",
        "secret.pdf": "protected by a password; save it without one",
        "empty.docx": "empty: it has 0 bytes",
        "old.xls": "Stillroom does not read this format; save it as .xlsx",
        "pipe.md": "not a regular file (a pipe, socket or device)",
        "socket.md": "not a regular file (a pipe, socket or device)",
        "loop.md": "not a regular file (a symbolic link that leads to itself)",
        "bad\udcff.md": "the name is not UTF-8; rename the file",
        "big.txt": "more text than documents.max_text_bytes (0.0625 MiB); split it, make it a JSONL file, "
        "or raise the limit",
    }
    best = kb.search("iron keys", mode="sparse").results[0].chunk
    assert (Path(best.document_id).name, best.start_page, best.end_page) == ("book.pdf", 1, 2)
    added = [Path(info.document_id).name for info in sorted(kb.documents(), key=lambda info: info.document_id)]
    assert added == sorted(added)


def test_failed_file_is_parsed_again_when_it_changes(
    open_kb: OpenKb, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docs / "book.pdf").write_bytes(b"%PDF-1.7 unfinished")
    kb = open_kb(TWO)
    assert "damaged" in reasons(kb.add([docs]))["book.pdf"]
    with monkeypatch.context() as patch:
        patch.setattr("stillroom.retrieval.intake.reading.ParserPool", None)  # no process is started for it
        assert "damaged" in reasons(kb.add([docs]))["book.pdf"], "still reported"
    (docs / "book.pdf").write_bytes(pdf([[(11, "Finished.")]]))
    report = kb.add([docs])
    assert (report.num_added, report.failures) == (1, ())
    (docs / "book.pdf").write_bytes(b"%PDF-1.7 broken again")
    assert len(kb.add([docs]).failures) == 1
    assert kb.num_documents == 1, "the indexed version is kept"


def test_file_without_parsing_process_is_parsed_by_the_next_add(
    open_kb: OpenKb, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    (docs / "book.pdf").write_bytes(pdf([[(11, "All about iron keys.")]]))
    kb = open_kb(TWO)
    with monkeypatch.context() as patch:
        patch.setattr("stillroom.retrieval.intake.parsing.subprocess.Popen", refuse)
        report = kb.add([docs])
    assert "no parsing process could be started" in reasons(report)["book.pdf"] and report.is_worth_repeating
    report = kb.add([docs])
    assert (report.num_added, report.failures, report.is_worth_repeating) == (1, (), False)


def test_small_file_with_exponential_parse_time_is_stopped(open_kb: OpenKb, docs: Path) -> None:
    names = [f"a{number}" for number in range(40)]
    twice = "".join(f".. |{name}| replace:: |{inner}| |{inner}|\n" for name, inner in pairwise(names))
    (docs / "twice.rst").write_text(f"{twice}.. |{names[-1]}| replace:: x\n\n|{names[0]}|\n")
    report = open_kb(StillroomConfig(documents=DocumentsConfig(timeout_s=1.0))).add([docs])
    assert reasons(report)["twice.rst"].startswith("took longer than documents.timeout_s")


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_inaccessible_folder_is_reported_and_its_documents_kept(
    open_kb: OpenKb, docs: Path, make_file: MakeFile, mode: int
) -> None:
    for name in ("a.md", "gone.md", "secret/b.md", "secret/deep/c.jsonl"):
        make_file(name, '{"text": "About keys."}')
    (docs / "link").symlink_to(docs / "secret" / "deep")
    kb = open_kb()
    assert kb.add([docs]).num_added == 4
    (docs / "gone.md").unlink()
    make_file("new.md", "About cats.")
    (docs / "secret").chmod(mode)
    try:
        with as_anybody():
            report = kb.add([docs])
            excluded = kb.add([docs], exclude=["secret/"])
    finally:
        (docs / "secret").chmod(0o755)
    assert reasons(report) == {"secret": "cannot be listed: Permission denied"}
    assert (report.num_added, report.num_removed, report.num_unchanged) == (1, 1, 1)
    assert excluded.failures == () and excluded.num_removed == 2
    (docs / "secret" / "b.md").unlink()
    assert kb.add([docs]).num_added == 1, "the removed document is added again"


def test_newly_ignored_file_is_removed(open_kb: OpenKb, docs: Path, make_file: MakeFile) -> None:
    make_file("a.md", "About keys.")
    make_file("drafts/b.md", "About cats.")
    kb = open_kb()
    assert kb.add([docs]).num_added == 2
    make_file(".stillroomignore", "drafts/\n")
    report = kb.add([docs])
    assert (report.num_removed, report.skipped.num_ignored, kb.num_documents) == (1, 1, 1)
    (docs / ".stillroomignore").unlink()
    assert kb.add([docs], exclude=["a.*"]).num_removed == 1
    assert [Path(info.document_id).name for info in kb.documents()] == ["b.md"]


def test_number_of_parsing_processes_does_not_change_the_digest(open_kb: OpenKb, docs: Path) -> None:
    for number in range(20):
        text = f"Number {number}. " + "More of it. " * (400 if number % 3 == 0 else 1)
        (docs / f"{number:02}.pdf").write_bytes(pdf([[(11, line)] for line in text.split(". ")[:5]]))
    digests = set()
    for workers in (1, 3):
        kb = open_kb(StillroomConfig(documents=DocumentsConfig(num_workers=workers)), name=f"kb{workers}")
        assert kb.add([docs]).num_added == 20
        digests.add(kb.digest().value)
    assert len(digests) == 1


@pytest.mark.parametrize("is_installed", [False, True])
def test_ocr_is_installed_only_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, is_installed: bool) -> None:
    monkeypatch.setattr(ocr_use, "find_spec", lambda name: object() if is_installed else None)
    assert ("pip install" in how_to_read()) is not is_installed
    assert "stillroom add --ocr" in how_to_read()
