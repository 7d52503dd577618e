"""The readable text of one indexed document, and its parts by lines or pages."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stillroom.core.document import Paragraph
from stillroom.core.ids import DocumentId
from stillroom.errors import UsageError


class Span(NamedTuple):
    """Lines or pages from 1, both inclusive; `last` 0 means up to the end, and two zeros mean all."""

    first: int = 0
    last: int = 0

    @property
    def is_all(self) -> bool:
        return self == (0, 0)

    def overlaps(self, first: int, last: int) -> bool:
        return self.is_all or (first <= (self.last or last) and self.first <= last and last > 0)


ALL = Span()


def new_headings(path: tuple[str, ...], before: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """Return the headings that begin between two paragraphs.

    Args:
        path: headings above the second paragraph, outermost first.
        before: headings above the first paragraph.

    Returns:
        The level of the first new heading, from 0, and the new headings.
    """
    if path == before:
        return 0, ()
    shared = next((at for at, pair in enumerate(zip(path, before, strict=False)) if pair[0] != pair[1]), None)
    first = min(len(path), len(before)) if shared is None else shared
    return first, path[first:]


@dataclass(frozen=True, slots=True)
class DocumentContent:
    """Text of a document, as its loader reads it."""

    document_id: DocumentId
    title: str
    paragraphs: tuple[Paragraph, ...]
    source: Literal["file", "index"]
    """`file`: read from the file, which is as it was indexed. `index`: the indexed chunks, one paragraph each."""
    notice: str = ""
    """Why the text does not come from the file; empty if it does."""
    num_lines: int = 0
    """Last line with text; 0 if the format has no lines."""
    num_pages: int = 0
    """0 if the format has no pages."""
    has_file: bool = False
    """Whether the original file is there, as it was indexed."""
    has_page_images: bool = False
    """Whether its pages can be shown as pictures."""

    def part(self, lines: tuple[int, int] = ALL, pages: tuple[int, int] = ALL) -> tuple[Paragraph, ...]:
        """Return the paragraphs that overlap these lines and pages, cut to the lines where the text keeps them.

        Args:
            lines, pages: The first and the last, from 1; (0, 0) are all.

        Raises:
            UsageError: The document has no lines or pages, or fewer than asked for.
        """
        lines, pages = Span(*lines), Span(*pages)
        _check("line", lines, self.num_lines)
        _check("page", pages, self.num_pages)
        return tuple(
            self._cut(paragraph, lines)
            for paragraph in self.paragraphs
            if lines.overlaps(paragraph.start_line, paragraph.end_line)
            and pages.overlaps(paragraph.start_page, paragraph.end_page)
        )

    def numbered_lines(self, paragraph: Paragraph) -> list[tuple[int, str]]:
        """Return the lines of a paragraph with their numbers in the file. Where only the place of the paragraph is
        known, its first line has a number, and the others have 0."""
        is_known = self._keeps_lines(paragraph)
        return [
            (paragraph.start_line + at if is_known or not at else 0, text)
            for at, text in enumerate(paragraph.text.split("\n"))
        ]

    def _keeps_lines(self, paragraph: Paragraph) -> bool:
        """Return whether each line of a paragraph is a line of the file. Chunks join paragraphs and may not be so."""
        return self.source == "file" and paragraph.start_line > 0 and paragraph.keeps_lines

    def _cut(self, paragraph: Paragraph, lines: Span) -> Paragraph:
        """Return the lines of a paragraph that overlap `lines`, or all if its lines are not known."""
        first, last = max(lines.first, paragraph.start_line), min(lines.last or paragraph.end_line, paragraph.end_line)
        is_whole = lines.is_all or (first, last) == (paragraph.start_line, paragraph.end_line)
        if is_whole or not self._keeps_lines(paragraph):
            return paragraph
        kept = paragraph.text.split("\n")[first - paragraph.start_line : last - paragraph.start_line + 1]
        return dataclasses.replace(paragraph, text="\n".join(kept), start_line=first, end_line=last)


def _check(unit: str, span: Span, number: int) -> None:
    if span.is_all:
        return
    if not number:
        raise UsageError(f"this document has no {unit} numbers; ask for the whole document")
    if span.last and span.last < span.first:
        raise UsageError(f"{unit} {span.last} comes before {unit} {span.first}; give the smaller number first")
    if span.first > number:
        raise UsageError(f"{unit} {span.first:,} does not exist: the last {unit} is {number:,}")
