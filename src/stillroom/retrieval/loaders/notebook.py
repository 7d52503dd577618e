"""Jupyter notebooks: Markdown cells as Markdown, code cells verbatim, and of outputs what is text."""

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
"""Of one cell's output: the end of a training log says as much as all of it."""


def parse_notebook(path: Path, text: str) -> Document:
    """The title is the notebook's own, else a first heading without an equal, else the file's name.

    Raises:
        DocumentError: it is no notebook.
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
    """Kind, source and text outputs of each cell; format 3 keeps them in worksheets."""
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
    """What an output says as text: pictures say nothing, and of HTML there is plain text beside it."""
    data = output.get("data", output)
    found = _joined(output.get("text") or data.get("text/plain") or data.get("text"))
    if output.get("output_type") in ("error", "pyerr"):
        found = f"{output.get('ename', '')}: {output.get('evalue', '')}"
    if found.strip():
        is_long = len(found) > _MAX_OUTPUT_CHARS
        yield "Output: " + ("... " + found[-_MAX_OUTPUT_CHARS:] if is_long else found)


def _joined(source: object) -> str:
    """A text, which notebooks often keep line by line."""
    if isinstance(source, list):
        return "".join(str(line) for line in source)
    return source if isinstance(source, str) else ""
