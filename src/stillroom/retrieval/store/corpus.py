"""The corpus: every document, chunk and embedding of a knowledge base.

A `commit` is one transaction, so a document is stored whole or not at all. Each commit that changes documents raises
the generation and stamps the rows that it adds and removes. A search index asks `changes_since` for the rows that it
misses, or is rebuilt from the corpus without embedding anything again.

`SqliteCorpus` and `PostgresCorpus` implement it. The properties of both are in
`tests/retrieval/store/test_any_corpus.py`.
"""

import contextlib
import sqlite3
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stillroom.core.document import Chunk, DocumentInfo
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.retrieval.filters.sql import Condition
from stillroom.retrieval.store.document_names import DocumentNames
from stillroom.retrieval.store.sql_rows import (
    Changes,
    CommitReport,
    DocumentOrigin,
    SourceFile,
    SourceUpdate,
    StoredDocument,
)
from stillroom.retrieval.store.vector_table import VectorTable
from stillroom.telemetry import catalogue
from stillroom.telemetry.catalogue import Readings


@dataclass(frozen=True, slots=True)
class CopyState:
    """How a copy of a database stands."""

    answers: bool
    """Whether the database answered when it was last asked."""
    age_s: float
    """Seconds since the copy was last known to be up to date; before that, since it was opened."""

    def readings(self) -> Readings:
        return {catalogue.DATABASE_UP: float(self.answers), catalogue.COPY_AGE: self.age_s}


class Corpus(Protocol):
    """Thread-safe. `generation`, `existing` and `chunks` never wait for a commit: the engine calls them between two
    steps."""

    names: DocumentNames
    corpus_id: str
    """Id of this corpus and its copies."""
    is_copy: bool
    """Whether reads come from this machine's copy of a database, which has the bytes of uploaded files too."""
    embedding_table: VectorTable | None
    """Where the vectors are if the corpus has none itself: then `embeddings` reads from it."""

    @property
    def copy_state(self) -> CopyState | None:
        """How the copy stands; None if the corpus is none. Cheap."""
        ...

    def after_each_look(self, job: Callable[[], None]) -> None:
        """Let the thread that brings commits of other machines into the copy call `job` after each look. No-op if the
        corpus is no copy."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...

    @property
    def is_there(self) -> bool:
        """Whether the corpus that was opened still exists; cheap."""
        ...

    def check_is_there(self) -> None:
        """Raises KnowledgeBaseNotFoundError if the corpus was removed or replaced."""
        ...

    # Reading

    @property
    def generation(self) -> int:
        """Number of commits that changed documents; one cheap read."""
        ...

    def commit_id(self, generation: int) -> str | None:
        """Return the id of the commit that made a generation. An index stores it to know which state it was made from.
        "" if the commit has no id (earlier versions); None if the generation never existed."""
        ...

    @property
    def num_documents(self) -> int: ...

    @property
    def num_chunks(self) -> int: ...

    def documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        """Return documents in the order of their ids, those after `after`, at most `limit`."""
        ...

    def public_documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        """As `documents`, in the order of public ids."""
        ...

    def documents_of(self, name: str) -> list[DocumentInfo]:
        """Return the document of an id or public id, or the documents of a file name."""
        ...

    def origin_of(self, document_id: DocumentId) -> DocumentOrigin | None:
        """Return where a document came from; None if there is no such document."""
        ...

    def sources(self) -> dict[str, SourceFile]:
        """Return the record of each file, by name."""
        ...

    def pending(self) -> list[str]:
        """Return the names of files whose upload has not finished (`uploaded_files.note_pending`)."""
        ...

    def original_path(self, name: str) -> Path:
        """Return the path of a file from which documents came; it may be gone."""
        ...

    def document_ids(self, path: str) -> dict[DocumentId, str]:
        """Return the documents of a file with their content hashes."""
        ...

    def paths(self) -> dict[str, list[DocumentId]]:
        """Return the document ids of every file, by file name."""
        ...

    def chunks_of(
        self, document_id: DocumentId, offset: int = 0, limit: int | None = None
    ) -> list[tuple[Chunk, NDArray[np.float32]]]:
        """Return a document's chunks in order with embeddings [d], without the first `offset`, at most `limit`."""
        ...

    def bare_chunks_of(self, document_id: DocumentId, offset: int = 0, limit: int | None = None) -> list[Chunk]:
        """As `chunks_of`, without embeddings."""
        ...

    def chunks(self, chunk_ids: Sequence[int]) -> dict[ChunkId, Chunk]:
        """Return the chunks of these ids; removed chunks are absent."""
        ...

    def existing(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        """Return the ids that exist."""
        ...

    def removed_since(self, generation: int) -> tuple[ChunkId, ...]:
        """Return the chunks that were removed after a generation, and that do not exist now."""
        ...

    def chunks_before(self, chunk_ids: Collection[ChunkId], limit: int) -> dict[ChunkId, tuple[ChunkId, ...]]:
        """Return the chunks before each of these in its document, in order, at most the last `limit`."""
        ...

    def embeddings(
        self, chunk_ids: Sequence[int], statement: str = ...
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return ids [n] and embeddings [n, d] in the given order; removed chunks are left out.

        Args:
            statement: Selects ids and vectors, as `sql_rows.SELECT_VECTORS`, the default.
        """
        ...

    def num_added_since(self, generation: int) -> int:
        """Return the number of chunks that an index of a generation has to add."""
        ...

    def changes_since(self, generation: int, num_chunks: int | None = None, until: int | None = None) -> Changes:
        """Return the changes that an index of a generation misses. A chunk in both lists is to be removed, then added.

        Args:
            num_chunks: Return whole commits until this many chunks were added; None returns all.
            until: Last generation to return; None returns all.
        """
        ...

    def matching(self, condition: Condition) -> tuple[int, NDArray[np.int64]]:
        """Return the generation and, ascending, the chunks of all documents that match; from one snapshot. Other
        readers do not wait for it."""
        ...

    def field_names(self, limit: int) -> list[str]:
        """Return the names of metadata fields, sorted, at most `limit`."""
        ...

    # Writing

    def commit(
        self,
        documents: Sequence[StoredDocument] = (),
        removed: Iterable[DocumentId] = (),
        sources: Sequence[SourceUpdate] = (),
    ) -> CommitReport:
        """Add or replace documents, remove others, and update file records, in one transaction.

        Raises:
            KnowledgeBaseBusyError: Another process holds the corpus for more than 10 s.
        """
        ...

    def remove(self, document_ids: Collection[DocumentId]) -> int:
        """Remove documents, 500 per commit, so that readers can read in between. Returns the number of their chunks;
        raises as `commit`."""
        ...

    # The SQLite file that reads come from, for `VectorSets`

    def reading(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """Yield a connection for statements that only read. Raises as `CorpusFile.translating_errors`."""
        ...

    def quick_reading(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """Yield another connection, for short reads that never wait for a writer."""
        ...

    def writing(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """Run a transaction, which is rolled back if an exception leaves the context. Raises as `commit`."""
        ...

    def switch_vectors(self, number: int) -> bool:
        """See `VectorSets.switch`."""
        ...

    def expect_vectors(self, number: int) -> None:
        """Let later commits raise VectorsReplacedError if the active set is not this one, with which the caller embeds.
        Needs the write lock."""
        ...

    def changing_vectors(self) -> contextlib.AbstractContextManager[None]:
        """Keep other machines from changing the embedder in this context. Raises KnowledgeBaseBusyError."""
        ...
