"""Loader of PDF (PDFium): line spacing separates paragraphs; headings come from bookmarks, else from type size.

Headers and footers of most pages are kept once. Pages count from 1.
"""

import datetime
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from stillroom.core.document import Document
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.office import is_placeholder
from stillroom.retrieval.loaders.source import File, Outline, check_text

_HYPHENS = "\x02\ufffe"
"""Characters that PDFium returns for a hyphen at the end of a line."""
_GENERATED = "\r\n\t \xa0" + _HYPHENS
_PARAGRAPH_GAP = 1.25
"""A line step above this multiple of the usual step ends a paragraph."""
_HEADING_SIZE = 1.15
_MAX_HEADING_CHARS = 200
_MAX_HEADING_SHARE = 0.2
"""If a larger share of the lines is in large type, as on posters and slides, they are not headings."""
_MAX_LEVELS = 4
_MIN_PAGES_TO_RECUR = 4
_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?!\d)")
_MAX_NUMBER_AHEAD = 999
"""Maximum difference of a page number and the page's index; larger numbers are not page numbers (invoices)."""
_DATE = re.compile(r"(?:D:)?(\d{4})(\d{2})?(\d{2})?(\d{2})?(\d{2})?(\d{2})?")
_NO_TITLE = re.compile(r"microsoft (word|powerpoint|excel) - |.*\.(docx?|pptx?|xlsx?|tex|dvi|indd|qxd)\Z", re.I)


@dataclass(slots=True)
class _Line:
    text: str
    page: int
    size: float
    """Type height in points."""
    top: float
    is_divided: bool
    """Whether the last word continues on the next line."""


_Pattern = tuple[str, str | None, int]
"""Texts before and after a page number, and the number minus the page's index; or a whole text, None and 0."""


@dataclass(slots=True)
class _Bookmark:
    level: int
    title: str


def parse_pdf(file: File) -> Document:
    """Parse a PDF. The title is the document's own, else the only top heading, else the file name.

    Raises:
        DocumentError: The file has a password, is damaged, or has no text (scanned pages).
    """
    pdf = _open(file)
    try:
        pages: list[list[_Line]] = []
        num_bytes = 0
        for number in range(len(pdf)):
            lines = _lines(pdf, number)
            num_bytes += sum(len(line.text.encode()) for line in lines)
            check_text(file.path, num_bytes, file.config)
            pages.append(lines)
        if not num_bytes:
            raise DocumentError(
                f"{file.path}: no text on its {len(pages)} pages (scanned?); "
                "add a text layer first, for example with ocrmypdf"
            )
        metadata = _metadata(pdf)
        bookmarks = _bookmarks(pdf)
    finally:
        pdf.close()
    _drop_recurring(pages)
    outline = Outline()
    _read(outline, pages, bookmarks or _large_lines(pages))
    own_title = str(metadata.get("title", ""))
    title, paragraphs = outline.finish("" if _NO_TITLE.match(own_title) else own_title, file.name)
    return file.document(title, paragraphs, metadata)


def _open(file: File) -> Any:
    try:
        return pdfium.PdfDocument(file.data)
    except pdfium.PdfiumError as error:
        if "password" in str(error).lower():
            raise DocumentError(f"{file.path}: protected by a password; save it without one") from error
        raise DocumentError(f"{file.path}: damaged, cut off, or not a PDF: {error}") from error


# Lines of a page


def _lines(pdf: Any, number: int) -> list[_Line]:
    """Return the lines of a page in file order, which is nearly always the reading order; [] for a damaged page."""
    try:
        page = pdf[number]
        text_page = page.get_textpage()
    except pdfium.PdfiumError:
        return []
    try:
        codes = [raw.FPDFText_GetUnicode(text_page, index) for index in range(text_page.count_chars())]
        return list(_cut_lines(text_page, codes, number + 1))
    finally:
        text_page.close()
        page.close()


def _cut_lines(text_page: Any, codes: Sequence[int], page: int) -> Iterator[_Line]:
    start = 0
    for end in range(len(codes) + 1):
        if end < len(codes) and codes[end] not in (10, 13) and chr(codes[end]) not in _HYPHENS:
            continue
        text = _text(codes[start:end])
        first = next((index for index in range(start, end) if chr(codes[index]) not in _GENERATED), None)
        if text.strip() and first is not None:
            _, bottom, _, top = text_page.get_charbox(first, loose=True)
            yield _Line(text, page, top - bottom, top, end < len(codes) and chr(codes[end]) in _HYPHENS)
        start = end + 1


def _text(codes: Sequence[int]) -> str:
    """Return code points, or UTF-16 units for some fonts, as text."""
    joined = "".join(map(chr, codes)).replace("\0", "")
    text = joined.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(text.split())


def _drop_recurring(pages: list[list[_Line]]) -> None:
    """Remove headers and footers, lines at the edge of more than half of the pages, except their first occurrence."""
    if len(pages) < _MIN_PAGES_TO_RECUR:
        return
    edges = [{id(line): set(_patterns(line)) for line in (*page[:2], *page[-2:])} for page in pages]
    at_edges = [set().union(*edge.values()) for edge in edges]
    counts = Counter(pattern for patterns in at_edges for pattern in patterns)
    recurring = {pattern for pattern, count in counts.items() if count * 2 > len(pages)}
    seen: set[_Pattern] = set()
    for page, edge, patterns in zip(pages, edges, at_edges, strict=True):
        page[:] = [line for line in page if seen.isdisjoint(edge.get(id(line), ()))]
        seen |= patterns & recurring


def _patterns(line: _Line) -> Iterator[_Pattern]:
    """Yield patterns that two lines share if they are equal, or equal except for their page number. Other numbers are
    content."""
    text = line.text.casefold()
    yield text, None, 0
    for number in _NUMBER.finditer(text) if len(text) <= _MAX_HEADING_CHARS else ():
        before, after, ahead = text[: number.start()], text[number.end() :], int(number.group()) - line.page
        if ahead <= _MAX_NUMBER_AHEAD or not any(map(str.isalnum, before + after)):
            yield before, after, ahead


# Headings


def _bookmarks(pdf: Any) -> dict[int, list[_Bookmark]]:
    """Return the bookmarks by page, from 1."""
    found: dict[int, list[_Bookmark]] = {}
    try:
        for bookmark in pdf.get_toc(max_depth=_MAX_LEVELS):
            title, target = " ".join(bookmark.get_title().split()), bookmark.get_dest()
            index = target.get_index() if target is not None else None
            if title and index is not None:
                found.setdefault(index + 1, []).append(_Bookmark(bookmark.level + 1, title))
    except pdfium.PdfiumError:
        return {}
    return found


def _large_lines(pages: Sequence[Sequence[_Line]]) -> dict[int, list[_Bookmark]]:
    """Return lines in larger type than the body as bookmarks, by page."""
    lines = [line for page in pages for line in page]
    sizes: Counter[float] = Counter()
    for line in lines:
        sizes[_rounded(line.size)] += len(line.text)
    body = sizes.most_common(1)[0][0]
    large = [line for line in lines if _is_large(line, body)]
    if len(large) > _MAX_HEADING_SHARE * len(lines) and len(lines) > 10:
        return {}
    levels = {
        size: level for level, size in enumerate(sorted({_rounded(line.size) for line in large}, reverse=True), 1)
    }
    found: dict[int, list[_Bookmark]] = {}
    previous: _Line | None = None
    for line in lines:
        if _is_large(line, body):
            known = found.setdefault(line.page, [])
            if previous is not None and known and _is_same_heading(previous, line):
                known[-1].title += " " + line.text
            else:
                known.append(_Bookmark(min(levels[_rounded(line.size)], _MAX_LEVELS), line.text))
            previous = line
        else:
            previous = None
    return found


def _is_large(line: _Line, body: float) -> bool:
    is_word = any(char.isalpha() for char in line.text)
    return is_word and line.size >= _HEADING_SIZE * body and len(line.text) <= _MAX_HEADING_CHARS


def _is_same_heading(above: _Line, below: _Line) -> bool:
    is_near = 0 < above.top - below.top < 1.6 * above.size
    return above.page == below.page and _rounded(above.size) == _rounded(below.size) and is_near


def _rounded(size: float) -> float:
    return round(size * 2) / 2


# Paragraphs


def _read(outline: Outline, pages: Sequence[Sequence[_Line]], headings: dict[int, list[_Bookmark]]) -> None:
    """Fill the outline. A bookmark whose words are not on its page goes to the start of the page."""
    step = _usual_step(pages)
    for number, page in enumerate(pages, start=1):
        outline.page = number
        places = _places(page, headings.get(number, ()))
        run: list[_Line] = []
        index = 0
        while index < len(page) or index in places:
            if index in places:
                _emit(outline, run)
                for level, title, num_lines in places.pop(index):
                    outline.heading(level, title)
                    index += num_lines
                continue
            if run and _ends_paragraph(run[-1], page[index], step):
                _emit(outline, run)
            run.append(page[index])
            index += 1
        _emit(outline, run)


def _places(page: Sequence[_Line], headings: Sequence[_Bookmark]) -> dict[int, list[tuple[int, str, int]]]:
    """Return headings (level, title, number of lines) by the index of their first line."""
    found: dict[int, list[tuple[int, str, int]]] = {}
    after = 0
    for heading in headings:
        index, num_lines = _find(page, heading.title, after)
        found.setdefault(index, []).append((heading.level, heading.title, num_lines))
        after = index + num_lines
    return found


def _find(page: Sequence[_Line], title: str, after: int) -> tuple[int, int]:
    """Return the first line and the number of lines of a heading from line `after` on; `(after, 0)` if not found."""
    wanted = _letters(title)
    for index in range(after, len(page)):
        text = ""
        for num_lines in range(1, 4):
            text += _letters(page[index + num_lines - 1].text) if index + num_lines <= len(page) else ""
            if text and (text == wanted or text.lstrip("0123456789.") == wanted):  # bookmarks often lack the number
                return index, num_lines
            if len(text) > len(wanted) + 8:
                break
    return after, 0


def _letters(text: str) -> str:
    return "".join(text.split()).casefold()


def _usual_step(pages: Sequence[Sequence[_Line]]) -> float:
    """Return the median distance from one line to the next, in points."""
    steps = [above.top - below.top for page in pages for above, below in pairwise(page) if above.top > below.top]
    return statistics.median(steps) if steps else 0.0


def _ends_paragraph(above: _Line, below: _Line, step: float) -> bool:
    if above.is_divided:
        return False
    distance = above.top - below.top
    has_other_size = abs(above.size - below.size) > 0.1 * max(above.size, below.size)
    return distance < 0 or distance > _PARAGRAPH_GAP * max(step, above.size * 0.9) or has_other_size


def _emit(outline: Outline, run: list[_Line]) -> None:
    text = "".join(line.text + ("" if line.is_divided else "\n") for line in run)
    outline.paragraph(text)
    run.clear()


# Metadata


def _metadata(pdf: Any) -> dict[str, object]:
    try:
        found = pdf.get_metadata_dict(skip_empty=True)
    except pdfium.PdfiumError:
        return {}
    known = ((name.lower(), " ".join(str(found.get(name, "")).split())) for name in _KEPT)
    kept: dict[str, object] = {name: value for name, value in known if value and not is_placeholder(value)}
    for name, key in (("created", "CreationDate"), ("modified", "ModDate")):
        date = _date(str(found.get(key, "")))
        if date:
            kept[name] = date
    return {**kept, "num_pages": len(pdf)}


_KEPT = ("Title", "Author", "Subject", "Keywords")


def _date(text: str) -> str:
    """Return a PDF date (`D:20240131120000+01'00'`) in ISO 8601 with the same precision, or ""."""
    match = _DATE.match(text)
    if match is None:
        return ""
    year, month, day, *time = (int(part) if part else None for part in match.groups())
    try:
        if year is None or month is None or day is None:
            return str(year or "")
        if time[0] is None:
            return datetime.date(year, month, day).isoformat()
        return datetime.datetime(year, month, day, time[0], time[1] or 0, time[2] or 0).isoformat()
    except ValueError:
        return ""
