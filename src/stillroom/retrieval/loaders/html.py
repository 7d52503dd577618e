"""Loader of HTML: headings become heading paths, block elements and table rows become paragraphs.

Each text node is read exactly once.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from bs4 import BeautifulSoup, XMLParsedAsHTMLWarning
from bs4.element import NavigableString, PageElement, PreformattedString, Tag

from stillroom.core.document import Document
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import Metadata
from stillroom.retrieval.loaders.document_metadata import text_metadata
from stillroom.retrieval.loaders.source import Outline

_DROPPED = frozenset({"script", "style", "nav", "template", "svg", "title"})
INLINE = frozenset(
    {"a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i", "img"}
    | {"ins", "kbd", "label", "mark", "q", "rp", "rt", "ruby", "s", "samp", "small", "span", "strike", "strong", "sub"}
    | {"sup", "time", "tt", "u", "var", "wbr"}
)
"""Elements that may stand within a word; every other element ends a word."""
_TECHNICAL = frozenset(
    {"viewport", "robots", "generator", "theme-color", "color-scheme", "referrer", "format-detection", "csrf-token"}
)
"""`meta` elements that do not describe the document."""

_CELLS = frozenset({"td", "th"})
_PERMALINKS = frozenset({"headerlink", "header-anchor"})
"""Classes of the self links at the end of headings."""
_MAX_OPEN_TAGS = 100
"""Above this number, `<` without `>` is escaped before parsing: the parser's time is quadratic in them."""
_HEADING = re.compile(r"h[1-6]\Z")

_Lines = tuple[int, int]
"""First and last line of a text in its file; (0, 0) without text."""


def parse_html(path: Path, text: str) -> Document:
    """Parse a page. The title is the title element's, else the only top heading, else the file name."""
    soup = soup_of(text)
    outline = Outline()
    read_html(outline, soup)
    own = _own_title(soup)
    title, paragraphs = outline.finish(" ".join(own.get_text().split()) if own else "", path.stem)
    return Document(DocumentId(str(path)), title, paragraphs, metadata=_metadata(soup))


def soup_of(text: str) -> BeautifulSoup:
    """Parse a page into a tree; XHTML is read as HTML."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)
        # without preserve_whitespace_tags, newlines between elements collapse and line numbers are wrong
        return BeautifulSoup(
            _without_open_tags(text), "html.parser", preserve_whitespace_tags={BeautifulSoup.ROOT_TAG_NAME}
        )


def _without_open_tags(text: str) -> str:
    """Escape each `<` without `>` if there are more than `_MAX_OPEN_TAGS`."""
    first, *parts = text.split("<")
    if sum(">" not in part for part in parts) <= _MAX_OPEN_TAGS:
        return text
    return first + "".join(("<" if ">" in part else "&lt;") + part for part in parts)


def _own_title(soup: BeautifulSoup) -> Tag | None:
    """Return the page's title element, not an SVG's."""
    num_drawings = 0
    for element, is_end in walk(soup):
        if isinstance(element, Tag) and element.name == "svg":
            num_drawings += -1 if is_end else 1
        elif isinstance(element, Tag) and element.name == "title" and not num_drawings:
            return element
    return None


def read_html(outline: Outline, soup: BeautifulSoup, *, keep_lines: bool = True) -> None:
    """Add a page to an outline. Precondition: `keep_lines` is false if the page is only a part of its file."""
    _HtmlBlocks(outline, keep_lines=keep_lines).read(soup)


def _metadata(soup: BeautifulSoup) -> Metadata:
    """Return the `meta` elements about the document, by lower-case name. Keywords are a list."""
    pairs: list[tuple[str, str]] = []
    for element in soup("meta"):
        name = str(element.get("name") or element.get("property") or "").strip().lower()
        content = str(element.get("content") or "")
        if name == "keywords":
            pairs += [(name, word) for word in content.split(",")]
        elif name and name not in _TECHNICAL:
            pairs.append((name, content))
    return text_metadata(pairs)


class _HtmlBlocks:
    """Walks the tree and collects inline text until a block element begins or ends.

    In the tree, an unclosed element (`<p>`, `<td>`, `<tr>`) contains everything after it. So a cell ends where the next
    cell begins.
    """

    def __init__(self, outline: Outline, *, keep_lines: bool) -> None:
        self._outline = outline
        self._keep_lines = keep_lines
        self._line = 1
        """Line of the node that is being read."""
        self._run: list[str] = []
        self._run_lines: _Lines = (0, 0)
        self._rows = [_TableRow(self._paragraph)]
        """The open row of each enclosing table, innermost last; the first is for rows outside tables."""
        self._dropped: Tag | None = None
        """The enclosing element whose text is not read."""
        self._whole: Tag | None = None
        """The enclosing heading or `pre`; other elements in it do not end a paragraph."""

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
            self._rows.append(_TableRow(self._paragraph))
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
        """Separate the text of two blocks: by a space in a heading, by a line break in a `pre`."""
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
        if lines[0]:  # otherwise there is no text, or only a list bullet
            self._rows[-1].add(" ".join(raw.split()), lines)

    def _take_run(self) -> tuple[str, _Lines]:
        text, lines = "".join(self._run), self._run_lines
        self._run, self._run_lines = [], (0, 0)
        return text, lines

    def _paragraph(self, text: str, lines: _Lines) -> None:
        self._outline.paragraph(text, *(lines if self._keep_lines else (0, 0)))


def walk(root: Tag) -> Iterator[tuple[PageElement, bool]]:
    """Yield all nodes below an element in file order, a tag again (True) at its end.

    Not recursive: a page of unclosed elements is as deep as it is long.
    """
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


class _TableRow:
    """Collects the cells of a table row into one paragraph: `Key | Days`.

    A cell with several blocks, as in layout tables, is read as separate paragraphs, after a paragraph of the cells
    before it.
    """

    def __init__(self, paragraph: Callable[[str, _Lines], None]) -> None:
        """`paragraph` receives complete texts in reading order."""
        self._paragraph = paragraph
        self._cells: list[str] = []
        self._lines: _Lines = (0, 0)
        self._text = ""
        self._text_lines: _Lines = (0, 0)
        self._is_in_cell = False
        self._is_divided = False
        """Whether the open cell is read as separate paragraphs."""

    def begin_cell(self) -> None:
        self.end_cell()
        self._is_in_cell = True

    def add(self, text: str, lines: _Lines) -> None:
        """Add a text of the open cell, or outside any cell."""
        if self._is_in_cell and not self._is_divided and not self._text:
            self._text, self._text_lines = text, lines
        else:
            self.interrupt()
            self._paragraph(text, lines)

    def interrupt(self) -> None:
        """Flush the row before a second block of the open cell."""
        self._give_cells()
        if self._text:
            self._paragraph(self._text, self._text_lines)
            self._text = ""
        self._is_divided = self._is_in_cell

    def end_cell(self) -> None:
        """End the open cell, if there is one."""
        if self._is_in_cell and not self._is_divided:
            self._cells.append(self._text)
            if self._text:
                self._lines = (self._lines[0] or self._text_lines[0], self._text_lines[1])
        self._text = ""
        self._is_in_cell = self._is_divided = False

    def end(self) -> None:
        """End the row."""
        self.end_cell()
        self._give_cells()

    def _give_cells(self) -> None:
        if any(self._cells):
            self._paragraph(" | ".join(self._cells), self._lines)
        self._cells, self._lines = [], (0, 0)
