"""Vector sets: the vectors that one embedding model made of the chunks. A change of the model makes a second set.

| table          | holds                                                                                            |
|----------------|--------------------------------------------------------------------------------------------------|
| `vector_sets`  | number, role and model of each set; empty until the model is changed for the first time          |
| `vectors`      | the `active` set, which searches use. Without a row in `vector_sets` it is set 0, the manifest's |
| `next_vectors` | the `next` set, while it is made. A vector is valid if its generation is its chunk's in `vectors` |
| `old_vectors`  | the `old` set, from the switch until it is deleted                                               |

An edit gives a chunk another generation, so its vector in `next_vectors` becomes invalid, without any code in the
writer. A switch renames two tables in one transaction. Chunks, generations and tombstones stay, so postings, kept KV
and citations do too. The index files of set 0 are in the folder of the knowledge base, those of set n in `vectors-n`.
"""

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stillroom.errors import KnowledgeBaseBusyError
from stillroom.retrieval.store import sql_rows
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.sql_rows import Changes

SET_FILES = ("dense.npz", "dense.lists", "list_heat.npz", "tuning.json", "qdrant", "qdrant.lock")
"""Files and folders of the dense index of a set."""

_FOLDER = "vectors-"

Role = Literal["active", "next", "old"]

_ACTIVE_NUMBER = "coalesce((SELECT number FROM vector_sets WHERE role = 'active'), 0)"
_SELECT_SET = "SELECT number, model, fingerprint, dimension FROM vector_sets WHERE role = ?"
_INSERT_SET = "INSERT INTO vector_sets (number, role, model, fingerprint, dimension) VALUES (?, ?, ?, ?, ?)"
_CREATE_NEXT = (
    "CREATE TABLE next_vectors (chunk_id INTEGER PRIMARY KEY, generation INTEGER NOT NULL, vector BLOB NOT NULL)"
)
_IS_MISSING = """NOT EXISTS (SELECT 1 FROM next_vectors n WHERE n.chunk_id = v.chunk_id
    AND n.generation = v.generation)"""
_SELECT_MISSING = f"""SELECT v.chunk_id, v.generation FROM vectors v WHERE (v.generation, v.chunk_id) > (?, ?)
    AND {_IS_MISSING} ORDER BY v.generation, v.chunk_id LIMIT ?"""
_PUT_NEXT = """INSERT OR REPLACE INTO next_vectors (chunk_id, generation, vector)
    SELECT chunk_id, generation, ? FROM vectors WHERE chunk_id = ? AND generation = ?"""
_DELETE_INVALID = """DELETE FROM next_vectors WHERE NOT EXISTS (SELECT 1 FROM vectors v
    WHERE v.chunk_id = next_vectors.chunk_id AND v.generation = next_vectors.generation)"""
_COUNT_DONE = "SELECT count(*) FROM next_vectors JOIN vectors USING (chunk_id, generation)"
SELECT_VALID_NEXT = "SELECT n.chunk_id, n.vector FROM next_vectors n JOIN vectors v USING (chunk_id, generation)"
_SELECT_NEXT = """SELECT n.chunk_id, n.vector FROM next_vectors n JOIN vectors v USING (chunk_id, generation)
    WHERE n.chunk_id IN ({})"""


class VectorsReplacedError(KnowledgeBaseBusyError):
    """The vectors of another model became active during the call; the same call with the new model succeeds."""


@dataclass(frozen=True, slots=True)
class VectorSetRecord:
    """One vector set and its model."""

    number: int
    model: str
    """Name, or absolute path, of the embedder."""
    fingerprint: str
    dimension: int

    def folder(self, knowledge_base: Path) -> Path:
        """Return the folder of its index files."""
        return knowledge_base / f"{_FOLDER}{self.number}" if self.number else knowledge_base

    def identity(self, corpus_id: str) -> str:
        """Return the name that index files and collections of the set carry. A restored backup may lead to another set
        of the same number, so it includes the fingerprint."""
        return f"{corpus_id}-{self.number}-{self.fingerprint[:16]}" if self.number else corpus_id


@dataclass(frozen=True, slots=True)
class MissingVectors:
    """Chunks without a valid vector in the next set, by generation and id; from one snapshot."""

    keys: tuple[tuple[int, int], ...]
    """Generation and id of each. If there are none, the set is complete up to `generation`."""
    generation: int
    """Of the corpus."""
    num_chunks: int
    """Of the corpus."""


class VectorSource(Protocol):
    """What a dense index follows: vectors by chunk, and their changes."""

    @property
    def corpus_id(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def num_chunks(self) -> int: ...

    def commit_id(self, generation: int) -> str | None: ...

    def num_added_since(self, generation: int) -> int: ...

    def changes_since(self, generation: int, num_chunks: int | None = None) -> Changes: ...

    def embeddings(self, chunk_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]: ...


class ActiveVectors:
    """The vectors of a set while it is the active one."""

    def __init__(self, corpus: Corpus, record: VectorSetRecord) -> None:
        self._corpus = corpus
        self._number = record.number
        self._statement = f"{sql_rows.SELECT_VECTORS} AND {_ACTIVE_NUMBER} = {record.number:d}"
        self.corpus_id = record.identity(corpus.corpus_id)
        self.commit_id = corpus.commit_id
        self.num_added_since, self.changes_since = corpus.num_added_since, corpus.changes_since

    @property
    def generation(self) -> int:
        return self._corpus.generation

    @property
    def num_chunks(self) -> int:
        return self._corpus.num_chunks

    def embeddings(self, chunk_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """As `Corpus.embeddings`. Raises VectorsReplacedError if the set is not the active one any more."""
        found = self._corpus.embeddings(chunk_ids, self._statement)
        if VectorSets(self._corpus).active_number != self._number:
            raise VectorsReplacedError("the embedding model was changed during this call; try again")
        return found


class NextVectors:
    """The vectors of the next set, as the corpus was at the generation up to which it is complete."""

    def __init__(self, corpus: Corpus, record: VectorSetRecord) -> None:
        self._corpus = corpus
        self.corpus_id = record.identity(corpus.corpus_id)
        self.commit_id = corpus.commit_id
        self.generation = self.num_chunks = 0
        """Set by `cover`."""

    def cover(self, complete: MissingVectors) -> None:
        """Show the corpus up to a generation for which no vector is missing."""
        assert not complete.keys
        self.generation, self.num_chunks = complete.generation, complete.num_chunks

    def num_added_since(self, generation: int) -> int:
        return len(self.changes_since(generation).added)

    def changes_since(self, generation: int, num_chunks: int | None = None) -> Changes:
        return self._corpus.changes_since(generation, num_chunks, self.generation)

    def embeddings(self, chunk_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return self._corpus.embeddings(chunk_ids, _SELECT_NEXT)


class VectorSets:
    """The sets of one corpus."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus

    @property
    def active_number(self) -> int:
        """Number of the active set; one cheap read."""
        with self._corpus.quick_reading() as connection:
            return int(connection.execute(f"SELECT {_ACTIVE_NUMBER}").fetchone()[0])

    def record(self, role: Role) -> VectorSetRecord | None:
        """Return the set of a role; None if there is none, or it is set 0 and the model was never changed."""
        with self._corpus.reading() as connection:
            return _record(connection, role)

    def begin(self, active: VectorSetRecord, model: str, fingerprint: str, dimension: int) -> VectorSetRecord:
        """Make the next set, or return the one that was begun with the same model. Another next set is deleted.

        Args:
            active: The active set, which is recorded with the first change of the model.

        Precondition: there is no old set.
        """
        with self._corpus.writing() as connection:
            if _record(connection, "active") is None:
                _insert(connection, active, "active")
            begun = _record(connection, "next")
            if begun is not None and begun.fingerprint == fingerprint:
                return begun
            _discard_next(connection)
            number = int(connection.execute("SELECT max(number) FROM vector_sets").fetchone()[0]) + 1
            made = VectorSetRecord(number, model, fingerprint, dimension)
            connection.execute(_CREATE_NEXT)
            connection.execute(f"CREATE INDEX vectors_by_generation_{number:d} ON next_vectors (generation)")
            _insert(connection, made, "next")
        return made

    def missing(self, after: tuple[int, int], limit: int) -> MissingVectors:
        """Return the first chunks without a valid vector whose generation and id are greater than `after`."""
        with self._corpus.reading() as connection, _snapshot(connection):
            keys = connection.execute(_SELECT_MISSING, (*after, limit)).fetchall()
            generation, _, num_chunks = connection.execute(sql_rows.SELECT_COUNTS).fetchone()
        return MissingVectors(tuple((row[1], row[0]) for row in keys), generation, num_chunks)

    def num_done(self) -> int:
        """Return the number of valid vectors of the next set. Reads every one."""
        with self._corpus.reading() as connection:
            return int(connection.execute(_COUNT_DONE).fetchone()[0])

    def put(self, keys: Sequence[tuple[int, int]], vectors: NDArray[np.float32]) -> None:
        """Store vectors [len(keys), d] in the next set; those of chunks that changed since are left out.

        Args:
            keys: Generation and id of each chunk when its text was read.
        """
        rows = [
            (vector.astype(np.float32, copy=False).tobytes(), chunk_id, generation)
            for (generation, chunk_id), vector in zip(keys, vectors, strict=True)
        ]
        with self._corpus.writing() as connection:
            connection.executemany(_PUT_NEXT, rows)

    def delete_next(self, chunk_ids: Sequence[int]) -> None:
        """Delete vectors of the next set."""
        with self._corpus.writing() as connection:
            connection.executemany("DELETE FROM next_vectors WHERE chunk_id = ?", [(one,) for one in chunk_ids])

    def switch(self, number: int) -> bool:
        """Make the next set the active one and the active one the old one, in one transaction. Needs the write lock.

        Returns:
            False, and changes nothing, if a vector is missing or the next set has another number.
        """
        return self._corpus.switch_vectors(number)

    def discard_next(self) -> None:
        """Delete the next set, if there is one. Its files stay until `delete_unused_files`."""
        with self._corpus.writing() as connection:
            _discard_next(connection)

    def drop_old(self) -> None:
        """Delete the vectors and the record of the old set. Needs the write lock; delete its files first."""
        with self._corpus.writing() as connection:
            connection.execute("DROP TABLE IF EXISTS old_vectors")
            connection.execute("DELETE FROM vector_sets WHERE role = 'old'")


def switch_tables(connection: sqlite3.Connection, number: int) -> bool:
    """Make the next set of a file the active one; see `VectorSets.switch`. Precondition: within a transaction."""
    if complete_next(connection, number) is None:
        return False
    connection.execute(_DELETE_INVALID)
    connection.execute("ALTER TABLE vectors RENAME TO old_vectors")
    connection.execute("ALTER TABLE next_vectors RENAME TO vectors")
    for role, old_role in (("old", "active"), ("active", "next")):
        connection.execute("UPDATE vector_sets SET role = ? WHERE role = ?", (role, old_role))
    return True


def complete_next(connection: sqlite3.Connection, number: int) -> VectorSetRecord | None:
    """Return the next set if it has this number and lacks no vector."""
    made = _record(connection, "next")
    if made is None or made.number != number:
        return None
    is_incomplete = connection.execute(f"SELECT 1 FROM vectors v WHERE {_IS_MISSING} LIMIT 1").fetchone()
    return None if is_incomplete else made


def adopt(connection: sqlite3.Connection, record: VectorSetRecord) -> None:
    """Note in a copy that its vectors are now those of another set, and discard the one that it was making."""
    active = _record(connection, "active")
    if active != record:
        _discard_next(connection)
        connection.execute("DELETE FROM vector_sets")
        _insert(connection, record, "active")


def is_of_later_set(folder: Path) -> bool:
    """Whether a folder has the index files of another set than set 0."""
    return folder.name.startswith(_FOLDER)


def delete_unused_files(folder: Path, sets: VectorSets) -> None:
    """Delete index files of sets that are neither active nor next, as far as possible. Needs the write lock.

    Args:
        folder: Folder of the knowledge base.
    """
    folders = list(folder.glob(f"{_FOLDER}*"))  # first: a set is recorded before its folder is made
    following = sets.record("next")
    used = {sets.active_number, None if following is None else following.number}
    for found in folders:
        if found.name.removeprefix(_FOLDER).isdecimal() and int(found.name.removeprefix(_FOLDER)) not in used:
            shutil.rmtree(found, ignore_errors=True)
    if 0 not in used:
        for name in SET_FILES:
            shutil.rmtree(folder / name, ignore_errors=True)
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)


def _record(connection: sqlite3.Connection, role: Role) -> VectorSetRecord | None:
    row = connection.execute(_SELECT_SET, (role,)).fetchone()
    return None if row is None else VectorSetRecord(*row)


def _insert(connection: sqlite3.Connection, record: VectorSetRecord, role: Role) -> None:
    connection.execute(_INSERT_SET, (record.number, role, record.model, record.fingerprint, record.dimension))


def _discard_next(connection: sqlite3.Connection) -> None:
    connection.execute("DROP TABLE IF EXISTS next_vectors")
    connection.execute("DELETE FROM vector_sets WHERE role = 'next'")


@contextlib.contextmanager
def _snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Let all statements read one state."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("COMMIT")
