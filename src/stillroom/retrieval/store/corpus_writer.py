"""Writes documents to the corpus within one transaction; renames documents of earlier versions."""

import sqlite3
from collections.abc import Mapping, Sequence

import numpy as np

from stillroom.core.document import Chunk
from stillroom.core.ids import DocumentId, public_id
from stillroom.retrieval.store import sql_rows
from stillroom.retrieval.store.document_names import DocumentNames
from stillroom.retrieval.store.sql_rows import SourceUpdate, StoredDocument


class CorpusWriter:
    """The changes of one transaction. The generation rises only if a document changed."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._generation = int(connection.execute("SELECT generation FROM state").fetchone()[0]) + 1
        self._num_changes = 0

    def put(self, document: StoredDocument) -> None:
        """Add or replace a document. Unchanged chunks keep their generation, so indexes need not update them."""
        found = self._connection.execute(sql_rows.SELECT_CHUNKS_OF, (document.document_id, -1, 0)).fetchall()
        old: Mapping[int, Chunk] = {row[0]: sql_rows.chunk(row) for row in found}
        compared = self._connection.execute(sql_rows.SELECT_COMPARED, (document.document_id,)).fetchone()
        if compared != sql_rows.compared(document):
            self._num_changes += 1
        self._connection.execute(sql_rows.PUT_DOCUMENT, sql_rows.document_row(document, self._generation))
        new = {chunk.chunk_id for chunk in document.chunks}
        self._remove_chunks([chunk_id for chunk_id in old if chunk_id not in new])
        for chunk, vector in zip(document.chunks, document.vectors, strict=True):
            known = old.get(chunk.chunk_id)
            if known is not None and known.indexed_text == chunk.indexed_text:
                where = (chunk.start_line, chunk.end_line, chunk.start_page, chunk.end_page, chunk.chunk_id)
                self._connection.execute(sql_rows.MOVE_CHUNK, where)
                continue
            self._num_changes += 1
            self._connection.execute("DELETE FROM tombstones WHERE chunk_id = ?", (chunk.chunk_id,))
            self._connection.execute(sql_rows.PUT_CHUNK, sql_rows.chunk_row(chunk))
            vector_row = (chunk.chunk_id, self._generation, vector.astype(np.float32, copy=False).tobytes())
            self._connection.execute("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", vector_row)

    def remove(self, document_id: DocumentId) -> int:
        """Remove a document; the next `add` reads its file again. Returns the number of its chunks."""
        found = self._connection.execute("SELECT chunk_id FROM chunks WHERE document_id = ?", (document_id,))
        chunk_ids = [row[0] for row in found]
        self._remove_chunks(chunk_ids)
        gone = self._connection.execute("DELETE FROM documents WHERE document_id = ? RETURNING path", (document_id,))
        for (path,) in gone.fetchall():
            self._num_changes += 1
            self._connection.execute(sql_rows.UNREAD_SOURCE, (path,))  # keeps the given metadata
            self._connection.execute(sql_rows.DELETE_EMPTY_SOURCE, (path, path))
        return len(chunk_ids)

    def update_source(self, update: SourceUpdate) -> bool:
        """Replace the record of a file. Returns False if the file must be read again (`SourceUpdate.documents`)."""
        self._connection.execute("DELETE FROM sources WHERE path = ?", (update.path,))
        source, is_finished = update.source, True
        if source is not None and update.documents is not None:
            held = self._connection.execute(sql_rows.SELECT_HASHES, (update.path,)).fetchall()
            is_finished = dict(held) == update.documents
        if source is not None:
            row = sql_rows.source_row(source if is_finished else sql_rows.unread(source))
            self._connection.execute("INSERT INTO sources VALUES (?, ?, ?, ?, ?)", row)
        return is_finished

    def finish(self) -> None:
        if self._num_changes:
            self._connection.execute("UPDATE state SET generation = ?", (self._generation,))

    def _remove_chunks(self, chunk_ids: Sequence[int]) -> None:
        self._num_changes += len(chunk_ids)
        ids = [(chunk_id,) for chunk_id in chunk_ids]
        self._connection.executemany("DELETE FROM chunks WHERE chunk_id = ?", ids)
        self._connection.executemany("DELETE FROM vectors WHERE chunk_id = ?", ids)
        stamped = [(chunk_id, self._generation) for chunk_id in chunk_ids]
        self._connection.executemany("INSERT OR REPLACE INTO tombstones VALUES (?, ?)", stamped)


def rename_documents(connection: sqlite3.Connection, names: DocumentNames) -> None:
    """Upgrade names of earlier versions: uploads get relative names, and all documents public ids."""
    writer = CorpusWriter(connection)
    sizes = dict(connection.execute("SELECT path, -1 FROM documents").fetchall())
    sizes |= dict(connection.execute("SELECT path, size FROM sources").fetchall())
    for path, name in list(names.renamed(sizes)):
        connection.execute("UPDATE sources SET path = ? WHERE path = ?", (name, path))
        for row in connection.execute(sql_rows.SELECT_STORED, (path,)).fetchall():
            found = connection.execute(sql_rows.SELECT_CHUNKS_OF, (row[0], -1, 0)).fetchall()
            vectors = np.array([np.frombuffer(chunk[-1], dtype=np.float32) for chunk in found], dtype=np.float32)
            writer.put(sql_rows.stored_document(row, name, [sql_rows.chunk(chunk) for chunk in found], vectors))
            writer.remove(row[0])
    writer.finish()
    ids = connection.execute("SELECT document_id FROM documents").fetchall()
    named = [(public_id(document_id), document_id) for (document_id,) in ids]
    connection.executemany("UPDATE documents SET public_id = ? WHERE document_id = ?", named)
