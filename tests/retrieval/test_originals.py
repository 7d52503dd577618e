"""Documents are read again from files that hold what was indexed, and from the index otherwise."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.core.cancellation import Cancellation
from stillroom.core.document_content import DocumentContent, Span
from stillroom.core.ids import DocumentId
from stillroom.errors import (
    ChangeCancelledError,
    DocumentError,
    OriginalGoneError,
    UnknownDocumentError,
    UsageError,
)
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.loaders.load_file import load
from stillroom.retrieval.originals import Originals
from stillroom.retrieval.store.document_names import DocumentNames, documents_like
from stillroom.retrieval.uploads import Uploads
from tests.retrieval.conftest import OpenKb
from tests.retrieval.loaders import make

GUIDE = "# Guide\n\nRead this.\n\n## Keys\n\nRotate them\nevery month.\n"
RECORDS = '{"_id": "a/1", "title": "One", "text": "First.\\n\\nSecond."}\n{"_id": "b", "text": "Third."}\n'
PDF = make.pdf([[(20, "Report"), (10, "Rotate the keys.")], [(10, "Lock the vault.")]])
HTML = "<html><body><h1>Bread</h1><p>Bake it.</p><script>alert(1)</script></body></html>"


@pytest.fixture
def kb(open_kb: OpenKb) -> KnowledgeBase:
    return open_kb()


@pytest.fixture
def originals(kb: KnowledgeBase) -> Originals:
    return Originals(kb.corpus, DocumentsConfig())


@pytest.fixture
def add(kb: KnowledgeBase, docs: Path) -> Callable[[str, str | bytes], DocumentId]:
    """Writes a file, adds it and returns its path as an id."""

    def add(name: str, content: str | bytes) -> DocumentId:
        path = docs / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        assert not kb.add([path]).failures
        return DocumentId(str(path))

    return add


Add = Callable[[str, str | bytes], DocumentId]


def texts(content: DocumentContent) -> list[str]:
    return [paragraph.text for paragraph in content.paragraphs]


@pytest.mark.parametrize(
    ("name", "content"),
    [("guide.md", GUIDE), ("page.html", HTML), ("notes.txt", "one\ntwo\n\nthree\n"), ("report.pdf", PDF)],
)
def test_text_is_what_the_loader_reads(originals: Originals, add: Add, name: str, content: str | bytes) -> None:
    document_id = add(name, content)
    [document] = load(Path(document_id))

    shown = originals.content(document_id)

    assert (shown.paragraphs, shown.title, shown.source, shown.notice) == (
        document.paragraphs,
        document.title,
        "file",
        "",
    )
    assert shown.has_file and shown.has_page_images == name.endswith(".pdf")
    assert (shown.num_lines > 0, shown.num_pages) == (not name.endswith(".pdf"), 2 if name.endswith(".pdf") else 0)


def test_records_are_read_from_their_line(originals: Originals, add: Add) -> None:
    path = add("records.jsonl", RECORDS)

    first, second = (originals.content(DocumentId(f"{path}#{record}")) for record in ("a/1", "b"))

    assert (texts(first), first.title, first.source) == (["First.", "Second."], "One", "file")
    assert (texts(second), second.num_lines) == (["Third."], 2)
    Path(path).write_text("\n" + RECORDS, encoding="utf-8")  # the records are on other lines now
    assert originals.content(DocumentId(f"{path}#b")).source == "index"
    with pytest.raises(OriginalGoneError, match="changed"), originals.file(DocumentId(f"{path}#b")):
        pass


def test_metadata_given_with_add_does_not_hide_the_file(kb: KnowledgeBase, originals: Originals, docs: Path) -> None:
    path = docs / "guide.md"
    path.write_text("---\nauthor: Anna\nyear: 2024\n---\n" + GUIDE, encoding="utf-8")
    (docs / "guide.md.metadata.json").write_text('{"team": "legal"}', encoding="utf-8")
    kb.add([path], metadata={"year": 2025, "author": None})

    assert originals.content(DocumentId(str(path))).source == "file"


@pytest.mark.parametrize("change", ["removed", "edited", "same size", "folder"])
def test_index_is_shown_without_the_indexed_file(originals: Originals, add: Add, change: str) -> None:
    document_id = add("guide.md", GUIDE)
    path = Path(document_id)
    assert originals.content(document_id).source == "file"
    path.unlink()
    if change == "edited":
        path.write_text("secret", encoding="utf-8")
    elif change == "same size":
        path.write_text(GUIDE.replace("month", "night"), encoding="utf-8")
    elif change == "folder":
        path.mkdir()

    shown = originals.content(document_id)

    assert texts(shown) == ["Read this.", "Rotate them\nevery month."]
    assert [(p.heading_path, p.start_line, p.end_line) for p in shown.paragraphs] == [((), 3, 3), (("Keys",), 7, 8)]
    expected = {"removed": "no longer there", "folder": "not a regular file|cannot be read"}.get(change, "has changed")
    assert shown.source == "index" and not shown.has_file
    assert any(one in shown.notice for one in expected.split("|"))
    with pytest.raises(DocumentError), originals.file(document_id):
        pass


def test_link_that_leads_elsewhere_now_shows_nothing_of_its_target(originals: Originals, add: Add) -> None:
    document_id = add("guide.md", GUIDE)
    path = Path(document_id)
    other = path.with_name("secret.md")
    other.write_text("# Secret\n\nThe password.\n", encoding="utf-8")
    path.unlink()
    path.symlink_to(other)

    assert "password" not in str(originals.content(document_id))
    with pytest.raises(OriginalGoneError), originals.file(document_id):
        pass


def test_file_that_is_swapped_while_it_is_parsed_is_not_shown(
    originals: Originals, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    document_id = add("guide.md", GUIDE)

    def swapped(path: Path, *_: object) -> object:
        path.write_text("# Secret\n\nThe password.\n", encoding="utf-8")
        return next(load(path))

    monkeypatch.setattr("stillroom.retrieval.originals._parse", swapped)

    shown = originals.content(document_id)

    assert shown.source == "index" and "password" not in str(shown)


def test_file_that_exceeds_the_limits_now_is_a_notice(kb: KnowledgeBase, add: Add) -> None:
    document_id = add("rows.csv", "name,days\n" + "cellar,30\n" * 50)

    shown = Originals(kb.corpus, DocumentsConfig(max_paragraphs=10)).content(document_id)

    assert shown.source == "index" and "documents.max_paragraphs" in shown.notice and shown.paragraphs


def test_upload_is_read_below_the_knowledge_base(kb: KnowledgeBase, originals: Originals) -> None:
    uploads = Uploads(kb)
    uploads.add([("notes/guide.md", io.BytesIO(GUIDE.encode()))])

    with originals.file(DocumentId("uploads/notes/guide.md")) as file:
        assert (file.name, file.stream.read()) == ("guide.md", GUIDE.encode())
    uploads.remove("notes/guide.md")
    for call in (originals.content, lambda one: originals.file(one).__enter__()):
        with pytest.raises(UnknownDocumentError):
            call(DocumentId("uploads/notes/guide.md"))


@pytest.mark.parametrize("name", ["/etc/hostname", "../kb/corpus.sqlite3", "uploads/../corpus.sqlite3", "", "\0"])
def test_paths_that_were_not_added_are_unknown(originals: Originals, name: str) -> None:
    with pytest.raises(UnknownDocumentError):
        originals.content(DocumentId(name))


def test_large_file_is_parsed_once(originals: Originals, add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    document_id = add("report.pdf", PDF)
    assert [p.text for p in originals.content(document_id).part(pages=Span(2, 2))] == ["Lock the vault."]

    monkeypatch.setattr("stillroom.retrieval.originals._parse", None)
    assert originals.content(document_id).source == "file"


def test_cancelled_reading_ends(originals: Originals, add: Add) -> None:
    document_id, stop = add("report.pdf", PDF), Cancellation()
    stop.cancel()
    with pytest.raises(ChangeCancelledError):
        originals.content(document_id, stop)
    with pytest.raises(ChangeCancelledError):
        originals.page_image(document_id, 1, 200, stop)


def test_text_from_ocr_is_shown_as_indexed_with_its_file_and_pages(
    kb: KnowledgeBase, originals: Originals, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = docs / "report.pdf"
    path.write_bytes(PDF)
    kb.add([path], metadata={"num_ocr_pages": 1})  # as the loader sets it
    monkeypatch.setattr("stillroom.retrieval.originals._parse", None)  # OCR would take seconds per page
    content = originals.content(DocumentId(str(path)))
    assert (content.source, content.has_file, content.has_page_images) == ("index", True, True)
    assert "OCR read it" in content.notice and content.num_pages == 2
    (part,) = content.part(pages=(2, 2))
    assert "Lock the vault." in part.text
    path.unlink()
    assert not originals.content(DocumentId(str(path))).has_file


def test_page_of_a_pdf_is_a_png_of_that_width(originals: Originals, add: Add) -> None:
    png = originals.page_image(add("report.pdf", PDF), 2, 300)

    assert png.startswith(b"\x89PNG\r\n\x1a\n") and int.from_bytes(png[16:20], "big") == 300


def test_very_long_page_is_drawn_smaller(originals: Originals, add: Add) -> None:
    from reportlab.pdfgen.canvas import Canvas

    target = io.BytesIO()
    canvas = Canvas(target, pagesize=(20, 14_000))
    canvas.drawString(0, 100, "x")
    canvas.save()

    png = originals.page_image(add("long.pdf", target.getvalue()), 1, 2400)

    width, height = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
    assert 0 < width < 300 and width * height < 13_000_000


def test_pages_that_cannot_be_drawn_are_explained(kb: KnowledgeBase, originals: Originals, add: Add) -> None:
    pdf, guide = add("report.pdf", PDF), add("guide.md", GUIDE)

    with pytest.raises(UnknownDocumentError, match="page 3 does not exist"):
        originals.page_image(pdf, 3, 300)
    with pytest.raises(UnknownDocumentError, match="not a PDF"):
        originals.page_image(guide, 1, 300)
    with pytest.raises(UsageError, match="width=9999"):
        originals.page_image(pdf, 1, 9999)
    for num_bytes in (1, 2**19, 2**20, 2**22):  # the libraries fit in part
        with pytest.raises(DocumentError, match="max_reader_bytes"):
            Originals(kb.corpus, DocumentsConfig(max_reader_bytes=num_bytes)).page_image(pdf, 1, 300)
    with pytest.raises(DocumentError, match="timeout_s"):
        Originals(kb.corpus, DocumentsConfig(timeout_s=1e-9)).page_image(pdf, 1, 300)
    os.truncate(pdf, 10)
    with pytest.raises(OriginalGoneError):
        originals.page_image(pdf, 1, 300)


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("/docs/guide.md", ["/docs/guide.md"]),
        ("guide.md", ["/docs/guide.md", "/old/guide.md"]),
        ("docs/guide.md", ["/docs/guide.md"]),
        ("GUIDE.md", ["/docs/guide.md", "/old/guide.md"]),
        ("gui", ["/docs/guide.md", "/old/guide.md"]),
        ("notes/keys.md", ["uploads/notes/keys.md"]),
        ("records.jsonl", ["/docs/records.jsonl#1", "/docs/records.jsonl#a/2"]),
        ("records.jsonl#1", ["/docs/records.jsonl#1"]),
        ("a/2", ["/docs/records.jsonl#a/2"]),
        ("uide", ["/docs/guide.md", "/old/guide.md"]),
        ("nothing", []),
        ("", []),
    ],
)
def test_short_names_find_documents(target: str, found: list[str]) -> None:
    known = [
        "/docs/guide.md",
        "/docs/records.jsonl#1",
        "/docs/records.jsonl#a/2",
        "/old/guide.md",
        "uploads/notes/keys.md",
    ]

    assert documents_like(target, [DocumentId(one) for one in known], DocumentNames(Path("/kb"))) == found


def test_changed_files_are_named_in_warnings(originals: Originals, add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    guide, report, records = add("guide.md", GUIDE), add("report.md", "# Report\n"), add("records.jsonl", RECORDS)
    names = [guide, report, guide, records, DocumentId("unknown")]
    assert originals.warnings(names) == ()
    os.utime(report)  # other times, the same bytes
    Path(guide).write_text("# Guide\n\nBurn this.\n", encoding="utf-8")
    [warning] = originals.warnings(names)
    assert warning.startswith(f"{guide}: the file has changed since it was indexed")
    monkeypatch.setattr("stillroom.retrieval.originals._MAX_CHECKED_BYTES", 10)
    assert originals.warnings(names) == (), "large files are not read for a warning"
    monkeypatch.undo()
    Path(guide).unlink()
    assert originals.warnings(names) == ()
