"""PDF by PDFium: lines become paragraphs by the space between them; headings come from bookmarks, else from type size.

What recurs at the top or bottom of most pages is kept once. Pages are counted from 1.
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
from stillroom.retrieval.loaders.office import is_made_up
from stillroom.retrieval.loaders.source import File, Outline, check_text

_HYPHENS = "\x02\ufffe"
"""What PDFium puts where a word is divided at the end of a line."""
_GENERATED = "\r\n\t \xa0" + _HYPHENS
_PARAGRAPH_GAP = 1.25
"""A step to the next line of so many usual ones ends a paragraph."""
_HEADING_SIZE = 1.15
_MAX_HEADING_CHARS = 200
_MAX_HEADING_SHARE = 0.2
"""Where more of the lines are in large type, it is not headings that are: a poster, or slides."""
_MAX_LEVELS = 4
_MIN_PAGES_TO_RECUR = 4
_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?!\d)")
_MAX_NUMBER_AHEAD = 999
"""Of a page's number before the page's place in the file: what is further ahead numbers invoices, not pages."""
_DATE = re.compile(r"(?:D:)?(\d{4})(\d{2})?(\d{2})?(\d{2})?(\d{2})?(\d{2})?")
_NO_TITLE = re.compile(r"microsoft (word|powerpoint|excel) - |.*\.(docx?|pptx?|xlsx?|tex|dvi|indd|qxd)\Z", re.I)


@dataclass(slots=True)
class _Line:
    text: str
    page: int
    size: float
    """Height of its type in points."""
    top: float
    is_divided: bool
    """Its last word goes on in the next line."""


_Form = tuple[str, str | None, int]
"""The texts before and after a page's number, and how far that is from the count of the pages; or a whole text, None,
and 0."""


@dataclass(slots=True)
class _Bookmark:
    level: int
    title: str


def parse_pdf(file: File) -> Document:
    """The title is the document's own, else a first heading without an equal, else the file's name.

    Raises:
        DocumentError: it has a password, is damaged, or has no text, as scanned pages have none.
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
                f"{file.path}: no text on its {len(pages)} pages, as when they were scanned; "
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
        raise DocumentError(f"{file.path}: damaged, cut off, or no PDF: {error}") from error


# Lines of a page


def _lines(pdf: Any, number: int) -> list[_Line]:
    """In the order in which they stand in the file, which is nearly always the reading order.

    Raises:
        DocumentError: the page is damaged.
    """
    try:
        page = pdf[number]
        text_page = page.get_textpage()
    except pdfium.PdfiumError:  # one damaged page of a hundred: the others can be read
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
    """Code points, or UTF-16 units where the font says so, as text."""
    joined = "".join(map(chr, codes)).replace("\0", "")
    text = joined.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(text.split())


def _drop_recurring(pages: list[list[_Line]]) -> None:
    """Headers and footers: leave the first of lines that stand at the edge of more than half of the pages."""
    if len(pages) < _MIN_PAGES_TO_RECUR:
        return
    edges = [{id(line): set(_forms(line)) for line in (*page[:2], *page[-2:])} for page in pages]
    at_edges = [set().union(*edge.values()) for edge in edges]
    counts = Counter(form for forms in at_edges for form in forms)
    recurring = {form for form, count in counts.items() if count * 2 > len(pages)}
    seen: set[_Form] = set()
    for page, edge, forms in zip(pages, edges, at_edges, strict=True):
        page[:] = [line for line in page if seen.isdisjoint(edge.get(id(line), ()))]
        seen |= forms & recurring


def _forms(line: _Line) -> Iterator[_Form]:
    """What two lines have in common if they are the same text, or the same but for the number of their page. Any other
    number may be what a line is there to say."""
    text = line.text.casefold()
    yield text, None, 0
    for number in _NUMBER.finditer(text) if len(text) <= _MAX_HEADING_CHARS else ():
        before, after, ahead = text[: number.start()], text[number.end() :], int(number.group()) - line.page
        if ahead <= _MAX_NUMBER_AHEAD or not any(map(str.isalnum, before + after)):
            yield before, after, ahead


# Headings


def _bookmarks(pdf: Any) -> dict[int, list[_Bookmark]]:
    """By page, from 1; empty where there are none."""
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
    """Lines in larger type than the most as if they were bookmarks."""
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
            if previous is not None and known and _goes_on(previous, line):
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


def _goes_on(above: _Line, below: _Line) -> bool:
    """Whether two lines are one heading."""
    is_near = 0 < above.top - below.top < 1.6 * above.size
    return above.page == below.page and _rounded(above.size) == _rounded(below.size) and is_near


def _rounded(size: float) -> float:
    return round(size * 2) / 2


# Paragraphs


def _read(outline: Outline, pages: Sequence[Sequence[_Line]], headings: dict[int, list[_Bookmark]]) -> None:
    """Fill the outline. A bookmark whose words are not on its page stands at the page's beginning."""
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
    """Headings (level, title, lines that they take up) by the line before which they stand, in order."""
    found: dict[int, list[tuple[int, str, int]]] = {}
    after = 0
    for heading in headings:
        index, num_lines = _find(page, heading.title, after)
        found.setdefault(index, []).append((heading.level, heading.title, num_lines))
        after = index + num_lines
    return found


def _find(page: Sequence[_Line], title: str, after: int) -> tuple[int, int]:
    """The line, from `after` on, where a heading begins, and over how many it goes; `(after, 0)` where it is not."""
    wanted = _letters(title)
    for index in range(after, len(page)):
        text = ""
        for num_lines in range(1, 4):
            text += _letters(page[index + num_lines - 1].text) if index + num_lines <= len(page) else ""
            if text and (text == wanted or text.lstrip("0123456789.") == wanted):  # bookmarks often have no number
                return index, num_lines
            if len(text) > len(wanted) + 8:
                break
    return after, 0


def _letters(text: str) -> str:
    return "".join(text.split()).casefold()


def _usual_step(pages: Sequence[Sequence[_Line]]) -> float:
    """From one line to the next, in points."""
    steps = [above.top - below.top for page in pages for above, below in pairwise(page) if above.top > below.top]
    return statistics.median(steps) if steps else 0.0


def _ends_paragraph(above: _Line, below: _Line, step: float) -> bool:
    if above.is_divided:
        return False
    distance = above.top - below.top
    return distance < 0 or distance > _PARAGRAPH_GAP * max(step, above.size * 0.9) or _differs(above, below)


def _differs(above: _Line, below: _Line) -> bool:
    return abs(above.size - below.size) > 0.1 * max(above.size, below.size)


def _emit(outline: Outline, run: list[_Line]) -> None:
    text = "".join(line.text + ("" if line.is_divided else "\n") for line in run)
    outline.paragraph(text)
    run.clear()


# What the document says of itself


def _metadata(pdf: Any) -> dict[str, object]:
    try:
        found = pdf.get_metadata_dict(skip_empty=True)
    except pdfium.PdfiumError:
        return {}
    known = ((name.lower(), " ".join(str(found.get(name, "")).split())) for name in _KEPT)
    kept: dict[str, object] = {name: value for name, value in known if value and not is_made_up(value)}
    for name, key in (("created", "CreationDate"), ("modified", "ModDate")):
        date = _date(str(found.get(key, "")))
        if date:
            kept[name] = date
    return {**kept, "num_pages": len(pdf)}


_KEPT = ("Title", "Author", "Subject", "Keywords")


def _date(text: str) -> str:
    """`D:20240131120000+01'00'` as ISO 8601, as exact as it is; empty where it is none."""
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
