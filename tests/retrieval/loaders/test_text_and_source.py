"""Plain text, encodings, and the outline that all loaders share."""

from pathlib import Path

import pytest

from stillroom.core.document import Paragraph
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.load_file import load
from stillroom.retrieval.loaders.source import Outline, decode


def test_paragraphs_stand_between_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("\none\ntwo\n\n  \nthree  \n")
    (document,) = load(path)
    assert document.title == "notes"
    assert document.document_id == str(path)
    assert document.paragraphs == (Paragraph("one\ntwo", (), 2, 3), Paragraph("three", (), 6, 6))


def test_byte_order_mark_and_windows_line_ends_are_removed() -> None:
    assert decode(b"\xef\xbb\xbfone\r\ntwo\rthree", "x") == "one\ntwo\nthree"


def test_latin_1_is_read_if_the_text_is_not_utf_8() -> None:
    assert decode("Gr\u00f6\u00dfe".encode(), "x") == "Gr\u00f6\u00dfe"
    assert decode("Gr\u00f6\u00dfe".encode("latin-1"), "x") == "Gr\u00f6\u00dfe"
    with pytest.raises(DocumentError, match="not UTF-8"):
        decode("Gr\u00f6\u00dfe".encode("latin-1"), "x", strict=True)


def test_binary_data_is_refused() -> None:
    with pytest.raises(DocumentError, match="x: binary data"):
        decode(b"abc\0def", "x")


def test_empty_file_is_a_document_without_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.touch()
    assert [document.paragraphs for document in load(path)] == [()]


def test_only_top_heading_is_the_title() -> None:
    outline = Outline()
    outline.heading(1, "Guide", 1)
    outline.paragraph("intro", 2, 2)
    outline.heading(2, "Keys", 3)
    outline.paragraph("turn", 4, 4)
    title, paragraphs = outline.finish("", "file")
    assert title == "Guide"
    assert [paragraph.heading_path for paragraph in paragraphs] == [(), ("Keys",)]


def test_no_title_among_several_top_headings() -> None:
    outline = Outline()
    outline.heading(1, "One", 1)
    outline.paragraph("a", 2, 2)
    outline.heading(1, "Two", 3)
    outline.paragraph("b", 4, 4)
    title, paragraphs = outline.finish("", "file")
    assert title == "file"
    assert [paragraph.heading_path for paragraph in paragraphs] == [("One",), ("Two",)]


def test_heading_without_content_is_text() -> None:
    outline = Outline()
    outline.heading(1, "Title", 1)
    outline.heading(2, "To do", 2)
    outline.heading(2, "Done", 3)
    outline.paragraph("all", 4, 4)
    _, paragraphs = outline.finish("", "file")
    assert paragraphs == (Paragraph("To do", (), 2, 2), Paragraph("all", ("Done",), 4, 4))


def test_heading_that_skips_levels_is_nested() -> None:
    outline = Outline()
    outline.heading(1, "A", 1)
    outline.heading(4, "B", 2)
    outline.paragraph("b", 3, 3)
    outline.heading(2, "C", 4)
    outline.paragraph("c", 5, 5)
    outline.heading(1, "D", 6)
    outline.paragraph("d", 7, 7)
    _, paragraphs = outline.finish("", "file")
    assert [paragraph.heading_path for paragraph in paragraphs] == [("A", "B"), ("A", "C"), ("D",)]
