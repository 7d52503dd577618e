"""CSV and TSV: each row reads with the names of its columns. Lines are those of the file."""

import csv
import io
import re
from collections.abc import Iterator

from stillroom.core.document import Document, Paragraph
from stillroom.core.ids import DocumentId
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.labelled_rows import labelled
from stillroom.retrieval.loaders.source import File, text_of, within_limits

_DELIMITERS = ",;\t|"
_QUOTED = re.compile(r'(?<![^,;\t|\n])"[^"]*(?:""[^"]*)*"')
"""A cell in quotation marks; elsewhere than where a cell begins, a mark is an ordinary character."""
_HEAD_CHARS = 65_536
"""Within which the first row ends."""


def parse_table(file: File) -> Document:
    """The file's name without its extension is the title. The first row tells what stands between cells.

    Raises:
        DocumentError: a cell is too long to be one, as where a quotation mark is never closed; or the rows with the
            names of their columns are more than `documents` allows.
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
    """Rows that say something, with the first and last line of each."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    first = 1
    for row in reader:
        cells = [" ".join(cell.split()) for cell in row]
        if any(cells):
            yield (first, reader.line_num), cells
        first = reader.line_num + 1
