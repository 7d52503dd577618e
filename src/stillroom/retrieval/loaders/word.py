"""Loader of DOCX: headings by style, blocks in reading order, tables row by row, footnotes after their references.

Tracked deletions are left out, tracked insertions are read. Page numbers are those of Word's last layout; files that
Word never opened have none.
"""

import re
from collections.abc import Iterator, Mapping
from io import BytesIO
from itertools import takewhile
from typing import Any

import docx
from docx.oxml.parser import parse_xml

from stillroom.core.document import Document
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.office import core_metadata, open_package
from stillroom.retrieval.loaders.source import File, Outline, check_text

_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_M = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_HEADING = re.compile(r"heading (\d)\Z", re.IGNORECASE)
_DROPPED = frozenset(
    {f"{_W}{name}" for name in ("del", "moveFrom", "pPr", "rPr", "txbxContent", "instrText", "sectPr", "tblPr", "tcPr")}
    | {"{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"}  # a duplicate for old readers
)
_TEXTS = frozenset({f"{_W}t", f"{_M}t"})
_MARKS = {f"{_W}tab": "\t", f"{_W}br": "\n", f"{_W}cr": "\n", f"{_W}noBreakHyphen": "-"}
_NOTES = {f"{_W}footnoteReference": "footnotes", f"{_W}endnoteReference": "endnotes"}
_PAGE = f"{_W}lastRenderedPageBreak"


def parse_word(file: File) -> Document:
    """Parse a document. The title is a paragraph in style Title, else the document's own, else the only top heading."""
    with open_package(file):
        try:
            document = docx.Document(BytesIO(file.data))
        except (KeyError, ValueError) as error:
            raise DocumentError(f"{file.path}: not a Word document: {error}") from error
    body = document.element.body
    outline = Outline()
    if next(body.iter(_PAGE), None) is not None:
        outline.page = 1
    metadata = core_metadata(document.core_properties)
    blocks = _WordBlocks(file, outline, _Styles(document), _notes(document))
    blocks.read(body)
    own_title = "" if blocks.has_title else str(metadata.get("title", ""))
    title, paragraphs = outline.finish(own_title, file.name)
    return file.document(title, paragraphs, metadata)


class _Styles:
    """Heading levels and list styles, by style id."""

    def __init__(self, document: Any) -> None:
        self.levels: dict[str, int] = {}
        """Heading levels; 0 is the title. Styles of running text are absent."""
        self.lists: set[str] = set()
        bases: dict[str, str] = {}
        for style in document.styles.element.iter(f"{_W}style"):
            style_id, name = str(style.get(f"{_W}styleId")), _value(style, "name").lower()
            match = _HEADING.match(name)
            outline_level = _value(style, "pPr", "outlineLvl")
            if match or name == "title":
                self.levels[style_id] = int(match.group(1)) if match else 0
            elif outline_level.isdigit() and int(outline_level) < 9:
                self.levels[style_id] = int(outline_level) + 1
            else:
                bases[style_id] = _value(style, "basedOn")
            if name.startswith(("list bullet", "list number")):
                self.lists.add(style_id)
        for style_id, base in bases.items():
            seen = {style_id}
            while base in bases and base not in seen:
                seen.add(base)
                base = bases[base]
            if base in self.levels:
                self.levels[style_id] = self.levels[base]


def _value(element: Any, *names: str) -> str:
    """Return `w:val` of a descendant, or ""."""
    for name in names:
        element = element.find(f"{_W}{name}") if element is not None else None
    return str(element.get(f"{_W}val") or "") if element is not None else ""


def _notes(document: Any) -> dict[tuple[str, str], str]:
    """Return the texts of footnotes and endnotes, by kind and id."""
    found: dict[tuple[str, str], str] = {}
    for relation in document.part.rels.values():
        kind = str(relation.reltype).rpartition("/")[2]
        if kind in _NOTES.values() and not relation.is_external:
            for note in parse_xml(relation.target_part.blob):
                if note.get(f"{_W}type") is None:  # not a separator
                    found[kind, str(note.get(f"{_W}id"))] = " ".join("".join(_all_text(note)).split())
    return found


def _all_text(element: Any) -> Iterator[str]:
    """Yield the texts of an element, with a line break after each paragraph."""
    for child in element:
        if child.tag in _TEXTS:
            yield child.text or ""
        elif child.tag in _MARKS:
            yield _MARKS[child.tag]
        elif child.tag not in _DROPPED:
            yield from _all_text(child)
            if child.tag == f"{_W}p":
                yield "\n"


class _WordBlocks:
    """Walks the body in reading order."""

    def __init__(self, file: File, outline: Outline, styles: _Styles, notes: Mapping[tuple[str, str], str]) -> None:
        self.has_title = False
        self._file = file
        self._outline = outline
        self._styles = styles
        self._notes = notes
        self._num_notes = 0
        self._num_bytes = 0
        self._page = outline.page
        """Page of the text that is being read."""

    def read(self, element: Any) -> None:
        """Read the blocks of a body, cell, text box or content control."""
        for child in element:
            if child.tag == f"{_W}p":
                self._read_paragraph(child)
            elif child.tag == f"{_W}tbl":
                self._read_table(child)
            elif child.tag not in _DROPPED:
                self.read(child)

    def _read_paragraph(self, paragraph: Any) -> None:
        referred: list[tuple[str, str]] = []
        parts: list[str] = []
        start_page = self._page
        for part in self._parts(paragraph, referred):
            if not "".join(parts).strip():
                start_page = self._page
            parts.append(part)
        text = "".join(parts).strip()
        self._outline.page = start_page
        level = self._level(paragraph)
        if level is None:
            self._emit("- " + text if text and self._is_item(paragraph) else text, self._page)
        elif text:
            self.has_title |= level == 0
            self._outline.heading(level, text)
        self._read_attached(paragraph, referred)

    def _read_attached(self, element: Any, referred: list[tuple[str, str]]) -> None:
        """Read the notes that an element refers to, and the text boxes in it."""
        for number, key in enumerate(referred, self._num_notes - len(referred) + 1):
            self._emit(f"[{number}] {self._notes[key]}", self._page)
        for box in element.iter(f"{_W}txbxContent"):
            within = takewhile(lambda ancestor: ancestor is not element, box.iterancestors())
            if not any(ancestor.tag in _DROPPED for ancestor in within):
                self.read(box)

    def _parts(self, element: Any, referred: list[tuple[str, str]]) -> Iterator[str]:
        """Yield the texts of a paragraph or cell; update `referred` and the page."""
        for child in element:
            if child.tag in _TEXTS:
                yield child.text or ""
            elif child.tag in _MARKS:
                yield _MARKS[child.tag]
            elif child.tag == _PAGE:
                self._page += 1
            elif child.tag in _NOTES:
                key = (_NOTES[child.tag], str(child.get(f"{_W}id")))
                if key in self._notes:
                    self._num_notes += 1
                    referred.append(key)
                    yield f"[{self._num_notes}]"
            elif child.tag not in _DROPPED:
                yield from self._parts(child, referred)
                if child.tag == f"{_W}p":
                    yield "\n"

    def _level(self, paragraph: Any) -> int | None:
        """Return the heading level, or None for running text."""
        own = _value(paragraph, "pPr", "outlineLvl")
        if own.isdigit():
            return int(own) + 1 if int(own) < 9 else None
        return self._styles.levels.get(_value(paragraph, "pPr", "pStyle"))

    def _is_item(self, paragraph: Any) -> bool:
        """Return whether a paragraph is a list item."""
        is_numbered = paragraph.find(f"{_W}pPr/{_W}numPr") is not None
        return is_numbered or _value(paragraph, "pPr", "pStyle") in self._styles.lists

    def _read_table(self, table: Any) -> None:
        rows = [list(_children(row, "tc")) for row in _children(table, "tr")]
        if all(len(row) == 1 for row in rows):  # a frame around text
            for row in rows:
                self.read(row[0])
            return
        self._outline.page = self._page
        referred: list[tuple[str, str]] = []
        lines = [" | ".join(" ".join("".join(self._parts(cell, referred)).split()) for cell in row) for row in rows]
        self._emit("\n".join(line for line in lines if line.strip(" |")), self._page)
        self._read_attached(table, referred)

    def _emit(self, text: str, end_page: int) -> None:
        self._num_bytes += len(text.encode())
        check_text(self._file.path, self._num_bytes, self._file.config)
        self._outline.paragraph(text, end_page=end_page)


def _children(element: Any, name: str) -> Iterator[Any]:
    """Yield the rows of a table or cells of a row, also in content controls and tracked insertions."""
    for child in element:
        if child.tag == f"{_W}{name}":
            yield child
        elif child.tag not in _DROPPED and child.tag != f"{_W}tbl" and child.tag != f"{_W}p":
            yield from _children(child, name)
