"""Sizes of files and documents, and whether a file is gone."""

import os
from pathlib import Path

from stillroom.core.document import Document


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 if it cannot be accessed."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def is_gone(path: str) -> bool:
    """Return whether a file does not exist; an inaccessible file is not gone."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def num_text_bytes(document: Document) -> int:
    """Return the bytes of a document's title and paragraphs."""
    return len(document.title.encode()) + sum(len(paragraph.text.encode()) for paragraph in document.paragraphs)
