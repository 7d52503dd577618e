"""Loader of XLSX: sheet names become headings, each row a paragraph labelled with column names; lines are row numbers.

Values are those stored when the file was saved. Hidden sheets are skipped.
"""

import datetime
import warnings
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import openpyxl

from stillroom.core.document import Document
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.office import core_metadata, number_text, open_package
from stillroom.retrieval.loaders.source import File, Outline, check_text
from stillroom.retrieval.loaders.table import labelled

_MAX_COLUMNS = 1000


def parse_sheets(file: File) -> Document:
    """Parse a workbook. The title is the workbook's own, else the file name."""
    with open_package(file), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about features that openpyxl cannot write
        try:
            book = openpyxl.load_workbook(BytesIO(file.data), read_only=True, data_only=True, keep_links=False)
        except (KeyError, ValueError) as error:
            raise DocumentError(f"{file.path}: not a workbook: {error}") from error
        metadata = core_metadata(book.properties)
        outline = Outline()
        num_bytes = 0
        try:
            for sheet in book.worksheets:
                if sheet.sheet_state != "visible":
                    continue
                outline.heading(1, sheet.title)
                for number, text in _rows(sheet):
                    num_bytes += len(text.encode())
                    check_text(file.path, num_bytes, file.config)
                    outline.paragraph(text, number, number)
        finally:
            book.close()
    title = str(metadata.get("title") or file.name)
    return file.document(title, outline.finish(title, title)[1], metadata)


def _rows(sheet: Any) -> Iterator[tuple[int, str]]:
    sheet.reset_dimensions()  # the dimensions in the file may be wrong
    rows = enumerate(sheet.iter_rows(values_only=True, max_col=_MAX_COLUMNS), start=1)
    cells = ((number, [_text(value) for value in row]) for number, row in rows)
    yield from labelled((number, row) for number, row in cells if any(row))


def _text(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return number_text(value)
        case datetime.datetime() if value.time() == datetime.time():
            return value.date().isoformat()
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case _:
            return " ".join(str(value).split())
