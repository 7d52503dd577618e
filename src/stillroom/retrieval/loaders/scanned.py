"""Pages of a PDF without text, which are drawn and read by OCR."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pypdfium2 as pdfium
import pypdfium2.raw as raw

from stillroom.retrieval.loaders import ocr
from stillroom.retrieval.loaders.ocr_use import check_num_pages
from stillroom.retrieval.loaders.page_lines import Line
from stillroom.retrieval.loaders.picture_lines import Box, lines_of_pages
from stillroom.retrieval.loaders.source import File, check_text

_MAX_LETTERS = 24
"""A page with more letters has text. Scanners print a line of their own, such as `Scanned with CamScanner`."""
_MAX_SCALE = 300 / 72
"""Small pages are drawn with 300 dots per inch, others with fewer (`ocr.scale_to_fit`)."""
_DRAWN = (raw.FPDF_PAGEOBJ_IMAGE, raw.FPDF_PAGEOBJ_PATH, raw.FPDF_PAGEOBJ_SHADING)
_MAX_DEPTH = 3
"""Forms within forms in which drawings are looked for."""


def read_scanned_pages(pdf: Any, pages: list[list[Line]], file: File) -> int:
    """Replace the lines of pages without text by those that OCR finds. Returns the number of these pages.

    Args:
        pages: Lines of each page.

    Raises:
        DocumentError: More than `documents.ocr_max_pages` pages have no text, or they have too much text.
    """
    scanned = [
        number
        for number, lines in enumerate(pages, 1)
        if _num_letters(lines) <= _MAX_LETTERS and _has_drawing(pdf, number)
    ]
    check_num_pages(len(scanned), file)
    found: dict[int, list[Box]] = {}
    num_bytes = 0
    for number in scanned:
        file.on_page(number)
        boxes = _read_page(pdf, number)
        if _num_letters(boxes) > _num_letters(pages[number - 1]):
            found[number] = boxes
        num_bytes += sum(len(box.text.encode()) for box in boxes)
        check_text(file.path, num_bytes, file.config)
    others = [line for number, lines in enumerate(pages, 1) if number not in found for line in lines]
    for number, lines in lines_of_pages(found, _body_size(others)).items():
        pages[number - 1] = lines
    return len(found)


def _num_letters(lines: Iterable[Line | Box]) -> int:
    return sum(char.isalnum() for line in lines for char in line.text)


def _has_drawing(pdf: Any, number: int) -> bool:
    """Return whether there is something on a page besides text; False for a damaged page."""
    try:
        page = pdf[number - 1]
        try:
            return any(True for _ in page.get_objects(filter=_DRAWN, max_depth=_MAX_DEPTH))
        finally:
            page.close()
    except pdfium.PdfiumError:
        return False


def _read_page(pdf: Any, number: int) -> list[Box]:
    """Return the lines of a page, in points from its top; [] for a damaged page."""
    try:
        page = pdf[number - 1]
        try:
            width, height = (max(size, 1.0) for size in page.get_size())
            scale = ocr.scale_to_fit(width, height, _MAX_SCALE)
            pixels = page.render(scale=scale, prefer_bgrx=False).to_numpy()
        finally:
            page.close()
    except pdfium.PdfiumError:
        return []
    return [
        Box(box.text, box.left / scale, box.top / scale, box.right / scale, box.bottom / scale)
        for box in ocr.read_picture(pixels[:, :, :3])
    ]


def _body_size(lines: list[Line]) -> float:
    """Return the type size of most of the text; 0 without lines."""
    sizes: Counter[float] = Counter()
    for line in lines:
        sizes[line.size] += len(line.text)
    return sizes.most_common(1)[0][0] if sizes else 0.0
