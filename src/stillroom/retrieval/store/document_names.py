"""Names of files in the corpus: uploads are named from the knowledge base's folder, so that it can be moved and copied;
every other file by its absolute path.

    uploads/notes/keys.md     the file of that name below the knowledge base's folder
    /srv/handbook/keys.md     a file elsewhere, which `stillroom add` was given
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

UPLOADS = "uploads"
"""The folder of files that came as bytes, see `uploads`."""
_PREFIX = f"{UPLOADS}/"
_OF_A_KNOWLEDGE_BASE = ("manifest.json", "corpus.sqlite3")


class DocumentNames:
    """Of one knowledge base. Names of documents follow those of their files: `uploads/a.jsonl#record`."""

    def __init__(self, folder: Path) -> None:
        """`folder`: absolute."""
        self._folder = os.path.join(folder, "")

    def name_of(self, path: str) -> str:
        """The name of a file, or of a record, by its absolute path; a name stays as it is."""
        is_upload = path.startswith(self._folder + _PREFIX)
        return path.removeprefix(self._folder) if is_upload else path

    def path_of(self, name: str) -> str:
        """The absolute path of a file by its name; a path stays as it is."""
        return self._folder + name if is_upload(name) else name

    def renamed(self, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Old and new name of each upload that an earlier version named by its absolute path: here, or where the
        knowledge base was before it was moved or copied.

        Args:
            sizes: bytes of each file as it was read, by its name in the corpus; -1 where that is not known.
        """
        for path, size in sizes.items():
            name = self.name_of(path)
            if name == path:
                name = self._moved(path, size)
            if name != path and name not in sizes:
                yield path, name

    def _moved(self, path: str, size: int) -> str:
        """The name of a file that was uploaded to another place of this knowledge base; else the path."""
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
    """Whether a file or document of this name was uploaded."""
    return name.startswith(_PREFIX)


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _is_knowledge_base(folder: str) -> bool:
    return all(os.path.exists(os.path.join(folder, name)) for name in _OF_A_KNOWLEDGE_BASE)
