"""Names of uploaded files, and the files that are there."""

import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from stillroom.core.document import DocumentInfo
from stillroom.core.ids import DocumentId
from stillroom.errors import UsageError
from stillroom.retrieval.loaders.metadata import SIDECAR, is_sidecar
from stillroom.retrieval.store.document_names import UPLOADS
from stillroom.retrieval.store.folder import INCOMING

MAX_NAME_BYTES = 1024
_MAX_PART_BYTES = 255


def uploaded_files(folder: Path) -> Iterator[Path]:
    """Files below a knowledge base's `uploads` that have their place, sorted by folder; none that describes another."""
    for parent, folders, names in os.walk(os.path.join(folder, UPLOADS)):
        folders[:] = sorted(name for name in folders if name != INCOMING)
        yield from (path for path in (Path(parent, name) for name in sorted(names)) if not is_sidecar(path))


def unindexed_info(path: Path, name: Path) -> DocumentInfo | None:
    """Of a file that is not indexed; None where it is gone."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return DocumentInfo(DocumentId(name.as_posix()), path.stem, 0, status.st_size, status.st_mtime, is_indexed=False)


def checked_name(name: str) -> str:
    """The name of an uploaded file, in Unicode's composed form.

    Raises:
        UsageError: it is no path below a folder, or one that would be hidden or ambiguous there, or that of a file
            that describes another one.
    """
    composed = unicodedata.normalize("NFC", name)
    parts = composed.split("/")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        sizes = [0]
    if not all(sizes) or max(sizes) > _MAX_PART_BYTES or sum(sizes) + len(parts) > MAX_NAME_BYTES:
        problem = f"each of its parts has 1 to {_MAX_PART_BYTES} bytes in UTF-8, and all together {MAX_NAME_BYTES}"
    elif any(part.startswith(".") or part != part.strip() for part in parts):
        problem = "no part may begin with a dot, or begin or end with a blank"
    elif "\\" in name or "#" in name or any(unicodedata.category(char) in _UNWANTED for char in name):
        problem = "it may not hold a backslash, '#' or control characters"
    elif composed.endswith(SIDECAR):
        problem = f"what ends with {SIDECAR} describes another file; give `metadata` with the upload of that file"
    else:
        return composed
    raise UsageError(f"the name {name[:200]!r} is no path like notes/keys.md: {problem}")


_UNWANTED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Control and formatting characters, which make one name look like another."""
