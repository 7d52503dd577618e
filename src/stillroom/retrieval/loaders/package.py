"""Files that are ZIP archives inside: DOCX, PPTX, XLSX, EPUB. What they unpack to is bounded before it is read."""

import zipfile
from io import BytesIO

from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.source import File

_OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_MAX_ENTRIES = 20_000


def open_package(file: File) -> zipfile.ZipFile:
    """The archive, once it is known that it may be unpacked.

    Raises:
        DocumentError: the file is empty, damaged, encrypted or no archive, or unpacks to more than it may.
    """
    if not file.data:
        raise DocumentError(f"{file.path}: empty: not a byte in it")
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
    # zipfile never gives more of an entry than the size that is declared here
    if len(entries) > _MAX_ENTRIES or sum(entry.file_size for entry in entries) > file.config.max_unpacked_bytes:
        raise DocumentError(
            f"{file.path}: unpacks to more than documents.max_unpacked_bytes "
            f"({file.config.max_unpacked_bytes / 2**20:,.4g} MiB), or to more than {_MAX_ENTRIES:,} files"
        )
    if any(entry.flag_bits & 0x1 for entry in entries):
        raise DocumentError(f"{file.path}: protected by a password; save it without one")
    return archive
