"""Opens the local folder of a knowledge base in PostgreSQL, or makes a new knowledge base there.

The manifest is in the database; the local folder has a copy. While the server cannot be reached, an existing copy is
opened: searches use it, and changes are refused.
"""

import contextlib
import datetime
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from stillroom.config.settings import StillroomConfig
from stillroom.core.private_files import close_to_others
from stillroom.errors import (
    ConfigError,
    DatabaseRefusedError,
    DatabaseUnavailableError,
    KnowledgeBaseBusyError,
    KnowledgeBaseNotFoundError,
    StorageError,
)
from stillroom.retrieval.atomic_files import write_atomically
from stillroom.retrieval.opened_folder import OpenedFolder
from stillroom.retrieval.store.folder import CORPUS, MANIFEST
from stillroom.retrieval.store.manifest import Manifest, load_manifest
from stillroom.retrieval.store.postgresql.address import DatabaseAddress, make_local_folder
from stillroom.retrieval.store.postgresql.database import ADVICE, Connection, Database, KnowledgeBaseRow
from stillroom.retrieval.store.postgresql.embedding_table import EmbeddingTable, create_embeddings
from stillroom.retrieval.store.postgresql.local_copy import copied_at, copied_row, prepare_copy
from stillroom.retrieval.store.postgresql.postgres_corpus import PostgresCorpus

logger = logging.getLogger(__name__)


def open_shared(
    folder: Path, address: DatabaseAddress, config: StillroomConfig, make_manifest: Callable[[], Manifest] | None
) -> OpenedFolder:
    """Open a knowledge base in PostgreSQL.

    Args:
        folder: Its local folder, absolute.
        make_manifest: Makes the settings of a new knowledge base; None makes no knowledge base.

    Raises:
        KnowledgeBaseNotFoundError: There is none, and `make_manifest` is None.
        DatabaseUnavailableError: The server cannot be reached, and there is no copy.
        DatabaseRefusedError: The server refuses the user, whether there is a copy or not.
        ConfigError: The index of a new one should be a Qdrant collection, or the database lacks pgvector for it.
    """
    database = Database(address)
    try:
        corpus, manifest = _open(folder, database, config, make_manifest)
    except DatabaseRefusedError:  # the copy is not for users who may not read the database
        database.close()
        raise
    except DatabaseUnavailableError as error:
        database.close()
        corpus, manifest = _open_copy(folder, Database(address), error)
    except BaseException:
        database.close()
        raise
    manifest.warn_of_ignored_settings(config, address)
    corpus.follow()
    return OpenedFolder(folder, manifest, corpus)


def _open(
    folder: Path, database: Database, config: StillroomConfig, make_manifest: Callable[[], Manifest] | None
) -> tuple[PostgresCorpus, Manifest]:
    row = database.find()
    if row is None:
        if make_manifest is None:
            raise KnowledgeBaseNotFoundError(
                f"there is no knowledge base {database.address}; make one with: "
                f"stillroom add PATH --kb '{database.address}'"
            )
        made = _checked(make_manifest())
        prepare = partial(create_embeddings, index=made.index, dimension=made.dimension)
        row = database.create(made.to_text(), prepare if made.index.kind == "pgvector" else _nothing)
    make_local_folder(folder, database.address)
    close_to_others(folder)
    _save(folder / MANIFEST, row)
    manifest = load_manifest(folder / MANIFEST)
    path = folder / CORPUS
    with database.transaction() as connection:
        prepare_copy(path, connection, row.kb, row.corpus_id)
    corpus = PostgresCorpus(path, database, row, embeddings=_embeddings(manifest, database.address, row.kb))
    try:
        with contextlib.suppress(KnowledgeBaseBusyError):  # another process of this machine does it
            corpus.refresh()
    except BaseException:
        corpus.close()
        raise
    return corpus, manifest


def _open_copy(folder: Path, database: Database, error: DatabaseUnavailableError) -> tuple[PostgresCorpus, Manifest]:
    """Open the copy without the server. Raises `error`: there is none."""
    path = folder / CORPUS
    row = copied_row(path)
    if row is None or not (folder / MANIFEST).exists():
        raise error
    unix = copied_at(path)
    when = (
        "" if unix is None else f", whose last change is of {datetime.datetime.fromtimestamp(unix):%Y-%m-%d %H:%M:%S}"
    )
    manifest = load_manifest(folder / MANIFEST)
    if manifest.index.kind == "pgvector":  # who needs the server gets the error, with its reason
        logger.warning("%s is away. Searches by words use the copy in %s%s", database.address, folder, when)
    else:
        reason = str(error).removesuffix(f"; {ADVICE}")
        logger.warning("%s. Searches use the copy in %s%s", reason, folder, when)
    corpus = PostgresCorpus(path, database, row, embeddings=_embeddings(manifest, database.address, row.kb))
    corpus.note_outage()
    return corpus, manifest


def _embeddings(manifest: Manifest, address: DatabaseAddress, kb: int) -> EmbeddingTable | None:
    """Return the table of the vectors, with a connection of its own, so that searches do not wait for commits."""
    if manifest.index.kind != "pgvector":
        return None
    return EmbeddingTable(Database(address, only_reads=True), kb, manifest.dimension)


def _nothing(connection: Connection, kb: int) -> None:
    """Other indexes need no table."""


def _checked(manifest: Manifest) -> Manifest:
    if manifest.index.kind == "qdrant":
        raise ConfigError(
            "index.kind = 'qdrant' does not go with a knowledge base in PostgreSQL, where each machine has an index of "
            "its own; use flat, hnsw or ivf_pq, or pgvector for an index in the database"
        )
    return manifest


def _save(path: Path, row: KnowledgeBaseRow) -> None:
    """Write the manifest to the local folder, unless it is there."""
    content = row.manifest.encode()
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == content:
            return
    try:
        write_atomically(path, content)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
