"""Loader of PDF (PDFium): line spacing separates paragraphs; headings come from bookmarks, else from type size.

Headers and footers of most pages are kept once. Pages count from 1.
"""

import datetime
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from stillroom.core.document import Document
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.ocr_use import NUM_OCR_PAGES, how_to_read
from stillroom.retrieval.loaders.office import is_placeholder
from stillroom.retrieval.loaders.page_lines import (
    MAX_LEVELS,
    Bookmark,
    Line,
    drop_recurring,
    large_lines,
    read_lines,
)
from stillroom.retrieval.loaders.source import File, Outline, check_text

_HYPHENS = "\x02\ufffe"
"""Characters that PDFium returns for a hyphen at the end of a line."""
_GENERATED = "\r\n\t \xa0" + _HYPHENS
_DATE = re.compile(r"(?:D:)?(\d{4})(\d{2})?(\d{2})?(\d{2})?(\d{2})?(\d{2})?")
_NO_TITLE = re.compile(r"microsoft (word|powerpoint|excel) - |.*\.(docx?|pptx?|xlsx?|tex|dvi|indd|qxd)\Z", re.I)


def parse_pdf(file: File) -> Document:
    """Parse a PDF. The title is the document's own, else the only top heading, else the file name.

    With `documents.ocr`, pages without text are read by OCR.

    Raises:
        DocumentError: The file has a password, is damaged, or has no text (scanned pages).
    """
    pdf = _open(file)
    try:
        pages: list[list[Line]] = []
        num_bytes = 0
        for number in range(len(pdf)):
            lines = _lines(pdf, number)
            num_bytes += sum(len(line.text.encode()) for line in lines)
            check_text(file.path, num_bytes, file.config)
            pages.append(lines)
        num_ocr_pages = _read_scanned(pdf, pages, file)
        if not any(pages):
            raise DocumentError(f"{file.path}: {_no_text(len(pages), file)}")
        metadata = _metadata(pdf)
        if num_ocr_pages:
            metadata[NUM_OCR_PAGES] = num_ocr_pages
        bookmarks = _bookmarks(pdf)
    finally:
        pdf.close()
    drop_recurring(pages)
    outline = Outline()
    read_lines(outline, pages, bookmarks or large_lines(pages))
    own_title = str(metadata.get("title", ""))
    title, paragraphs = outline.finish("" if _NO_TITLE.match(own_title) else own_title, file.name)
    return file.document(title, paragraphs, metadata)


def _read_scanned(pdf: Any, pages: list[list[Line]], file: File) -> int:
    """Read pages without text by OCR, if it is on. Returns their number."""
    if file.config.ocr != "on":
        return 0
    from stillroom.retrieval.loaders.scanned import read_scanned_pages  # loads NumPy

    return read_scanned_pages(pdf, pages, file)


def _no_text(num_pages: int, file: File) -> str:
    if file.config.ocr == "on":
        return f"no text on its {num_pages} pages, and OCR finds none"
    return (
        f"no text on its {num_pages} pages (scanned?); read them by OCR: {how_to_read()}; "
        "or add a text layer, for example with ocrmypdf"
    )


def _open(file: File) -> Any:
    try:
        return pdfium.PdfDocument(file.data)
    except pdfium.PdfiumError as error:
        if "password" in str(error).lower():
            raise DocumentError(f"{file.path}: protected by a password; save it without one") from error
        raise DocumentError(f"{file.path}: damaged, cut off, or not a PDF: {error}") from error


# Lines of a page


def _lines(pdf: Any, number: int) -> list[Line]:
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


def _cut_lines(text_page: Any, codes: Sequence[int], page: int) -> Iterator[Line]:
    start = 0
    for end in range(len(codes) + 1):
        if end < len(codes) and codes[end] not in (10, 13) and chr(codes[end]) not in _HYPHENS:
            continue
        text = _text(codes[start:end])
        first = next((index for index in range(start, end) if chr(codes[index]) not in _GENERATED), None)
        if text.strip() and first is not None:
            _, bottom, _, top = text_page.get_charbox(first, loose=True)
            yield Line(text, page, top - bottom, top, end < len(codes) and chr(codes[end]) in _HYPHENS)
        start = end + 1


def _text(codes: Sequence[int]) -> str:
    """Return code points, or UTF-16 units for some fonts, as text."""
    joined = "".join(map(chr, codes)).replace("\0", "")
    text = joined.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(text.split())


# Bookmarks and metadata


def _bookmarks(pdf: Any) -> dict[int, list[Bookmark]]:
    """Return the bookmarks by page, from 1."""
    found: dict[int, list[Bookmark]] = {}
    try:
        for bookmark in pdf.get_toc(max_depth=MAX_LEVELS):
            title, target = " ".join(bookmark.get_title().split()), bookmark.get_dest()
            index = target.get_index() if target is not None else None
            if title and index is not None:
                found.setdefault(index + 1, []).append(Bookmark(bookmark.level + 1, title))
    except pdfium.PdfiumError:
        return {}
    return found


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
