"""`stillroom show` with a fake Stillroom, and with a real PDF."""

from pathlib import Path

import pytest

from stillroom.core.document import Paragraph
from stillroom.core.document_content import DocumentContent
from stillroom.core.ids import DocumentId
from tests.cli.harness import Opened, Run
from tests.server.fakes import FakeStillroom


@pytest.fixture(autouse=True)
def texts(opened: Opened, fake: FakeStillroom) -> None:
    fake.texts = {
        "/docs/guide.md": "one\ntwo\nthree\nfour",
        "/old/guide.md": "old",
        "/docs/odd:7": "odd",
        "uploads/keys.md": "k",
    }


def test_text_has_line_numbers_and_headings(run: Run) -> None:
    result = run("show", "docs/guide.md")

    assert result.out.split("\n") == [
        "/docs/guide.md  /docs/guide", "", "# Rotation", " 1  one", "", " 2  two", "", " 3  three", "", " 4  four", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ("2", [" 2  two"]),
        ("L2-L3", [" 2  two", " 3  three"]),
        ("2-3", [" 2  two", " 3  three"]),
        ("4-99", [" 4  four"]),
    ],
)
def test_lines_are_selected(run: Run, lines: str, shown: list[str]) -> None:
    out = run("show", f"docs/guide.md:{lines}").out

    assert [line for line in out.split("\n")[3:] if line] == shown


def test_context_is_printed_around_marked_lines(run: Run) -> None:
    out = run("show", "docs/guide.md:3", "--context", 1).out

    assert [line for line in out.split("\n")[3:] if line] == [" 2  two", ">3  three", " 4  four"]


def test_name_that_ends_like_lines_is_a_name(run: Run) -> None:
    assert "odd" in run("show", "odd:7").out.split("\n")[-2]


def test_json_has_the_part_and_the_place(run: Run) -> None:
    found = run("show", "docs/guide.md:2", "--json").json

    assert (found["document"], found["num_lines"], found["source"]) == ("/docs/guide.md", 4, "file")
    assert [(one["text"], one["start_line"]) for one in found["paragraphs"]] == [("two", 2)]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("guide.md", "'guide.md' may be any of 2 documents; name one:\n  /docs/guide.md\n  /old/guide.md"),
        ("guide.md:3", "may be any of 2 documents"),
        ("giude.md", "no document has the name 'giude.md'; did you mean"),
        ("zzz", "see `stillroom list`"),
        ("docs/guide.md:9", "line 9 does not exist: the last line is 4"),
        ("docs/guide.md:3-2", "comes before"),
        ("docs/guide.md:p3", "no page numbers"),
    ],
)
def test_errors_name_what_to_do(run: Run, document: str, message: str) -> None:
    result = run("show", document)

    assert result.code == 2 and message in result.err and not result.out


def test_pages_and_notices_are_shown(run: Run, fake: FakeStillroom, monkeypatch: pytest.MonkeyPatch) -> None:
    paragraphs = (Paragraph("First.\x1b[2J", (), 0, 0, 1, 1), Paragraph("Second.", ("Keys",), 0, 0, 2, 2))
    content = DocumentContent(
        DocumentId("/docs/r.pdf"), "Report", paragraphs, "index", "text as indexed: the file is gone", num_pages=2
    )
    fake.texts = {"/docs/r.pdf": ""}
    monkeypatch.setattr(fake, "document_content", lambda *_: content)

    whole, page = run("show", "r.pdf"), run("show", "r.pdf:p2")

    assert whole.err == "text as indexed: the file is gone\n" and "\x1b" not in whole.out
    assert page.out == "/docs/r.pdf  Report\n\n-- page 2 --\n# Keys\nSecond.\n"
    assert run("show", "r.pdf, p. 2").out == page.out


def test_source_of_an_answer_is_an_argument_of_show(run: Run, tmp_path: Path) -> None:
    from stillroom.cli.console import place

    assert run("show", place("/docs/guide.md", (2, 3), (0, 0))).code == 0
