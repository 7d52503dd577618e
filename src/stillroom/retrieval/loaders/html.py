"""HTML: headings become heading paths, block elements and rows of tables become paragraphs, and each text node is read
exactly once.
"""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from bs4 import BeautifulSoup, XMLParsedAsHTMLWarning
from bs4.element import NavigableString, PageElement, PreformattedString, Tag

from stillroom.core.document import Document
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import Metadata
from stillroom.retrieval.loaders.html_rows import Lines, Row
from stillroom.retrieval.loaders.metadata import named_texts
from stillroom.retrieval.loaders.source import Outline

_DROPPED = frozenset({"script", "style", "nav", "template", "svg", "title"})
INLINE = frozenset(
    {"a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i", "img"}
    | {"ins", "kbd", "label", "mark", "q", "rp", "rt", "ruby", "s", "samp", "small", "span", "strike", "strong", "sub"}
    | {"sup", "time", "tt", "u", "var", "wbr"}
)
"""Elements within a line, even within a word; before and after all others a word ends."""
_TECHNICAL = frozenset(
    {"viewport", "robots", "generator", "theme-color", "color-scheme", "referrer", "format-detection", "csrf-token"}
)
"""Names of `meta` elements that are about the page's technique."""

_CELLS = frozenset({"td", "th"})
_PERMALINKS = frozenset({"headerlink", "header-anchor"})
"""Classes of the links to itself that a heading ends with."""
_MAX_OPEN_TAGS = 100
"""Marks `<` without `>` that are left to the parser."""
_HEADING = re.compile(r"h[1-6]\Z")


def parse_html(path: Path, text: str) -> Document:
    """The title is the title element's, else a first heading without an equal, else the file's name."""
    soup = soup_of(text)
    outline = Outline()
    read_html(outline, soup)
    own = _own_title(soup)
    title, paragraphs = outline.finish(" ".join(own.get_text().split()) if own else "", path.stem)
    return Document(DocumentId(str(path)), title, paragraphs, metadata=_metadata(soup))


def soup_of(text: str) -> BeautifulSoup:
    """The tree of a page; XHTML is read as HTML."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)
        # it would else make one newline of any between two elements, and lines would no longer be those of the file
        return BeautifulSoup(
            _without_open_tags(text), "html.parser", preserve_whitespace_tags={BeautifulSoup.ROOT_TAG_NAME}
        )


def _without_open_tags(text: str) -> str:
    """A page whose marks `<` without `>` are text, where there are many: the parser reads to the end for each."""
    first, *parts = text.split("<")
    if sum(">" not in part for part in parts) <= _MAX_OPEN_TAGS:
        return text
    return first + "".join(("<" if ">" in part else "&lt;") + part for part in parts)


def _own_title(soup: BeautifulSoup) -> Tag | None:
    """The title of the page, not of a drawing in it."""
    num_drawings = 0
    for element, is_end in walk(soup):
        if isinstance(element, Tag) and element.name == "svg":
            num_drawings += -1 if is_end else 1
        elif isinstance(element, Tag) and element.name == "title" and not num_drawings:
            return element
    return None


def read_html(outline: Outline, soup: BeautifulSoup, *, keep_lines: bool = True) -> None:
    """Add a page to an outline; without its lines where it is a part of a file."""
    _HtmlBlocks(outline, keep_lines=keep_lines).read(soup)


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


class _HtmlBlocks:
    """Walks the tree; inline text gathers until a block element begins or ends.

    An element that is not closed, as `<p>`, `<td>` and `<tr>` need not be, holds in the tree all that follows. So a
    cell ends where the next one begins.
    """

    def __init__(self, outline: Outline, *, keep_lines: bool) -> None:
        self._outline = outline
        self._keep_lines = keep_lines
        self._line = 1
        """Where we are in the file."""
        self._run: list[str] = []
        self._run_lines: Lines = (0, 0)
        self._rows = [Row(self._paragraph)]
        """The row that is open in each of the tables around us, innermost last; the first is for rows without table."""
        self._dropped: Tag | None = None
        self._whole: Tag | None = None
        """The heading or `pre` around us, which other elements do not divide."""

    def read(self, root: Tag) -> None:
        for element, is_end in walk(root):
            if isinstance(element, NavigableString):
                self._read_text(element)
            elif isinstance(element, Tag) and is_end:
                self._end(element)
            elif isinstance(element, Tag):
                self._line = element.sourceline or self._line
                self._begin(element)
        self._flush()
        self._rows[0].end()

    def _read_text(self, element: NavigableString) -> None:
        text = str(element)
        if self._dropped is None and not isinstance(element, PreformattedString):
            self._run.append(text)
            if text.strip():
                first = self._line + text[: len(text) - len(text.lstrip())].count("\n")
                self._run_lines = (self._run_lines[0] or first, self._line + text.rstrip().count("\n"))
        self._line += text.count("\n")

    def _begin(self, tag: Tag) -> None:
        if self._dropped is not None:
            return
        if tag.name in _DROPPED or (tag.name == "a" and not _PERMALINKS.isdisjoint(tag.get_attribute_list("class"))):
            self._dropped = tag
        elif tag.name == "br":
            self._run.append("\n")
        elif tag.name in INLINE:
            return
        elif self._whole is not None:
            self._divide(self._whole)
        else:
            self._flush()
            self._begin_block(tag)

    def _begin_block(self, tag: Tag) -> None:
        if tag.name == "pre" or _HEADING.match(tag.name):
            self._whole = tag
        elif tag.name == "li":
            self._run.append("- ")
        elif tag.name == "table":
            self._rows[-1].interrupt()
            self._rows.append(Row(self._paragraph))
        elif tag.name == "tr":
            self._rows[-1].end()
        elif tag.name in _CELLS:
            self._rows[-1].begin_cell()

    def _end(self, tag: Tag) -> None:
        if self._dropped is not None:
            self._dropped = None if tag is self._dropped else self._dropped
        elif self._whole is not None:
            if tag is self._whole:
                self._end_whole(tag)
            elif tag.name not in INLINE and tag.name != "br":
                self._divide(self._whole)
        elif tag.name not in INLINE and tag.name != "br":
            self._flush()
            self._end_block(tag)

    def _end_block(self, tag: Tag) -> None:
        if tag.name == "table":
            self._rows.pop().end()
        elif tag.name == "tr":
            self._rows[-1].end()
        elif tag.name in _CELLS:
            self._rows[-1].end_cell()

    def _divide(self, whole: Tag) -> None:
        """What stands in another block is another word of a heading, another line of a `pre`."""
        if whole.name != "pre":
            self._run.append(" ")
        elif self._run and not self._run[-1].endswith("\n"):
            self._run.append("\n")

    def _end_whole(self, tag: Tag) -> None:
        text, lines = self._take_run()
        self._whole = None
        if not text.strip():
            return
        self._rows[-1].interrupt()
        if tag.name == "pre":
            self._paragraph(text, lines)
        else:
            self._outline.heading(int(tag.name[1]), text, lines[0] if self._keep_lines else 0)

    def _flush(self) -> None:
        raw, lines = self._take_run()
        if lines[0]:  # else there is nothing, or the mark of a list's item alone
            self._rows[-1].add(" ".join(raw.split()), lines)

    def _take_run(self) -> tuple[str, Lines]:
        text, lines = "".join(self._run), self._run_lines
        self._run, self._run_lines = [], (0, 0)
        return text, lines

    def _paragraph(self, text: str, lines: Lines) -> None:
        self._outline.paragraph(text, *(lines if self._keep_lines else (0, 0)))


def walk(root: Tag) -> Iterator[tuple[PageElement, bool]]:
    """All under an element in the order of the file, a tag again at its end. Without recursion: of a page whose
    elements are not closed the tree is as deep as the page is long."""
    open_tags = [(root, iter(root.children))]
    while open_tags:
        tag, children = open_tags[-1]
        for child in children:
            yield child, False
            if isinstance(child, Tag):
                open_tags.append((child, iter(child.children)))
                break
        else:
            open_tags.pop()
            if tag is not root:
                yield tag, True
