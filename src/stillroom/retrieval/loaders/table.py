"""Loader of CSV and TSV: each row becomes a paragraph labelled with the column names."""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from stillroom.core.document import Document, Paragraph
from stillroom.core.ids import DocumentId
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.source import File, text_of, within_limits

_Place = TypeVar("_Place")

_DELIMITERS = ",;\t|"
_QUOTED = re.compile(r'(?<![^,;\t|\n])"[^"]*(?:""[^"]*)*"')
"""A quoted cell; a quotation mark within a cell is an ordinary character."""
_HEAD_CHARS = 65_536
"""Maximum characters of the first row."""


def parse_table(file: File) -> Document:
    """Parse a table. The title is the file name without extension; the first row tells the delimiter.

    Raises:
        DocumentError: A cell is too long, as after an unclosed quotation mark, or the labelled rows exceed a limit.
    """
    path, text = file.path, text_of(file)
    first = next((line for line in _QUOTED.sub("cell", text[:_HEAD_CHARS]).split("\n") if line.strip()), "")
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(_DELIMITERS, key=first.count)
    try:
        rows = (Paragraph(row, (), *lines) for lines, row in labelled(_rows(text, delimiter)))
        paragraphs = tuple(within_limits(path, rows, file.config))
    except csv.Error as error:
        raise DocumentError(f"{path}: not a table of comma-separated values: {error}") from error
    return Document(DocumentId(str(path)), path.stem, paragraphs)


def _rows(text: str, delimiter: str) -> Iterator[tuple[tuple[int, int], list[str]]]:
    """Yield first and last line and cells of each row that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    first = 1
    for row in reader:
        cells = [" ".join(cell.split()) for cell in row]
        if any(cells):
            yield (first, reader.line_num), cells
        first = reader.line_num + 1


def labelled(rows: Iterable[tuple[_Place, Sequence[str]]]) -> Iterator[tuple[_Place, str]]:
    """Yield the rows of CSV or XLSX as text, with their places.

    If the first row holds column names, they label the cells of the others: `Name: Ann; Age: 31`. Otherwise cells are
    separated: `Ann | 31`.
    """
    names: Sequence[str] | None = None
    for place, row in rows:
        if names is None:
            names = _names(row)
            if names:
                yield place, " | ".join(name for name in names if name)
                continue
        if names:
            pairs = [(names[index] if index < len(names) else "", cell) for index, cell in enumerate(row) if cell]
            yield place, "; ".join(f"{name}: {cell}" if name else cell for name, cell in pairs)
        else:
            yield place, " | ".join(cell for cell in row if cell)


def _names(row: Sequence[str]) -> Sequence[str]:
    """Return a row if it holds column names: two or more cells, all different, none a number; otherwise ()."""
    filled = [cell for cell in row if cell]
    is_header = len(filled) > 1 and len(set(filled)) == len(filled) and not any(_is_number(cell) for cell in filled)
    return row if is_header else ()


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", ".").rstrip("%"))
    except ValueError:
        return False
    return True
