"""Files below `kb/uploads`: allowed names, the files that exist, and the record of pending uploads."""

import contextlib
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from stillroom.core.document import DocumentInfo
from stillroom.core.ids import DocumentId
from stillroom.core.private_files import make_folder, open_file
from stillroom.errors import UsageError
from stillroom.retrieval.loaders.document_metadata import SIDECAR, given_metadata, is_sidecar, with_given
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.document_names import UPLOADS
from stillroom.retrieval.store.folder import INCOMING
from stillroom.retrieval.store.sql_rows import PENDING, SourceFile, SourceUpdate

MAX_NAME_BYTES = 1024
_MAX_PART_BYTES = 255

_FORBIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of control and formatting characters, which can make two names look alike."""


def uploaded_files(folder: Path) -> Iterator[Path]:
    """Yield the uploaded files of the knowledge base in `folder`, sorted, without sidecars and unfinished uploads."""
    for parent, folders, names in os.walk(os.path.join(folder, UPLOADS)):
        folders[:] = sorted(name for name in folders if name != INCOMING)
        yield from (path for path in (Path(parent, name) for name in sorted(names)) if not is_sidecar(path))


def unindexed_info(path: Path, name: Path) -> DocumentInfo | None:
    """Describe a file that is not indexed; None if it does not exist."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return DocumentInfo(DocumentId(name.as_posix()), path.stem, 0, status.st_size, status.st_mtime, is_indexed=False)


def checked_name(name: str) -> str:
    """Return the name of an uploaded file in Unicode's composed form (NFC).

    Raises:
        UsageError: The name is not a relative path such as `notes/keys.md`, or is hidden, ambiguous or a sidecar's.
    """
    composed = unicodedata.normalize("NFC", name)
    parts = composed.split("/")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        sizes = [0]
    if not all(sizes) or max(sizes) > _MAX_PART_BYTES or sum(sizes) + len(parts) > MAX_NAME_BYTES:
        problem = f"each part must have 1 to {_MAX_PART_BYTES} bytes in UTF-8, and all parts at most {MAX_NAME_BYTES}"
    elif any(part.startswith(".") or part != part.strip() for part in parts):
        problem = "no part may begin with a dot, or begin or end with a blank"
    elif "\\" in name or "#" in name or any(unicodedata.category(char) in _FORBIDDEN_CATEGORIES for char in name):
        problem = "it may not contain a backslash, '#' or control characters"
    elif composed.endswith(SIDECAR):
        problem = f"a name ending with {SIDECAR} describes another file; give `metadata` with the upload of that file"
    else:
        return composed
    raise UsageError(f"the name {name[:200]!r} must be a relative path such as notes/keys.md: {problem}")


def note_pending(
    corpus: Corpus, names: Sequence[str], metadata: Mapping[str, object] | None
) -> dict[str, SourceFile | None]:
    """Note files that are about to be indexed, with their given metadata: if this process is killed, another process
    completes them. Precondition: the caller holds the write lock.

    Returns:
        The former record of each file, for `restore_sources`.

    Raises:
        UsageError: The metadata is invalid.
    """
    given, known = given_metadata(metadata or {}), corpus.sources()
    before = {name: known.get(name) for name in names}
    noted = []
    for name, source in before.items():
        merged = with_given({} if source is None else source.metadata, given)
        noted.append(SourceUpdate(name, SourceFile(name, PENDING, 0, "", merged)))
    corpus.commit(sources=noted)
    return before


def restore_sources(corpus: Corpus, before: Mapping[str, SourceFile | None]) -> None:
    """Restore the records of files as `note_pending` returned them; None deletes a record. Precondition: as there."""
    corpus.commit(sources=[SourceUpdate(name, source) for name, source in before.items()])


_NUM_REPEATS = 3
"""Times that an upload makes its folder again; each needs a writer that begins between two operations of a file."""


def open_incoming(folder: Path, path: Path) -> BinaryIO:
    """Open a new file in a folder of uploads in progress, which a writer may remove while it is empty."""
    for _ in range(_NUM_REPEATS):
        with contextlib.suppress(FileNotFoundError):
            make_folder(folder)
            return open_file(path)
    make_folder(folder)
    return open_file(path)
