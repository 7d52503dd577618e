"""Checks the corpus: SQLite's pages, the chunks of each document, the vector of each chunk; and repairs it.

A chunk's id is a hash of its document, ordinal and text, so a changed text is detected. A vector has no checksum: it is
embedded again if its dimension is wrong, it is not finite or its length is not 1. A document with other damage is
removed, and the next `add` of its file reads it again; metadata given with `add --meta` is kept.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stillroom.core.ids import chunk_id_of
from stillroom.retrieval.store import sql_rows
from stillroom.retrieval.store.corpus_file import separate_connection
from stillroom.retrieval.verify.verify_report import Finding, StepCounter, finding, hex_ids

_BATCH = 1000
_MAX_LENGTH_ERROR = 1e-3
"""Tolerance for the length of a vector; rounding causes 1e-7."""

Embed = Callable[[list[str]], NDArray[np.float32]]

_INCOMPLETE_DOCUMENTS = """
    SELECT d.document_id FROM documents d LEFT JOIN
        (SELECT document_id, count(*) AS num, min(ordinal) AS low, max(ordinal) AS high FROM chunks
        GROUP BY document_id) c USING (document_id)
    WHERE d.num_chunks <> coalesce(c.num, 0) OR (c.num > 0 AND (c.low <> 0 OR c.high <> c.num - 1))"""
_ORPHAN_CHUNKS = "SELECT chunk_id FROM chunks WHERE document_id NOT IN (SELECT document_id FROM documents)"
_LOST_DOCUMENTS = "SELECT DISTINCT document_id FROM chunks WHERE document_id NOT IN (SELECT document_id FROM documents)"
_UNREAD_LOST_SOURCE = f"{sql_rows.UNREAD_SOURCE} OR substr(?, 1, length(path) + 1) = path || '#'"
_UNREAD_EMPTY_SOURCES = f"{sql_rows.UNREAD_SOURCES} WHERE path NOT IN (SELECT path FROM documents)"
_ORPHAN_VECTORS = "SELECT chunk_id FROM vectors WHERE chunk_id NOT IN (SELECT chunk_id FROM chunks)"
_FALSE_TOMBSTONES = "SELECT chunk_id FROM tombstones WHERE chunk_id IN (SELECT chunk_id FROM chunks)"
_GENERATIONS = """SELECT (SELECT generation FROM state), max(
    coalesce((SELECT max(generation) FROM vectors), 0), coalesce((SELECT max(generation) FROM tombstones), 0))"""
_ALL = f"""SELECT {sql_rows.CHUNK_COLUMNS}, v.vector FROM chunks c LEFT JOIN vectors v USING (chunk_id)
    WHERE c.chunk_id > ? ORDER BY c.chunk_id LIMIT {_BATCH}"""


@dataclass(slots=True)
class CorpusDamage:
    """Damage found in a corpus."""

    pages: list[str] = field(default_factory=list)
    """Messages of SQLite's integrity check; if there are any, nothing else was checked."""
    documents: set[str] = field(default_factory=set)
    """Documents with missing chunks or changed texts."""
    orphan_chunks: list[int] = field(default_factory=list)
    lost_documents: list[str] = field(default_factory=list)
    """Documents of the orphan chunks."""
    orphan_vectors: list[int] = field(default_factory=list)
    vectors: list[int] = field(default_factory=list)
    """Chunks with a missing or invalid vector."""
    false_tombstones: list[int] = field(default_factory=list)
    """Chunks that exist and are recorded as removed."""
    generations_behind: int = 0
    """Difference between the highest generation of a row and the corpus' generation."""

    def findings(self) -> Iterator[Finding]:
        """Describe the damage."""
        if self.pages:
            yield finding(
                "corpus",
                f"SQLite's own check fails: {self.pages[0]}",
                "the file is damaged. Repairing rebuilds its indexes; if more is damaged, restore a backup, or remove "
                "the folder and add the documents again",
                self.pages,
            )
        if self.documents:
            yield finding(
                "corpus",
                "documents that are not whole: a chunk is missing, or a text has changed",
                "searches miss or misquote them. Repairing removes them; add their files again",
                sorted(self.documents),
            )
        if self.orphan_chunks:
            yield finding(
                "corpus",
                "chunks without a document",
                "repairing removes them; add their files again",
                self.lost_documents,
            )
        if self.orphan_vectors:
            yield finding("vectors", "vectors without a chunk", "repairing removes them", hex_ids(self.orphan_vectors))
        if self.vectors:
            yield finding(
                "vectors",
                "chunks with a missing or invalid vector (another dimension, not finite, not of length 1)",
                "dense search misses or misplaces them, and indexes are not compared until they are repaired. "
                "Repairing embeds their texts again",
                hex_ids(self.vectors),
            )
        if self.false_tombstones or self.generations_behind:
            yield finding(
                "corpus",
                "the record of changes contradicts the chunks",
                "an index that follows it may lack chunks. Repairing corrects it",
                hex_ids(self.false_tombstones),
            )


def check_corpus(path: Path, dimension: int | None, step: StepCounter) -> CorpusDamage:
    """Check the whole file. Precondition: no process writes.

    Args:
        dimension: Of the vectors; None if they are not in this file.

    Raises:
        KnowledgeBaseBusyError: Another process wrote to a folder that this process cannot write.
        sqlite3.DatabaseError: The file cannot be read.
    """
    damage = CorpusDamage()
    with separate_connection(path) as database:
        messages = [str(row[0]) for row in database.execute("PRAGMA integrity_check(20)")]
        if messages != ["ok"]:
            damage.pages = messages
            return damage
        damage.documents = {row[0] for row in database.execute(_INCOMPLETE_DOCUMENTS)}
        damage.orphan_chunks, damage.orphan_vectors = _ids(database, _ORPHAN_CHUNKS), _ids(database, _ORPHAN_VECTORS)
        damage.lost_documents = [str(row[0]) for row in database.execute(_LOST_DOCUMENTS)]
        damage.false_tombstones = _ids(database, _FALSE_TOMBSTONES)
        generation, highest = database.execute(_GENERATIONS).fetchone()
        damage.generations_behind = max(0, highest - generation)
        _check_chunks(database, dimension, damage, step)
    orphans = set(damage.orphan_chunks)
    damage.vectors = [chunk_id for chunk_id in damage.vectors if chunk_id not in orphans]
    return damage


def check_next_vectors(path: Path, dimension: int) -> list[int]:
    """Return the chunks whose vector in the next set (`vector_sets.py`) is invalid. Raises as `check_corpus`."""
    with separate_connection(path) as database:
        rows = database.execute("SELECT chunk_id, vector FROM next_vectors")
        return [chunk_id for chunk_id, vector in rows if not _is_valid_vector(vector, dimension)]


def repair_corpus(path: Path, damage: CorpusDamage, embed: Embed) -> None:
    """Repair a corpus in one transaction that raises the generation, so that every index follows."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA synchronous = FULL")
        if damage.pages:
            database.execute("REINDEX")
            return
        embedded = _embedded(database, damage, embed)
        database.execute("BEGIN IMMEDIATE")
        try:
            _Repair(database).run(damage, embedded)
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise


class _Repair:
    """The statements of one repair transaction."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._generation = max(database.execute(_GENERATIONS).fetchone()) + 1

    def run(self, damage: CorpusDamage, embedded: dict[int, bytes]) -> None:
        database = self._database
        self._many("DELETE FROM tombstones WHERE chunk_id = ?", damage.false_tombstones)
        self._stamp("UPDATE vectors SET generation = ? WHERE chunk_id = ?", damage.false_tombstones)
        for document_id in damage.documents:
            self._remove(_ids(database, "SELECT chunk_id FROM chunks WHERE document_id = ?", document_id))
            gone = database.execute("DELETE FROM documents WHERE document_id = ? RETURNING path", (document_id,))
            database.executemany(sql_rows.UNREAD_SOURCE, gone.fetchall())
        for document_id in damage.lost_documents:
            database.execute(_UNREAD_LOST_SOURCE, (document_id, document_id))
        database.execute(_UNREAD_EMPTY_SOURCES)
        self._remove(damage.orphan_chunks)
        self._remove(damage.orphan_vectors)
        database.executemany(
            "INSERT OR REPLACE INTO vectors (chunk_id, generation, vector) VALUES (?, ?, ?)",
            [(chunk_id, self._generation, vector) for chunk_id, vector in embedded.items()],
        )
        database.execute("UPDATE state SET generation = ?", (self._generation,))

    def _remove(self, chunk_ids: Sequence[int]) -> None:
        self._many("DELETE FROM chunks WHERE chunk_id = ?", chunk_ids)
        self._many("DELETE FROM vectors WHERE chunk_id = ?", chunk_ids)
        self._stamp("INSERT OR REPLACE INTO tombstones (generation, chunk_id) VALUES (?, ?)", chunk_ids)

    def _many(self, statement: str, chunk_ids: Sequence[int]) -> None:
        self._database.executemany(statement, [(chunk_id,) for chunk_id in chunk_ids])

    def _stamp(self, statement: str, chunk_ids: Sequence[int]) -> None:
        self._database.executemany(statement, [(self._generation, chunk_id) for chunk_id in chunk_ids])


def _check_chunks(database: sqlite3.Connection, dimension: int | None, damage: CorpusDamage, step: StepCounter) -> None:
    """Compare texts with chunk ids, and check dimension and length of vectors."""
    last = -1
    while found := database.execute(_ALL, (last,)).fetchall():
        for row in found:
            chunk = sql_rows.chunk(row)
            if chunk.chunk_id != chunk_id_of(chunk.document_id, chunk.ordinal, chunk.text):
                damage.documents.add(str(chunk.document_id))
            elif dimension is not None and not _is_valid_vector(row[-1], dimension):
                damage.vectors.append(int(chunk.chunk_id))
        last = found[-1][0]
        step(len(found))


def _is_valid_vector(content: bytes | None, dimension: int) -> bool:
    if content is None or len(content) != 4 * dimension:
        return False
    vector = np.frombuffer(content, dtype=np.float32).astype(np.float64)
    return bool(np.isfinite(vector).all()) and abs(float(vector @ vector) - 1) < _MAX_LENGTH_ERROR


def _embedded(database: sqlite3.Connection, damage: CorpusDamage, embed: Embed) -> dict[int, bytes]:
    """Embed the texts of lost vectors, except of documents that are removed; before the transaction, as it is slow."""
    found: dict[int, bytes] = {}
    for start in range(0, len(damage.vectors), _BATCH):
        batch = damage.vectors[start : start + _BATCH]
        statement = sql_rows.SELECT_CHUNKS.format(",".join("?" * len(batch)))
        chunks = [sql_rows.chunk(row) for row in database.execute(statement, batch)]
        chunks = [chunk for chunk in chunks if chunk.document_id not in damage.documents]
        vectors = embed([chunk.indexed_text for chunk in chunks]) if chunks else ()
        found |= {int(chunk.chunk_id): vector.tobytes() for chunk, vector in zip(chunks, vectors, strict=True)}
    return found


def _ids(database: sqlite3.Connection, statement: str, *parameters: object) -> list[int]:
    return [row[0] for row in database.execute(statement, parameters)]
