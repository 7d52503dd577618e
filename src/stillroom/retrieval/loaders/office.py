"""Shared by the loaders of ZIP-based formats and PDF: opening packages, core metadata, number formatting."""

import zipfile
from io import BytesIO
from typing import Any

from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.source import File

_FIELDS = ("title", "author", "creator", "subject", "keywords", "category", "language", "created", "modified")
_PLACEHOLDERS = frozenset(
    {"powerpoint presentation", "presentation", "word document", "python-docx", "openpyxl", "untitled", "anonymous"}
    | {"unspecified", "(anonymous)", "(unspecified)", "unknown", "microsoft office user"}
)
_OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_MAX_ENTRIES = 20_000


def open_package(file: File) -> zipfile.ZipFile:
    """Open a ZIP archive after checking its size.

    Raises:
        DocumentError: The file is empty, damaged, encrypted, not an archive, or unpacks to more than the limits.
    """
    if not file.data:
        raise DocumentError(f"{file.path}: empty: it has 0 bytes")
    if file.data.startswith(_OLD_OFFICE):
        raise DocumentError(
            f"{file.path}: protected by a password, or in Office's old format; "
            "save it without a password in the new format (.docx, .pptx, .xlsx)"
        )
    try:
        archive = zipfile.ZipFile(BytesIO(file.data))
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise DocumentError(f"{file.path}: damaged or cut off: {error}") from error
    entries = archive.infolist()
    # zipfile never returns more of an entry than its declared size
    if len(entries) > _MAX_ENTRIES or sum(entry.file_size for entry in entries) > file.config.max_unpacked_bytes:
        raise DocumentError(
            f"{file.path}: unpacks to more than documents.max_unpacked_bytes "
            f"({file.config.max_unpacked_bytes / 2**20:,.4g} MiB), or to more than {_MAX_ENTRIES:,} files"
        )
    if any(entry.flag_bits & 0x1 for entry in entries):
        raise DocumentError(f"{file.path}: protected by a password; save it without one")
    return archive


def core_metadata(properties: Any) -> dict[str, object]:
    """Return the core properties that are set and are not placeholders."""
    found: dict[str, object] = {}
    for name in _FIELDS:
        try:
            value = getattr(properties, name, None)
        except (ValueError, TypeError):  # invalid date
            continue
        if isinstance(value, str):
            value = " ".join(value.split())
        if value and not is_placeholder(str(value)):
            found["author" if name == "creator" else name] = value
    return found


def number_text(value: float) -> str:
    """Format a number as Office shows it: with 15 digits, without the rounding noise of its binary form."""
    return f"{value:.15g}"


def is_placeholder(value: str) -> bool:
    """Return whether a program, not an author, wrote this value."""
    return value.lower() in _PLACEHOLDERS
