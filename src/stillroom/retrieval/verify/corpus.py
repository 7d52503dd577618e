"""Is what SQLite holds whole? Its pages, each document's chunks, each chunk's vector; and how to make it whole.

A chunk's id is a hash of its document, place and text, so a text that was changed shows. A vector has no such seal: one
that is of another length, not finite or not of length 1 is made again from its text. A document that has lost something
else cannot be made whole from here: it is removed, and the next `add` of its file reads it again. What was said of the
file (`add --meta`) is kept until then.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, chunk_id_of, format_chunk_id
from stillroom.retrieval.store import rows
from stillroom.retrieval.store.corpus_file import read_beside
from stillroom.retrieval.verify.report import Finding, Steps, finding

_BATCH = 1000
_MAX_LENGTH_ERROR = 1e-3
"""Of a vector. Rounding is a ten-thousandth of it."""

Embed = Callable[[list[str]], NDArray[np.float32]]

_UNEVEN = """
    SELECT d.document_id FROM documents d LEFT JOIN
        (SELECT document_id, count(*) AS num, min(ordinal) AS low, max(ordinal) AS high FROM chunks
        GROUP BY document_id) c USING (document_id)
    WHERE d.num_chunks <> coalesce(c.num, 0) OR (c.num > 0 AND (c.low <> 0 OR c.high <> c.num - 1))"""
_LONE_CHUNKS = "SELECT chunk_id FROM chunks WHERE document_id NOT IN (SELECT document_id FROM documents)"
_LOST_DOCUMENTS = "SELECT DISTINCT document_id FROM chunks WHERE document_id NOT IN (SELECT document_id FROM documents)"
_UNREAD_LOST_SOURCE = f"{rows.UNREAD_SOURCE} OR substr(?, 1, length(path) + 1) = path || '#'"
_UNREAD_EMPTY_SOURCES = f"{rows.UNREAD_SOURCES} WHERE path NOT IN (SELECT path FROM documents)"
_LONE_VECTORS = "SELECT chunk_id FROM vectors WHERE chunk_id NOT IN (SELECT chunk_id FROM chunks)"
_LIVING_DEAD = "SELECT chunk_id FROM tombstones WHERE chunk_id IN (SELECT chunk_id FROM chunks)"
_GENERATIONS = """SELECT (SELECT generation FROM state), max(
    coalesce((SELECT max(generation) FROM vectors), 0), coalesce((SELECT max(generation) FROM tombstones), 0))"""
_ALL = f"""SELECT {rows.CHUNK_COLUMNS}, v.vector FROM chunks c LEFT JOIN vectors v USING (chunk_id)
    WHERE c.chunk_id > ? ORDER BY c.chunk_id LIMIT {_BATCH}"""


@dataclass(slots=True)
class CorpusDamage:
    """What is not whole."""

    pages: list[str] = field(default_factory=list)
    """What SQLite says of its file; where it says anything, nothing else was looked at."""
    documents: set[str] = field(default_factory=set)
    """Without all of their chunks, or with a text that is not the one they had."""
    lone_chunks: list[int] = field(default_factory=list)
    lost_documents: list[str] = field(default_factory=list)
    """Those that lone chunks were of."""
    lone_vectors: list[int] = field(default_factory=list)
    vectors: list[int] = field(default_factory=list)
    """Chunks whose vector is missing or none."""
    living_dead: list[int] = field(default_factory=list)
    """Chunks that are there and noted as removed."""
    behind: int = 0
    """Commits that rows know of and the generation does not."""

    def findings(self) -> Iterator[Finding]:
        """In words."""
        if self.pages:
            yield finding(
                "corpus",
                f"SQLite's own check fails: {self.pages[0]}",
                "the file is damaged. Repairing makes its indexes anew; where more is damaged, put the file back from "
                "a backup, or remove the folder and add the documents again",
                self.pages,
            )
        if self.documents:
            yield finding(
                "corpus",
                "documents that are not whole: a chunk is missing, or a text is not the one that was stored",
                "they are found by a part of what they say, or by what they never said. Repairing removes them; add "
                "their files again",
                sorted(self.documents),
            )
        if self.lone_chunks:
            yield finding(
                "corpus",
                "chunks of no document",
                "repairing removes them; add the files again that they came from",
                self.lost_documents,
            )
        if self.lone_vectors:
            yield finding("vectors", "vectors of no chunk", "repairing removes them", _named(self.lone_vectors))
        if self.vectors:
            yield finding(
                "vectors",
                "chunks without a vector, or with one that is none (another dimension, not finite, not of length 1)",
                "dense search misses or misplaces them, and indexes are not compared as long as there are any. "
                "Repairing embeds their texts again",
                _named(self.vectors),
            )
        if self.living_dead or self.behind:
            yield finding(
                "corpus",
                "the record of changes contradicts the chunks",
                "an index that follows it may lack some. Repairing corrects it",
                _named(self.living_dead),
            )


def check_corpus(path: Path, dimension: int, step: Steps) -> CorpusDamage:
    """Read all of it. Nobody writes meanwhile.

    Raises:
        KnowledgeBaseBusyError: somebody did, into a folder in which this process may not.
        sqlite3.DatabaseError: the file cannot be read so far.
    """
    damage = CorpusDamage()
    with read_beside(path) as database:
        said = [str(row[0]) for row in database.execute("PRAGMA integrity_check(20)")]
        if said != ["ok"]:
            damage.pages = said
            return damage
        damage.documents = {row[0] for row in database.execute(_UNEVEN)}
        damage.lone_chunks, damage.lone_vectors = _ids(database, _LONE_CHUNKS), _ids(database, _LONE_VECTORS)
        damage.lost_documents = [str(row[0]) for row in database.execute(_LOST_DOCUMENTS)]
        damage.living_dead = _ids(database, _LIVING_DEAD)
        generation, highest = database.execute(_GENERATIONS).fetchone()
        damage.behind = max(0, highest - generation)
        _check_chunks(database, dimension, damage, step)
    lone = set(damage.lone_chunks)
    damage.vectors = [chunk_id for chunk_id in damage.vectors if chunk_id not in lone]
    return damage


def repair_corpus(path: Path, damage: CorpusDamage, embed: Embed) -> None:
    """Make it whole, in one transaction that raises the generation, so that every index follows."""
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
    """One transaction."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._generation = max(database.execute(_GENERATIONS).fetchone()) + 1

    def run(self, damage: CorpusDamage, embedded: dict[int, bytes]) -> None:
        database = self._database
        self._many("DELETE FROM tombstones WHERE chunk_id = ?", damage.living_dead)
        self._stamp("UPDATE vectors SET generation = ? WHERE chunk_id = ?", damage.living_dead)
        for document_id in damage.documents:
            self._remove(_ids(database, "SELECT chunk_id FROM chunks WHERE document_id = ?", document_id))
            gone = database.execute("DELETE FROM documents WHERE document_id = ? RETURNING path", (document_id,))
            database.executemany(rows.UNREAD_SOURCE, gone.fetchall())
        for document_id in damage.lost_documents:
            database.execute(_UNREAD_LOST_SOURCE, (document_id, document_id))
        database.execute(_UNREAD_EMPTY_SOURCES)
        self._remove(damage.lone_chunks)
        self._remove(damage.lone_vectors)
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


def _check_chunks(database: sqlite3.Connection, dimension: int, damage: CorpusDamage, step: Steps) -> None:
    """Texts by their ids, vectors by their form."""
    last = -1
    while found := database.execute(_ALL, (last,)).fetchall():
        for row in found:
            chunk = rows.chunk(row)
            if not _is_own_text(chunk):
                damage.documents.add(str(chunk.document_id))
            elif not _is_vector(row[-1], dimension):
                damage.vectors.append(int(chunk.chunk_id))
        last = found[-1][0]
        step(len(found))


def _is_own_text(chunk: Chunk) -> bool:
    return chunk.chunk_id == chunk_id_of(chunk.document_id, chunk.ordinal, chunk.text)


def _is_vector(content: bytes | None, dimension: int) -> bool:
    if content is None or len(content) != 4 * dimension:
        return False
    vector = np.frombuffer(content, dtype=np.float32).astype(np.float64)
    return bool(np.isfinite(vector).all()) and abs(float(vector @ vector) - 1) < _MAX_LENGTH_ERROR


def _embedded(database: sqlite3.Connection, damage: CorpusDamage, embed: Embed) -> dict[int, bytes]:
    """New vectors of those chunks that stay, made before the transaction begins: it may take long."""
    found: dict[int, bytes] = {}
    for start in range(0, len(damage.vectors), _BATCH):
        batch = damage.vectors[start : start + _BATCH]
        statement = rows.SELECT_CHUNKS.format(",".join("?" * len(batch)))
        chunks = [rows.chunk(row) for row in database.execute(statement, batch)]
        chunks = [chunk for chunk in chunks if chunk.document_id not in damage.documents]
        vectors = embed([chunk.indexed_text for chunk in chunks]) if chunks else ()
        found |= {int(chunk.chunk_id): vector.tobytes() for chunk, vector in zip(chunks, vectors, strict=True)}
    return found


def _ids(database: sqlite3.Connection, statement: str, *parameters: object) -> list[int]:
    return [row[0] for row in database.execute(statement, parameters)]


def _named(chunk_ids: Sequence[int]) -> list[str]:
    return [format_chunk_id(ChunkId(chunk_id)) for chunk_id in chunk_ids]
