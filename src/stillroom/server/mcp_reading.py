"""The text of documents for MCP tools: paragraphs below their headings, cut where a reply is full."""

from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from stillroom.core.document import Paragraph
from stillroom.core.document_content import DocumentContent, new_headings
from stillroom.core.ids import public_id

MAX_TEXT = 40_000
"""Most characters of a document in one reply; the reply says where to go on."""
_MAX_HEADING = 6
"""Deepest level of headings in Markdown."""


class ReadReply(BaseModel):
    document: str
    title: str
    text: str
    start_line: int
    end_line: int
    num_lines: int
    num_pages: int
    next_line: int
    """Pass it as `start_line` to read on; 0 at the end of the document, or where it has no lines."""
    is_cut: bool
    """Whether the end of what was asked for is missing. Without a `next_line`, read page by page."""


def read_part(content: DocumentContent, lines: tuple[int, int], page: int) -> ReadReply:
    """Return some lines or a page of a document, as far as a reply has room; 0 stands for all.

    Raises:
        UsageError: the document has no such lines or page.
    """
    first, last = lines
    paragraphs = content.part((first, last), (page, page))
    texts: list[str] = []
    end_line = next_line = 0
    room, is_cut = MAX_TEXT, False
    for paragraph, text in zip(paragraphs, texts_of(content, paragraphs, first), strict=True):
        is_cut = is_cut or len(text) > room
        if is_cut and texts:
            next_line = min(end_line + 1, paragraph.start_line)  # its headings stand before it
            break
        texts.append(text[:room])
        room -= len(text)
        end_line = paragraph.end_line
    return ReadReply(
        document=public_id(content.document_id),
        title=content.title,
        text="\n\n".join(texts),
        start_line=paragraphs[0].start_line if paragraphs else 0,
        end_line=end_line,
        num_lines=content.num_lines,
        num_pages=content.num_pages,
        next_line=next_line,
        is_cut=is_cut,
    )


def texts_of(content: DocumentContent, paragraphs: Sequence[Paragraph], first_line: int) -> Iterator[str]:
    """Yield the text of each paragraph, below the headings that begin there and not before `first_line`."""
    start = (paragraphs[0].start_page, paragraphs[0].start_line) if paragraphs else (0, 0)
    above = [one.heading_path for one in content.paragraphs if (one.start_page, one.start_line) < start]
    path = above[-1] if above else ()
    for paragraph in paragraphs:
        level, headings = new_headings(paragraph.heading_path, path)
        path = paragraph.heading_path
        if first_line and first_line >= paragraph.start_line:
            headings = ()
        marked = [f"{'#' * min(at, _MAX_HEADING)} {text}" for at, text in enumerate(headings, start=level + 2)]
        yield "\n\n".join([*marked, paragraph.text])
