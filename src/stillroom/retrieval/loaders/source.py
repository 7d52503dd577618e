"""What all loaders share: bytes to text, and an outline that turns headings and blocks into paragraphs.

No readable text is dropped: a heading with nothing under it becomes a paragraph itself.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from stillroom.core.document import Paragraph
from stillroom.errors import DocumentError


def read_text(path: Path, *, strict: bool = False) -> str:
    """The text of a file, with universal newlines: UTF-8 (a byte order mark is dropped), else Latin-1.

    Args:
        strict: refuse Latin-1, under which any bytes are text; for files whose name does not say that they are text.

    Raises:
        DocumentError: the file cannot be read, or holds no text.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DocumentError(f"{path}: cannot be read: {error.strerror or error}") from error
    return decode(data, str(path), strict=strict)


def decode(data: bytes, name: str, *, strict: bool = False) -> str:
    """Bytes to text as in `read_text`; `name` is for the error."""
    if b"\0" in data:
        raise DocumentError(f"{name}: binary data, not text; convert it to text, Markdown or HTML first")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if strict:
            raise DocumentError(f"{name}: not UTF-8 text; convert it, or give it a known extension") from error
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def blank_line_paragraphs(text: str, first_line: int = 1) -> list[Paragraph]:
    """Runs of lines between blank lines; `first_line` is the number of the text's first line in its file."""
    paragraphs: list[Paragraph] = []
    run: list[str] = []
    for number, line in enumerate([*text.split("\n"), ""], start=first_line):
        if line.strip():
            run.append(line.rstrip())
        elif run:
            paragraphs.append(Paragraph("\n".join(run), (), number - len(run), number - 1))
            run = []
    return paragraphs


@dataclass(slots=True)
class _Heading:
    level: int
    text: str
    line: int
    is_used: bool = False
    """Something stands under it, so its text is in some heading path."""


class Outline:
    """Collects headings and blocks in reading order; `finish` gives title and paragraphs."""

    def __init__(self) -> None:
        self._open: list[_Heading] = []
        self._all: list[_Heading] = []
        self._paragraphs: list[Paragraph] = []

    def heading(self, level: int, text: str, line: int) -> None:
        """Start a section; `level` 1 is outermost."""
        text = " ".join(text.split())
        if not text:
            return
        self._close(level)
        for outer in self._open:
            outer.is_used = True
        heading = _Heading(level, text, line)
        self._open.append(heading)
        self._all.append(heading)

    def paragraph(self, text: str, start_line: int, end_line: int) -> None:
        """Add a block under the current headings; blank blocks are ignored. Indentation is kept."""
        text = text.strip("\n").rstrip()
        if not text.strip():
            return
        for heading in self._open:
            heading.is_used = True
        path = tuple(heading.text for heading in self._open)
        self._paragraphs.append(Paragraph(text, path, start_line, max(start_line, end_line)))

    def finish(self, title: str, fallback_title: str) -> tuple[str, tuple[Paragraph, ...]]:
        """Title and paragraphs.

        Args:
            title: what the format itself says the title is; empty if it does not. Then a first heading that has no
                equal is the title, and it leaves the heading paths, for they exclude the title.
            fallback_title: for documents with neither.
        """
        self._close(0)
        lone = self._lone_heading()
        if lone is not None and (not title or lone.text.casefold() in title.casefold()):
            return title or lone.text, tuple(_without(lone.text, paragraph) for paragraph in self._paragraphs)
        return title or fallback_title, tuple(self._paragraphs)

    def _lone_heading(self) -> _Heading | None:
        if not self._all or any(other.level <= self._all[0].level for other in self._all[1:]):
            return None
        return self._all[0]

    def _close(self, level: int) -> None:
        """Leave the sections at `level` and deeper."""
        while self._open and self._open[-1].level >= level:
            heading = self._open.pop()
            if not heading.is_used:
                path = tuple(outer.text for outer in self._open)
                self._paragraphs.append(Paragraph(heading.text, path, heading.line, heading.line))


def _without(title: str, paragraph: Paragraph) -> Paragraph:
    if paragraph.heading_path[:1] != (title,):
        return paragraph
    return dataclasses.replace(paragraph, heading_path=paragraph.heading_path[1:])
