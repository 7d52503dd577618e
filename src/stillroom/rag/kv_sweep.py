"""Drops KV records of removed documents and tenants from the KV folder of a knowledge base. Needs no torch.

It runs before a model's KV is opened, and in `stillroom cache verify`. The notes of `kvstore.owners` name the owner of
each record. What is dropped depends on the owner's knowledge base:

- it exists: records that have seen a removed document are dropped;
- it is gone or replaced, or no note says where it was: all its records are dropped;
- it cannot be read now (rights, a failing disk): nothing is dropped, and a warning is logged.
"""

import functools
import logging
from dataclasses import dataclass, field
from pathlib import Path

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NO_TENANT, OwnerTag, owner_of, salt_of
from stillroom.errors import KnowledgeBaseNotFoundError, StillroomError
from stillroom.kvstore.files import KV_FOLDER
from stillroom.kvstore.owners import noted_owners, owner_note, remove_note
from stillroom.kvstore.sweep import Existing, SweepReport, sweep
from stillroom.retrieval.store.closed_corpus import ClosedCorpus
from stillroom.retrieval.store.folder import CORPUS

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class KvSweep:
    """Result of a sweep."""

    report: SweepReport = SweepReport()
    tenants: dict[str, ClosedCorpus] = field(default_factory=dict)
    """Readable document stores of the tenants that have a note, by the salt of the tenant's requests."""
    gone: list[OwnerTag] = field(default_factory=list)
    """Owners of tenants that had a note and no longer exist."""


def sweep_kv(knowledge_base: Path) -> KvSweep:
    """Drop KV of removed documents and tenants. A failing disk is logged, not raised."""
    root = knowledge_base / KV_FOLDER
    found = KvSweep()

    @functools.cache
    def existing_of(owner: OwnerTag) -> Existing | None:
        try:
            corpus = _documents_of(knowledge_base, owner, found)
        except StillroomError as error:
            return _all_exist(error)
        return None if corpus is None else functools.partial(_existing, corpus)

    found.report = sweep(root, existing_of)
    for owner in noted_owners(root):  # includes owners without records
        if existing_of(owner) is None:
            found.gone.append(owner)
            remove_note(root, owner)
    if found.report.num_removed:
        logger.info("%d records of KV dropped: their documents or tenants are gone", found.report.num_removed)
    if found.report.num_left:
        logger.warning("%d records of KV of documents that are gone cannot be removed", found.report.num_left)
    return found


def _existing(corpus: ClosedCorpus, chunks: set[ChunkId]) -> set[ChunkId]:
    try:
        return corpus.existing_chunks(chunks)
    except StillroomError as error:
        return _all_exist(error)(chunks)


def _all_exist(error: StillroomError) -> Existing:
    """Treats every chunk as existing, because the knowledge base cannot be read now."""
    logger.warning("the KV of a knowledge base that cannot be read stays on disk for now: %s", error)
    return lambda chunks: chunks


def _documents_of(knowledge_base: Path, owner: OwnerTag, found: KvSweep) -> ClosedCorpus | None:
    """The documents of an owner; None if they are gone or unknown. Raises StillroomError: they cannot be read now."""
    try:
        if owner == NO_TENANT:
            return ClosedCorpus(knowledge_base / CORPUS)
        note = owner_note(knowledge_base / KV_FOLDER, owner)
        if note is None:
            return None
        corpus = ClosedCorpus(note.knowledge_base / CORPUS)
    except KnowledgeBaseNotFoundError:
        return None
    salt = salt_of(note.tenant, corpus.identity)
    if owner_of(salt) != owner:
        return None
    found.tenants[salt] = corpus
    return corpus
