"""HTML: headings become heading paths, block elements become paragraphs, and each text node is read exactly once."""

import re
import warnings
from pathlib import Path

from bs4 import BeautifulSoup, XMLParsedAsHTMLWarning
from bs4.element import NavigableString, PreformattedString, Tag

from stillroom.core.document import Document
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import Metadata
from stillroom.retrieval.loaders.metadata import named_texts
from stillroom.retrieval.loaders.source import Outline

_DROPPED = frozenset({"script", "style", "nav", "template", "svg", "head", "title"})
_INLINE = frozenset(
    {"a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i", "img"}
    | {"ins", "kbd", "label", "mark", "q", "rp", "rt", "ruby", "s", "samp", "small", "span", "strike", "strong", "sub"}
    | {"sup", "time", "tt", "u", "var", "wbr"}
)
_TECHNICAL = frozenset(
    {"viewport", "robots", "generator", "theme-color", "color-scheme", "referrer", "format-detection", "csrf-token"}
)
"""Names of `meta` elements that are about the page's technique."""

_HEADING = re.compile(r"h[1-6]\Z")


def parse_html(path: Path, text: str) -> Document:
    """The title is the title element's, else a first heading without an equal, else the file's name."""
    soup = soup_of(text)
    outline = Outline()
    read_html(outline, soup)
    title = " ".join(soup.title.get_text().split()) if soup.title else ""
    title, paragraphs = outline.finish(title, path.stem)
    return Document(DocumentId(str(path)), title, paragraphs, metadata=_metadata(soup))


def soup_of(text: str) -> BeautifulSoup:
    """The tree of a page; XHTML is read as HTML."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)
        return BeautifulSoup(text, "html.parser")


def read_html(outline: Outline, soup: BeautifulSoup, *, keep_lines: bool = True) -> None:
    """Add a page to an outline; without its lines where it is a part of a file."""
    _Blocks(outline, keep_lines=keep_lines).read(soup)


def _metadata(soup: BeautifulSoup) -> Metadata:
    """What `meta` elements say about the document, by name in small letters. Keywords are a list."""
    pairs: list[tuple[str, str]] = []
    for element in soup("meta"):
        name = str(element.get("name") or element.get("property") or "").strip().lower()
        content = str(element.get("content") or "")
        if name == "keywords":
            pairs += [(name, word) for word in content.split(",")]
        elif name and name not in _TECHNICAL:
            pairs.append((name, content))
    return named_texts(pairs)


class _Blocks:
    """Walks the tree; inline text gathers until a block element begins or ends."""

    def __init__(self, outline: Outline, *, keep_lines: bool) -> None:
        self._outline = outline
        self._keep_lines = keep_lines
        self._run: list[str] = []
        self._line = 1

    def read(self, root: Tag) -> None:
        self._read_children(root)
        self._flush()

    def _read_children(self, element: Tag) -> None:
        for child in element.children:
            if isinstance(child, Tag):
                self._read_tag(child)
            elif isinstance(child, NavigableString) and not isinstance(child, PreformattedString):
                self._run.append(str(child))

    def _read_tag(self, tag: Tag) -> None:
        if tag.name in _DROPPED:
            return
        if tag.name == "br":
            self._run.append("\n")
        elif tag.name in _INLINE:
            self._read_children(tag)
        else:
            self._flush()
            self._line = tag.sourceline or self._line
            self._read_block(tag)
            self._flush()

    def _read_block(self, tag: Tag) -> None:
        if _HEADING.match(tag.name):
            self._outline.heading(int(tag.name[1]), tag.get_text(" "), self._line if self._keep_lines else 0)
        elif tag.name == "pre":
            text = tag.get_text()
            self._paragraph(text, self._line, self._line + text.count("\n"))
        elif tag.name == "tr":
            cells = [" ".join(cell.get_text(" ").split()) for cell in tag(["td", "th"])]
            self._paragraph(" | ".join(cells), self._line, self._line)
        else:
            if tag.name == "li":
                self._run.append("- ")
            self._read_children(tag)

    def _flush(self) -> None:
        raw, self._run = "".join(self._run), []
        text = " ".join(raw.split())
        if text and text != "-":
            self._paragraph(text, self._line, self._line + raw.strip().count("\n"))
        self._line += raw.count("\n")

    def _paragraph(self, text: str, start_line: int, end_line: int) -> None:
        self._outline.paragraph(text, *((start_line, end_line) if self._keep_lines else (0, 0)))
