"""A corpus in PostgreSQL, shared by several machines; see `Corpus`.

Reads come from this machine's copy (`local_copy.py`), so that searches wait for no network, and go on while the server
is away. Commits go to the database, and are in the copy when they return. A thread brings commits of other machines
into the copy within a second (`follower.py`).
"""

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stillroom.core.clock import Clock, SystemClock
from stillroom.core.document import Chunk
from stillroom.core.ids import DocumentId
from stillroom.core.private_files import make_folder, open_file
from stillroom.errors import DatabaseRefusedError, DatabaseUnavailableError, KnowledgeBaseBusyError, StorageError
from stillroom.retrieval.store import sql_rows
from stillroom.retrieval.store.corpus import CopyState
from stillroom.retrieval.store.corpus_file import separate_connection
from stillroom.retrieval.store.document_names import is_upload
from stillroom.retrieval.store.postgresql import statements as sql
from stillroom.retrieval.store.postgresql.committer import Committer, store_upload
from stillroom.retrieval.store.postgresql.database import Connection, Database, KnowledgeBaseRow, ReplacedError
from stillroom.retrieval.store.postgresql.embedding_table import EmbeddingTable
from stillroom.retrieval.store.postgresql.follower import LOOK_EVERY_S, Follower
from stillroom.retrieval.store.postgresql.local_copy import catch_up, original_folder
from stillroom.retrieval.store.sql_rows import CommitReport, SourceUpdate, StoredDocument
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from stillroom.retrieval.store.vector_sets import SELECT_VALID_NEXT, VectorSets, complete_next

logger = logging.getLogger(__name__)

_SYSTEM_CLOCK = SystemClock()

_MACHINE = "machine-id"
"""File with the id of a local folder, under which its unfinished uploads are noted."""

_SELECT_GENERATIONS = "SELECT chunk_id, generation FROM vectors WHERE chunk_id IN ({})"


class PostgresCorpus(SqliteCorpus):
    """Implements `Corpus`."""

    is_copy = True

    def __init__(
        self,
        path: Path,
        database: Database,
        row: KnowledgeBaseRow,
        look_every_s: float = LOOK_EVERY_S,
        clock: Clock = _SYSTEM_CLOCK,
        embeddings: EmbeddingTable | None = None,
    ) -> None:
        """Open the copy at `path`, which `prepare_copy` has made.

        Args:
            embeddings: Table of the vectors; None: they are in the copy.

        Raises:
            CorruptKnowledgeBaseError: The copy is damaged.
        """
        self._is_replaced = False
        self._database, self._row = database, row
        self.embedding_table = self._embeddings = embeddings
        super().__init__(path)
        self._catching_up = threading.Lock()
        self._clock = clock
        self._caught_up_at = clock.monotonic()
        self._shown = -1
        """Revision that the copy showed last."""
        self._embedding_with: int | None = None
        """Number of the vector set with whose model this machine embeds; None takes that of the copy."""
        self._after_look: Callable[[], None] = lambda: None
        self._follower = Follower(database, row.kb, self.look, look_every_s)

    def follow(self) -> None:
        """Begin to bring commits of other machines into the copy. Idempotent."""
        self._follower.begin()

    def after_each_look(self, job: Callable[[], None]) -> None:
        self._after_look = job

    def note_outage(self) -> None:
        """Note that the server cannot be reached, and that the caller has logged it."""
        self._follower.is_away = True

    @property
    def copy_state(self) -> CopyState:
        return CopyState(not self._follower.is_away, self._clock.monotonic() - self._caught_up_at)

    def close(self) -> None:
        self._follower.end()
        self._database.close()
        if self._embeddings is not None:
            self._embeddings.close()
        super().close()

    @property
    def is_there(self) -> bool:
        return not self._is_replaced and super().is_there

    def pending(self) -> list[str]:
        """Return the names of this machine's unfinished uploads; their files are here."""
        mine = self._machine_id()
        with self.reading() as connection:
            found = connection.execute(f"SELECT path, content_hash FROM sources WHERE size = {sql_rows.PENDING}")
            return sorted(path for path, machine in found if machine == mine)

    def original_path(self, name: str) -> Path:
        """Return the path of a file. An upload is brought here from the database, if it is there."""
        if not is_upload(name):
            return super().original_path(name)
        folder = original_folder(self._path.parent, name)
        path = folder / Path(name).name
        if not path.exists():
            self._bring(name, path)
        return path if path.exists() else super().original_path(name)

    def chunks_of(
        self, document_id: DocumentId, offset: int = 0, limit: int | None = None
    ) -> list[tuple[Chunk, NDArray[np.float32]]]:
        """As `Corpus.chunks_of`. Chunks whose vector another machine has just replaced are left out."""
        found = super().chunks_of(document_id, offset, limit)
        if self._embeddings is None or not found:
            return found
        ids = [int(chunk.chunk_id) for chunk, _ in found]
        known = dict(self._select_in(_SELECT_GENERATIONS, ids))
        try:
            stored = self._embeddings.stored(ids)
        except DatabaseRefusedError:
            raise
        except DatabaseUnavailableError as error:
            raise DatabaseUnavailableError(f"nothing was changed: {error}") from error
        vectors = {
            chunk_id: vector
            for chunk_id, generation, vector in zip(
                stored.ids.tolist(), stored.generations.tolist(), stored.vectors, strict=True
            )
            if known.get(chunk_id) == generation
        }
        return [(chunk, vectors[chunk.chunk_id]) for chunk, _ in found if chunk.chunk_id in vectors]

    def embeddings(
        self, chunk_ids: Sequence[int], statement: str = sql_rows.SELECT_VECTORS
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """As `Corpus.embeddings`. Raises IndexUnavailableError: they are in the database, which cannot be reached."""
        if self._embeddings is None:
            return super().embeddings(chunk_ids, statement)
        return self._embeddings.vectors_of(chunk_ids)

    def commit(
        self,
        documents: Sequence[StoredDocument] = (),
        removed: Iterable[DocumentId] = (),
        sources: Sequence[SourceUpdate] = (),
    ) -> CommitReport:
        """As `Corpus.commit`. Raises also DatabaseUnavailableError: nothing was changed, unless the connection broke
        while the server committed; the same call can be repeated in both cases."""
        self.check_is_there()
        documents, removed = list(documents), list(removed)
        sources = [self._own(update) for update in sources]
        with self._noticing_removal(), self._database.transaction() as connection:
            for name, path in self._uploads(sources):
                store_upload(connection, self._row.kb, name, path)
            made_by = VectorSets(self).active_number if self._embedding_with is None else self._embedding_with
            committer = Committer(connection, self._row.kb, self.corpus_id, self._embeddings, made_by)
            committer.put(documents)
            committer.remove(removed)
            for update in sources:
                committer.update_source(update)
            report = committer.finish()
        self._show(committer.revision)
        return report

    def switch_vectors(self, number: int) -> bool:
        """As `VectorSets.switch`: replace every vector in the database by that of the next set of this machine.

        Other commits wait. Copies follow as with any commit, and then have the same set.
        """
        self.refresh()
        with self._noticing_removal(), self._database.transaction() as connection:
            committer = Committer(connection, self._row.kb, self.corpus_id)
            with separate_connection(self._path) as copy:
                copy.execute("BEGIN")
                made = complete_next(copy, number)
                if committer.revision != self._shown + 1 or made is None:
                    return False
                committer.replace_vectors(made, copy.execute(SELECT_VALID_NEXT))
            committer.finish()
        self._show(committer.revision)
        return True

    def expect_vectors(self, number: int) -> None:
        self._embedding_with = number

    @contextlib.contextmanager
    def changing_vectors(self) -> Iterator[None]:
        with contextlib.closing(self._database.connect()) as connection:
            with self._database.translating_errors():
                is_alone = connection.execute(sql.LOCK_EMBEDDER, (self._row.kb,)).fetchone()[0]
            if not is_alone:
                raise KnowledgeBaseBusyError(
                    f"another machine is embedding the documents of {self._database.address} again; wait until it has "
                    "finished"
                )
            yield

    def catch_up(self, connection: Connection) -> None:
        """Bring the copy up to date; one cheap read if it is. Raises as `local_copy.catch_up`."""
        with self._catching_up, self._noticing_removal(), self._database.translating_errors():
            row = connection.execute(sql.SELECT_STATE, (self._row.kb,)).fetchone()
            if row is None or row[2] != self._shown or row[0] != self.corpus_id:
                self._shown = catch_up(self._path, connection, self._row, self._clock.unix())
            self._caught_up_at = self._clock.monotonic()

    def look(self, connection: Connection) -> None:
        """Bring the copy up to date, then what is made of it (`after_each_look`). Raises as `catch_up`."""
        self.catch_up(connection)
        self._after_look()

    def refresh(self) -> None:
        """Bring the copy up to date. Raises as `Database.transaction` and `catch_up`."""
        with self._database.connection() as connection:
            self.catch_up(connection)

    @contextlib.contextmanager
    def _noticing_removal(self) -> Iterator[None]:
        try:
            yield
        except ReplacedError:
            self._is_replaced = True
            raise

    def _show(self, revision: int) -> None:
        """Bring the copy up to a revision of this process."""
        while self._shown < revision:
            try:
                self.refresh()
            except KnowledgeBaseBusyError:  # another process of this machine does it
                pass
            except DatabaseUnavailableError as error:
                logger.warning("the change is committed, and searches show it when the server is back: %s", error)
                return

    def _own(self, update: SourceUpdate) -> SourceUpdate:
        """Note in the record of an unfinished upload that its file is on this machine."""
        source = update.source
        if source is None or source.size != sql_rows.PENDING:
            return update
        return SourceUpdate(update.path, sql_rows.marked(source, self._machine_id()))

    def _uploads(self, sources: Sequence[SourceUpdate]) -> Iterator[tuple[str, Path]]:
        """Yield name and path of each uploaded file whose record is finished and whose bytes are here."""
        for update in sources:
            path, source = Path(self.names.path_of(update.path)), update.source
            is_finished = source is not None and source.size != sql_rows.PENDING
            if is_finished and is_upload(update.path) and path.is_file():
                yield update.path, path

    def _bring(self, name: str, path: Path) -> None:
        partial = path.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            with self._database.transaction() as connection, connection.cursor(name="stillroom_upload") as cursor:
                cursor.execute(sql.SELECT_UPLOAD, (self._row.kb, sql.key_of(name)))
                first = cursor.fetchone()
                if first is None:
                    return
                make_folder(path.parent)
                with open_file(partial) as file:
                    file.write(first[0])
                    for (content,) in cursor:
                        file.write(content)
            os.replace(partial, path)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
        finally:
            partial.unlink(missing_ok=True)

    def _machine_id(self) -> str:
        path = self._path.with_name(_MACHINE)
        with contextlib.suppress(FileNotFoundError):
            return path.read_text(encoding="ascii")
        own = uuid.uuid4().hex
        with contextlib.suppress(FileExistsError), path.open("x", encoding="ascii") as file:
            file.write(own)
        return path.read_text(encoding="ascii")
