"""Markdown (CommonMark with tables): headings become heading paths, blocks become paragraphs, code is kept verbatim."""

import re
from pathlib import Path

from bs4 import BeautifulSoup
from markdown_it import MarkdownIt
from markdown_it.token import Token

from stillroom.core.document import Document
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import Metadata
from stillroom.retrieval.loaders.metadata import front_matter
from stillroom.retrieval.loaders.source import Outline

_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)


def parse_markdown(path: Path, text: str) -> Document:
    """The title is the front matter's, else a first heading without an equal, else the file's name."""
    body, title, metadata = _split_front_matter(text)
    outline = Outline()
    read_markdown(outline, body)
    title, paragraphs = outline.finish(title, path.stem)
    return Document(DocumentId(str(path)), title, paragraphs, metadata=metadata)


def read_markdown(outline: Outline, text: str, *, keep_lines: bool = True) -> None:
    """Add Markdown to an outline; without its lines where it is a part of a file."""
    _Blocks(outline, keep_lines=keep_lines).read(MarkdownIt("commonmark").enable("table").parse(text))


def _split_front_matter(text: str) -> tuple[str, str, Metadata]:
    """The text with its front matter blanked, so that line numbers hold; the title named there, or ""; and the rest."""
    match = _FRONT_MATTER.match(text)
    if match is None:
        return text, "", {}
    return "\n" * match.group().count("\n") + text[match.end() :], *front_matter(match.group(1))


class _Blocks:
    """Reads markdown-it's flat token list into an outline."""

    def __init__(self, outline: Outline, *, keep_lines: bool) -> None:
        self._outline = outline
        self._keep_lines = keep_lines
        self._heading_level = 0
        self._bullet = ""
        """Mark of a list item whose first paragraph has not come yet."""
        self._table: list[list[str]] | None = None

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
                self._outline.paragraph(token.content, *lines)
            case "html_block":
                self._outline.paragraph(_html_text(token.content), *lines)
            case "table_open":
                self._table = []
            case "tr_open" if self._table is not None:
                self._table.append([])
            case "table_close" if self._table is not None:
                rows, self._table = self._table, None
                self._outline.paragraph(
                    "\n".join(" | ".join(row) for row in rows), max(0, lines[0] - len(rows)), lines[1]
                )
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


def _inline_text(token: Token) -> str:
    parts: list[str] = []
    for child in token.children or []:
        if child.type in ("softbreak", "hardbreak"):
            parts.append("\n")
        elif child.type != "html_inline":  # an image's content is its alternative text
            parts.append(child.content)
    return "".join(parts)


def _html_text(markup: str) -> str:
    soup = BeautifulSoup(markup, "html.parser")
    for element in soup(["script", "style"]):
        element.decompose()
    return soup.get_text()
