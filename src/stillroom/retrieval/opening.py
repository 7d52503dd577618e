"""Opens the folder of a knowledge base, or makes a new one."""

import os
from collections.abc import Callable
from pathlib import Path

from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.private_files import close_to_others
from stillroom.errors import ConfigError, KnowledgeBaseError, KnowledgeBaseNotFoundError, StorageError
from stillroom.retrieval.opened_folder import OpenedFolder
from stillroom.retrieval.opening_shared import open_shared
from stillroom.retrieval.store.folder import (
    CORPUS,
    MANIFEST,
    WriteLock,
    check_corpus_exists,
    check_is_empty,
    check_manifest_exists,
)
from stillroom.retrieval.store.manifest import FORMAT_VERSION, Manifest, load_manifest, upgraded
from stillroom.retrieval.store.postgresql.address import address_of
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus


def open_folder(
    path: Path, config: StillroomConfig, clock: Clock, make_manifest: Callable[[], Manifest] | None = None
) -> OpenedFolder:
    """Open the knowledge base in a folder.

    Args:
        make_manifest: Makes the settings of a new knowledge base; None makes no knowledge base.

    Raises:
        KnowledgeBaseNotFoundError: There is none, and `make_manifest` is None.
        KnowledgeBaseError: The folder holds other files.
        IncompatibleKnowledgeBaseError: It has a later format.
        CorruptKnowledgeBaseError: One of its files is damaged or missing.
        ModelNotFoundError: A new one was to be made, and its embedder is missing.
        ConfigError: A new one was to be made, and its index needs a knowledge base in PostgreSQL.
        DatabaseUnavailableError: Its database cannot be reached, and this machine has no copy.
    """
    path = Path(os.path.abspath(path))
    address = address_of(path)
    if address is not None:
        return open_shared(path, address, config, make_manifest)
    check_manifest_exists(path)
    if not (path / MANIFEST).exists():
        if make_manifest is None:
            raise KnowledgeBaseNotFoundError(
                f"there is no knowledge base in {path}; make one with: stillroom add PATH --kb {path}"
            )
        _create(path, clock, make_manifest)
    close_to_others(path)
    manifest = load_manifest(path / MANIFEST)
    check_corpus_exists(path)
    if manifest.format_version != FORMAT_VERSION:
        with WriteLock(path, clock).held_while_opening("upgrade"):
            manifest = upgraded(path / MANIFEST, manifest)
    manifest.warn_of_ignored_settings(config, path)
    return OpenedFolder(path, manifest, SqliteCorpus(path / CORPUS))


def _create(path: Path, clock: Clock, make_manifest: Callable[[], Manifest]) -> None:
    """Make an empty knowledge base in a missing or empty folder, unless another process has just made one."""
    check_is_empty(path)
    manifest = make_manifest()
    if manifest.index.kind == "pgvector":
        raise ConfigError(
            f"index.kind = 'pgvector' needs a knowledge base in PostgreSQL, and {path} is a folder; give "
            "--kb postgresql://user@host/database?kb=name, or use another index.kind"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        close_to_others(path)
        with WriteLock(path, clock).held_while_opening("create"):
            if not (path / MANIFEST).exists():
                manifest.save(path / MANIFEST)
    except (OSError, StorageError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KnowledgeBaseError(f"{path} cannot be made: {reason}; choose another folder") from error
