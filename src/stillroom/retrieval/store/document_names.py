"""Names of files and documents in the corpus, and the documents that the targets of `remove` name.

uploads/notes/keys.md     uploaded file, relative to the knowledge base, which can be moved and copied
/srv/handbook/keys.md     any other file, absolute
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from stillroom.core.ids import DocumentId, public_id
from stillroom.errors import UnknownDocumentError, UsageError

UPLOADS = "uploads"
"""The folder of uploaded files, in the knowledge base's folder."""
_PREFIX = f"{UPLOADS}/"
_OF_A_KNOWLEDGE_BASE = ("manifest.json", "corpus.sqlite3")


class DocumentNames:
    """Maps names to paths for one knowledge base. A record's id begins with its file's name: `uploads/a.jsonl#1`."""

    def __init__(self, folder: Path) -> None:
        """`folder`: Absolute path of the knowledge base."""
        self._folder = os.path.join(folder, "")

    def name_of(self, path: str) -> str:
        """Return the name of a file or record at an absolute path; names are returned unchanged."""
        is_upload = path.startswith(self._folder + _PREFIX)
        return path.removeprefix(self._folder) if is_upload else path

    def path_of(self, name: str) -> str:
        """Return the absolute path of a file name; paths are returned unchanged."""
        return self._folder + name if is_upload(name) else name

    def renamed(self, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Yield old and new name of each upload that an earlier version named by its absolute path, here or at a former
        location of the knowledge base.

        Args:
            sizes: Bytes of each file when it was read, by its name in the corpus; -1 if unknown.
        """
        for path, size in sizes.items():
            name = self.name_of(path)
            if name == path:
                name = self._moved(path, size)
            if name != path and name not in sizes:
                yield path, name

    def _moved(self, path: str, size: int) -> str:
        """Return the name of a file uploaded at a former location of this knowledge base, otherwise its path."""
        before, found, rest = path.rpartition(f"/{_PREFIX}")
        while found:
            name = _PREFIX + rest
            here = _size(self._folder + name)
            is_same = here is not None and size in (here, -1)
            if is_same and (not os.path.lexists(path) or _is_knowledge_base(before)):
                return name
            before, found, more = before.rpartition(f"/{_PREFIX}")
            rest = f"{more}/{_PREFIX}{rest}"
        return path


def is_upload(name: str) -> bool:
    """Return whether a file or document of this name was uploaded."""
    return name.startswith(_PREFIX)


def documents_at(
    targets: Sequence[str], known: Mapping[DocumentId, str], names: DocumentNames
) -> tuple[Collection[DocumentId], tuple[str, ...]]:
    """Return the documents that the targets of a `remove` name, and the targets that name none.

    Args:
        known: Absolute path of each document's file.

    Raises:
        UsageError: A target is empty (as a path, "" would be the working folder).
        UnknownDocumentError: No target names any document.
    """
    found = {target: _documents_at(target, known, names) for target in targets}
    unknown = tuple(target for target, document_ids in found.items() if not document_ids)
    if unknown and len(unknown) == len(found):
        others = f" or the {len(unknown) - 1:,} others" if len(unknown) > 1 else ""
        raise UnknownDocumentError(f"no document has the name or folder {unknown[0]!r}{others}; see `stillroom list`")
    return dict.fromkeys(document_id for document_ids in found.values() for document_id in document_ids), unknown


def documents_like(target: str, known: Collection[DocumentId], names: DocumentNames) -> list[DocumentId]:
    """Return the documents that a name may mean, by the first rule that finds any: an id, a public id, the name of an
    upload or a path; the end of a path (`guide.md`, `docs/guide.md`); the beginning of a file's name; a part of the id.
    """
    exact = {target, f"{_PREFIX}{target}", *_possible_ids(target, names)}
    lower = target.casefold()
    rules: tuple[Callable[[str], bool], ...] = (
        lambda known_id: known_id in exact or public_id(known_id) == target,
        lambda known_id: known_id.endswith(f"/{target}"),
        lambda known_id: known_id.casefold().endswith(f"/{lower}"),
        lambda known_id: (
            known_id.partition("#")[0].rpartition("/")[2].casefold().startswith(lower.partition("#")[0])
            and lower in known_id.casefold()
        ),
        lambda known_id: lower in known_id.casefold(),
    )
    for rule in rules if target else ():
        if found := [document_id for document_id in known if rule(document_id)]:
            return found
    return []


def _documents_at(target: str, known: Mapping[DocumentId, str], names: DocumentNames) -> list[DocumentId]:
    """Return the document of that id, otherwise the documents of the file or folder."""
    if not target:
        raise UsageError("an empty target names no document; give a file, a folder or a document id")
    found = [document_id for document_id in _possible_ids(target, names) if document_id in known][:1]
    if not found and os.pardir not in target.partition("#")[2].split("/"):
        absolute = os.path.abspath(target)
        folder = os.path.join(absolute, "")
        found = [document_id for document_id, path in known.items() if path == absolute or path.startswith(folder)]
    return found


def _possible_ids(target: str, names: DocumentNames) -> Iterator[DocumentId]:
    """Yield the target, and the target with its file relative to the working folder. Text after a `#` is a record's id
    and never part of a path."""
    yield DocumentId(names.name_of(target))
    for at in (at for at, letter in enumerate(target) if letter == "#"):
        yield DocumentId(names.name_of(os.path.abspath(target[:at])) + target[at:])


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _is_knowledge_base(folder: str) -> bool:
    return all(os.path.exists(os.path.join(folder, name)) for name in _OF_A_KNOWLEDGE_BASE)
