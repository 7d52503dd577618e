"""Loader of Markdown (CommonMark with tables): headings become heading paths, blocks paragraphs, code is verbatim."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from bs4.element import CData, NavigableString, Tag
from markdown_it import MarkdownIt
from markdown_it.token import Token

from stillroom.core.document import Document
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import Metadata
from stillroom.retrieval.loaders.document_metadata import front_matter
from stillroom.retrieval.loaders.html import INLINE, soup_of, walk
from stillroom.retrieval.loaders.source import Outline

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)

_TAG = re.compile(r"</?([A-Za-z][A-Za-z0-9-]*)")


def parse_markdown(path: Path, text: str) -> Document:
    """Parse Markdown. The title is the front matter's, else the only top heading, else the file name."""
    body, title, metadata = _split_front_matter(text)
    outline = Outline()
    read_markdown(outline, body)
    title, paragraphs = outline.finish(title, path.stem)
    return Document(DocumentId(str(path)), title, paragraphs, metadata=metadata)


def read_markdown(outline: Outline, text: str, *, keep_lines: bool = True) -> None:
    """Add Markdown to an outline. Precondition: `keep_lines` is false if the text is only a part of its file."""
    _MarkdownBlocks(outline, keep_lines=keep_lines).read(MarkdownIt("commonmark").enable("table").parse(text))


def _split_front_matter(text: str) -> tuple[str, str, Metadata]:
    """Return the text with its front matter blanked (line numbers hold), the front matter's title or "", and its other
    fields."""
    match = _FRONT_MATTER.match(text)
    if match is None:
        return text, "", {}
    return "\n" * match.group().count("\n") + text[match.end() :], *front_matter(match.group(1))


class _MarkdownBlocks:
    """Reads markdown-it's flat token list into an outline."""

    def __init__(self, outline: Outline, *, keep_lines: bool) -> None:
        self._outline = outline
        self._keep_lines = keep_lines
        self._heading_level = 0
        self._bullet = ""
        """Bullet for the next paragraph, the first one of a list item."""
        self._table: list[list[str]] | None = None
        self._table_lines = (0, 0)

    def read(self, tokens: list[Token]) -> None:
        lines = (1, 1) if self._keep_lines else (0, 0)
        for token in tokens:
            if token.map is not None and self._keep_lines:
                lines = (token.map[0] + 1, token.map[1])
            self._read_token(token, lines)

    def _read_token(self, token: Token, lines: tuple[int, int]) -> None:
        match token.type:
            case "heading_open":
                self._heading_level = int(token.tag[1:])
            case "heading_close":
                self._heading_level = 0
            case "list_item_open":
                self._bullet = f"{token.info}{token.markup} " if token.info else "- "
            case "inline":
                self._read_inline(_inline_text(token), lines)
            case "fence" | "code_block":
                self._outline.paragraph(token.content, *_code_lines(token, lines))
            case "html_block":
                self._outline.paragraph(_html_text(token.content), *lines)
            case "table_open":
                self._table, self._table_lines = [], lines
            case "tr_open" if self._table is not None:
                self._table.append([])
            case "table_close" if self._table is not None:
                rows, self._table = [" | ".join(row) for row in self._table], None
                # the empty line stands for the line of dashes, so that line numbers hold
                self._outline.paragraph("\n".join([rows[0], "", *rows[1:]]), *self._table_lines)
            case _:
                pass

    def _read_inline(self, text: str, lines: tuple[int, int]) -> None:
        if self._heading_level:
            self._outline.heading(self._heading_level, text, lines[0])
        elif self._table is not None:
            self._table[-1].append(text)
        else:
            self._outline.paragraph(self._bullet + text, *lines)
            self._bullet = ""


def _code_lines(token: Token, lines: tuple[int, int]) -> tuple[int, int]:
    """Return the lines of a code block without its fences; (0, 0) without line numbers."""
    is_fenced = token.type == "fence" and lines[0] > 0
    return (lines[0] + 1, lines[0] + token.content.count("\n")) if is_fenced else lines


def _inline_text(token: Token) -> str:
    return _joined(_inline_parts(token))


def _inline_parts(token: Token) -> Iterator[str | None]:
    for child in token.children or []:
        if child.type in ("softbreak", "hardbreak"):
            yield "\n"
        elif child.type != "html_inline":  # for an image, the alternative text
            yield child.content
        elif (tag := _TAG.match(child.content)) and tag.group(1).lower() not in INLINE:
            yield None


def _html_text(markup: str) -> str:
    soup = soup_of(markup)
    for element in soup(["script", "style"]):
        element.decompose()
    return _joined(_html_parts(soup))


def _html_parts(soup: Tag) -> Iterator[str | None]:
    for element, _ in walk(soup):
        if isinstance(element, Tag) and element.name not in INLINE:
            yield None
        elif isinstance(element, CData) or type(element) is NavigableString:  # not comments and declarations
            yield str(element)


def _joined(parts: Iterable[str | None]) -> str:
    """Join texts; None between two words becomes a space, never a line break."""
    text: list[str] = []
    is_separated = False
    for part in parts:
        if part is None:
            is_separated = True
        elif part:
            if is_separated and text and not text[-1][-1].isspace() and not part[0].isspace():
                text.append(" ")
            text.append(part)
            is_separated = False
    return "".join(text)
