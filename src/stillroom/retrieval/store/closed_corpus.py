"""Reads the corpus of a knowledge base that is not open in this process, when its file has changed."""

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId
from stillroom.errors import CorruptKnowledgeBaseError, KnowledgeBaseNotFoundError, StorageError
from stillroom.retrieval.store import sql_rows
from stillroom.retrieval.store.corpus_file import CorpusFile

_BATCH = 500
"""Parameters per statement; SQLite accepts at least 999."""

State = tuple[tuple[int, ...], ...]


class ClosedCorpus:
    """A corpus file, opened for each read and closed again, so that many take neither memory nor descriptors."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            KnowledgeBaseNotFoundError: The file does not exist.
            StorageError: The file cannot be accessed.
            CorruptKnowledgeBaseError: The file is damaged.
        """
        self._path = path
        self._state = state_of(path)
        self.identity, self._num_changes = self._read_state()

    @property
    def num_changes(self) -> int:
        """Number of commits that changed documents; read again only if the file has changed. Raises as the constructor.

        Raises:
            KnowledgeBaseNotFoundError: Also if another knowledge base has replaced this one.
        """
        state = state_of(self._path)
        if state != self._state:
            identity, num_changes = self._read_state()
            if identity != self.identity:
                raise KnowledgeBaseNotFoundError("another knowledge base has replaced this one")
            self._state, self._num_changes = state, num_changes
        return self._num_changes

    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        """Return the ids of the chunks that exist now. Raises as `num_changes`."""
        wanted, found = [int(chunk_id) for chunk_id in chunk_ids], set[ChunkId]()
        state_of(self._path)
        file = CorpusFile(self._path)
        with contextlib.closing(file), file.translating_errors(), file.reading() as connection:
            for start in range(0, len(wanted), _BATCH):
                batch = wanted[start : start + _BATCH]
                statement = sql_rows.SELECT_EXISTING.format(",".join("?" * len(batch)))
                found.update(ChunkId(row[0]) for row in connection.execute(statement, batch))
        return found

    def removed_since(self, num_changes: int) -> tuple[ChunkId, ...]:
        """Return the chunks that were removed after so many changes, and that do not exist now. Raises as
        `num_changes`."""
        state_of(self._path)
        file = CorpusFile(self._path)
        with contextlib.closing(file), file.translating_errors(), file.reading() as connection:
            return tuple(ChunkId(row[0]) for row in connection.execute(sql_rows.SELECT_GONE, (num_changes,)))

    def chunks_before(self, chunk_ids: Collection[ChunkId], limit: int) -> dict[ChunkId, tuple[ChunkId, ...]]:
        """Return nothing: no question comes from a knowledge base that is not open."""
        return {}

    def chunks(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, Chunk]:
        """Return nothing, as `chunks_before`."""
        return {}

    def _read_state(self) -> tuple[str, int]:
        """Return identity and number of changes."""
        file = CorpusFile(self._path)
        with contextlib.closing(file), file.translating_errors(), file.reading() as connection:
            found = connection.execute("SELECT corpus_id, generation FROM state").fetchone()
        if found is None:
            raise CorruptKnowledgeBaseError(f"{self._path} has lost the record of its state")
        return str(found[0]), int(found[1])


def counts_of(path: Path) -> tuple[int, int]:
    """Return the numbers of documents and chunks of a corpus file. Raises as `CorpusFile.translating_errors`."""
    file = CorpusFile(path)
    with contextlib.closing(file), file.translating_errors(), file.reading() as connection:
        _, num_documents, num_chunks = connection.execute(sql_rows.SELECT_COUNTS).fetchone()
    return num_documents, num_chunks


def state_of(path: Path) -> State:
    """Return inode, time and size of a corpus file and its log; they change with its content.

    Raises:
        KnowledgeBaseNotFoundError: The file does not exist.
        StorageError: The file cannot be accessed.
    """
    try:
        found = [path.stat()]
        with contextlib.suppress(FileNotFoundError):
            found.append(os.stat(f"{path}-wal"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise KnowledgeBaseNotFoundError(f"there is no knowledge base in {path.parent}") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be accessed: {error.strerror or error}; check its permissions") from error
    return tuple((status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size) for status in found)
