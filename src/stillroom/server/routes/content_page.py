"""A document as a plain HTML page: headings, paragraphs, and an anchor for each line and page.

All text is escaped, and `SECURITY_HEADERS` forbid scripts, forms and everything that is not on the page.
"""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from html import escape

from stillroom.core.document import Paragraph
from stillroom.core.document_content import DocumentContent, Span, new_headings

_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 46rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.55 Georgia, serif; }
body { overflow-wrap: break-word; }
h1, h2, h3, h4, h5, h6, .notice, .page, .more { font-family: system-ui, sans-serif; line-height: 1.25; }
p { white-space: pre-wrap; tab-size: 4; margin: 0 0 1em; }
.notice { border-left: .25rem solid #b58900; padding-left: .75rem; white-space: normal; }
.page { border-top: 1px solid #8886; margin: 2rem 0 1rem; padding-top: .25rem; font-size: .8rem; opacity: .75; }
.line:hover::after { content: " " attr(id); font: .7rem system-ui, sans-serif; opacity: .6; }
mark, :target, :target .line { background: #ffe27a; color: #111; }
"""

_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

SECURITY_HEADERS = {
    "Content-Security-Policy": f"sandbox; default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Sent with the page, with original files and with pictures."""

_MAX_ANCHORS = 50
"""Anchors without text before or inside a paragraph, for lines such as blank ones and headings."""
_MAX_HEADING = 6


def content_page(content: DocumentContent, paragraphs: Sequence[Paragraph], highlight: Span, next_part: str) -> str:
    """Return the page.

    Args:
        highlight: Lines to mark; `Span()` marks none. The first one also gets the anchor `L10-L14`.
        next_part: Address of the rest of the document, or "".
    """
    title = escape(content.title or "Document")
    body = [f'<h1 dir="auto">{title}</h1>']
    if content.notice:
        body.append(f'<p class="notice" role="note">{escape(content.notice)}</p>')
    body += _Body(content, highlight).parts(paragraphs)
    if next_part:
        body.append(f'<p class="more"><a rel="next" href="{escape(next_part)}">The document goes on</a></p>')
    head = (
        '<!doctype html>\n<html>\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
    )
    return head + "\n".join(body) + "\n</main>\n</body>\n</html>\n"


class _Body:
    """Makes headings, page marks and paragraphs; each id is used once."""

    def __init__(self, content: DocumentContent, highlight: Span) -> None:
        self._content = content
        self._highlight = highlight
        self._used: set[str] = set()
        self._page = self._line = 0
        self._path: tuple[str, ...] = ()

    def parts(self, paragraphs: Sequence[Paragraph]) -> Iterator[str]:
        for paragraph in paragraphs:
            if paragraph.start_page > self._page:
                self._page = paragraph.start_page
                yield self._page_mark(self._page)
            skipped = range(max(self._line + 1, paragraph.start_line - _MAX_ANCHORS), paragraph.start_line)
            anchors = "".join(map(self._anchor, skipped))
            yield from self._headings(paragraph.heading_path, anchors)
            yield f'<p dir="auto">{"" if paragraph.heading_path != self._path else anchors}{self._text(paragraph)}</p>'
            self._path = paragraph.heading_path
            self._line = max(self._line, paragraph.end_line)

    def _page_mark(self, page: int) -> str:
        # two anchors: `page=3` is what viewers of PDFs understand
        return f'<div class="page" id="page-{page}"><span id="page={page}">Page {page}</span></div>'

    def _headings(self, path: tuple[str, ...], anchors: str) -> Iterator[str]:
        """Yield the headings that begin here."""
        if path == self._path:
            return
        first, texts = new_headings(path, self._path)
        for level, text in enumerate(texts, start=first + 2):
            tag = f"h{min(level, _MAX_HEADING)}"
            yield f'<{tag} dir="auto">{anchors}{escape(text)}</{tag}>'
            anchors = ""
        if anchors:
            yield anchors

    def _text(self, paragraph: Paragraph) -> str:
        lines = self._content.numbered_lines(paragraph)
        if lines[-1][0] or len(lines) == 1:
            return "\n".join(self._line_of(number, text) for number, text in lines)
        inside = range(paragraph.start_line + 1, min(paragraph.end_line, paragraph.start_line + _MAX_ANCHORS) + 1)
        anchors = "".join(map(self._anchor, inside))
        return anchors + self._line_of(paragraph.start_line, paragraph.text, paragraph.end_line)

    def _line_of(self, number: int, text: str, last: int = 0) -> str:
        """Return the text of a line, or of the lines up to `last`, with its anchor and its mark."""
        shown = escape(text)
        if not number:
            return shown
        if not self._highlight.is_all and self._highlight.overlaps(number, max(number, last)):
            shown = f"{self._range_anchor()}<mark>{shown}</mark>"
        name = self._name(f"L{number}")
        return f'<span class="line"{name}>{shown}</span>'

    def _range_anchor(self) -> str:
        first, last = self._highlight
        name = self._name(f"L{first}-L{last}") if last else ""
        return f"<span{name}></span>" if name else ""

    def _anchor(self, line: int) -> str:
        name = self._name(f"L{line}")
        return f"<span{name}></span>" if name else ""

    def _name(self, name: str) -> str:
        """Return the attribute `id`, or nothing if the page has that id."""
        if name in self._used:
            return ""
        self._used.add(name)
        return f' id="{name}"'
