"""Loader of Jupyter notebooks: Markdown cells as Markdown, code cells verbatim, and text outputs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stillroom.core.document import Document
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import clean_metadata
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.markdown import read_markdown
from stillroom.retrieval.loaders.source import Outline

_MAX_OUTPUT_CHARS = 2000
"""Of one cell's output, the last characters are kept."""


def parse_notebook(path: Path, text: str) -> Document:
    """Parse a notebook. The title is the notebook's own, else the only top heading, else the file name.

    Raises:
        DocumentError: The file is not a notebook.
    """
    try:
        notebook = json.loads(text)
        cells = list(_cells(notebook))
    except (ValueError, TypeError, AttributeError) as error:
        raise DocumentError(f"{path}: not a Jupyter notebook: {error}") from error
    outline = Outline()
    for kind, source, outputs in cells:
        if kind == "markdown":
            read_markdown(outline, source, keep_lines=False)
        else:
            outline.paragraph(source)
        for output in outputs:
            outline.paragraph(output)
    own = notebook.get("metadata", {})
    own = own if isinstance(own, dict) else {}
    title, paragraphs = outline.finish(" ".join(str(own.get("title") or "").split()), path.stem)
    kernel = own.get("kernelspec")
    metadata = {
        "author": [author.get("name") for author in own.get("authors") or [] if isinstance(author, dict)],
        "language": kernel.get("language") if isinstance(kernel, dict) else None,
    }
    return Document(DocumentId(str(path)), title, paragraphs, metadata=clean_metadata(metadata))


def _cells(notebook: dict[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield kind, source and text outputs of each cell; format 3 has the cells in worksheets."""
    sheets = [notebook] if "cells" in notebook else notebook.get("worksheets")
    if sheets is None:
        raise ValueError("it has no cells")
    for sheet in sheets:
        for cell in sheet["cells"]:
            kind = str(cell.get("cell_type"))
            if kind == "heading":
                yield "markdown", "#" * int(cell.get("level", 1)) + " " + _joined(cell.get("source")), []
            else:
                source = _joined(cell.get("source", cell.get("input")))
                yield kind, source, [text for output in cell.get("outputs", ()) for text in _output(output)]


def _output(output: dict[str, Any]) -> Iterator[str]:
    """Yield the text of an output, if it has any. HTML outputs come with a plain text."""
    data = output.get("data", output)
    found = _joined(output.get("text") or data.get("text/plain") or data.get("text"))
    if output.get("output_type") in ("error", "pyerr"):
        found = f"{output.get('ename', '')}: {output.get('evalue', '')}"
    if found.strip():
        is_long = len(found) > _MAX_OUTPUT_CHARS
        yield "Output: " + ("... " + found[-_MAX_OUTPUT_CHARS:] if is_long else found)


def _joined(source: object) -> str:
    """Return a source, which notebooks store as a text or as a list of lines."""
    if isinstance(source, list):
        return "".join(str(line) for line in source)
    return source if isinstance(source, str) else ""
