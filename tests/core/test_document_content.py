"""Parts of a document by lines and pages."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.document import Paragraph
from stillroom.core.document_content import ALL, DocumentContent, Span
from stillroom.core.ids import DocumentId
from stillroom.errors import UsageError

TEXT = DocumentContent(
    DocumentId("a.txt"),
    "a",
    (Paragraph("one\ntwo", (), 1, 2), Paragraph("four\nfive\nsix", (), 4, 6), Paragraph("joined", (), 8, 9)),
    "file",
    num_lines=9,
)
PDF = DocumentContent(
    DocumentId("a.pdf"),
    "a",
    (Paragraph("first", (), 0, 0, 1, 1), Paragraph("on both", (), 0, 0, 1, 2), Paragraph("last", (), 0, 0, 4, 4)),
    "file",
    num_pages=4,
)


def texts(content: DocumentContent, lines: Span = ALL, pages: Span = ALL) -> list[str]:
    return [paragraph.text for paragraph in content.part(lines, pages)]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (Span(), ["one\ntwo", "four\nfive\nsix", "joined"]),
        (Span(2, 5), ["two", "four\nfive"]),
        (Span(5, 5), ["five"]),
        (Span(3, 3), []),
        (Span(6, 0), ["six", "joined"]),
        (Span(0, 1), ["one"]),
        (Span(9, 9), ["joined"]),  # the text does not keep its two lines
    ],
)
def test_paragraphs_are_cut_to_the_lines_asked_for(lines: Span, found: list[str]) -> None:
    assert texts(TEXT, lines) == found


def test_pages_select_paragraphs_that_touch_them() -> None:
    assert [texts(PDF, pages=Span(page, page)) for page in (1, 2, 3, 4)] == [
        ["first", "on both"],
        ["on both"],
        [],
        ["last"],
    ]


@pytest.mark.parametrize(
    ("content", "lines", "pages", "message"),
    [
        (TEXT, Span(10, 12), Span(), "the last line is 9"),
        (TEXT, Span(4, 3), Span(), "comes before"),
        (TEXT, Span(), Span(1, 1), "no page numbers"),
        (PDF, Span(1, 1), Span(), "no line numbers"),
    ],
)
def test_places_that_do_not_exist_are_explained(
    content: DocumentContent, lines: Span, pages: Span, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        content.part(lines, pages)


def test_joined_chunks_are_never_cut_by_lines() -> None:
    chunk = Paragraph("one\n\nafter a gap of unknown size", (), 1, 3)
    indexed = replace(TEXT, source="index", paragraphs=(chunk,), num_lines=3)

    assert texts(indexed, Span(2, 2)) == [chunk.text]
    assert [number for number, _ in indexed.numbered_lines(chunk)] == [1, 0, 0]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_every_line_of_the_file_is_in_exactly_one_single_line_part(sizes: list[int], data: st.DataObject) -> None:
    paragraphs, line = [], 1
    for size in sizes:
        paragraphs.append(Paragraph("\n".join(f"line {line + at}" for at in range(size)), (), line, line + size - 1))
        line += size + data.draw(st.integers(0, 2))
    content = replace(TEXT, paragraphs=tuple(paragraphs), num_lines=paragraphs[-1].end_line)

    parts = [content.part(Span(at, at)) for at in range(1, content.num_lines + 1)]
    shown = [pair for part in parts for paragraph in part for pair in content.numbered_lines(paragraph)]

    assert [text for _, text in shown] == [text for p in paragraphs for text in p.text.split("\n")]
    assert all(text == f"line {number}" for number, text in shown)
