"""The documents of a knowledge base that this process has not opened, looked at in its file when that has changed."""

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from stillroom.core.ids import ChunkId
from stillroom.errors import CorruptKnowledgeBaseError, KnowledgeBaseNotFoundError, StorageError
from stillroom.retrieval.store import rows
from stillroom.retrieval.store.corpus_file import CorpusFile

_BATCH = 500
"""Parameters per statement; SQLite takes at least 999."""

State = tuple[tuple[int, ...], ...]


class ClosedCorpus:
    """Opens the file for each look and closes it again, so that many cost neither memory nor descriptors."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            KnowledgeBaseNotFoundError: there is no such file.
            StorageError: it cannot be looked at.
            CorruptKnowledgeBaseError: it is damaged.
        """
        self._path = path
        self._state = state_of(path)
        self.identity, self._num_changes = self._look()

    @property
    def num_changes(self) -> int:
        """Of documents so far; read again only if the file has changed. Raises as the constructor.

        Raises:
            KnowledgeBaseNotFoundError: also if another knowledge base stands in its place.
        """
        state = state_of(self._path)
        if state != self._state:
            identity, num_changes = self._look()
            if identity != self.identity:
                raise KnowledgeBaseNotFoundError("another knowledge base stands in the place of this one")
            self._state, self._num_changes = state, num_changes
        return self._num_changes

    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        """Those of the chunks that are there now. Raises as `num_changes`."""
        wanted, found = [int(chunk_id) for chunk_id in chunk_ids], set[ChunkId]()
        state_of(self._path)
        file = CorpusFile(self._path)
        with contextlib.closing(file), file.reporting(), file.reading() as connection:
            for start in range(0, len(wanted), _BATCH):
                batch = wanted[start : start + _BATCH]
                statement = rows.SELECT_EXISTING.format(",".join("?" * len(batch)))
                found.update(ChunkId(row[0]) for row in connection.execute(statement, batch))
        return found

    def _look(self) -> tuple[str, int]:
        """Identity and number of changes."""
        file = CorpusFile(self._path)
        with contextlib.closing(file), file.reporting(), file.reading() as connection:
            found = connection.execute("SELECT corpus_id, generation FROM state").fetchone()
        if found is None:
            raise CorruptKnowledgeBaseError(f"{self._path} has lost the record of its state")
        return str(found[0]), int(found[1])


def state_of(path: Path) -> State:
    """What changes with a corpus' content.

    Raises:
        KnowledgeBaseNotFoundError: there is no such file.
        StorageError: it cannot be looked at, as in a folder that may not be entered.
    """
    try:
        found = [path.stat()]
        with contextlib.suppress(FileNotFoundError):
            found.append(os.stat(f"{path}-wal"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise KnowledgeBaseNotFoundError(f"there is no knowledge base in {path.parent}") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be looked at: {error.strerror or error}; see to its rights") from error
    return tuple((one.st_dev, one.st_ino, one.st_mtime_ns, one.st_size) for one in found)
