"""A run of `stillroom verify`: checks SQLite, then the indexes against it, then the uploaded files; repairs them.

Repairing fixes SQLite, then rebuilds each index that differs. Precondition: the caller holds the write lock, unless the
folder cannot be written and nothing is repaired.
"""

import dataclasses
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.sqlite_errors import code_of, reason_of
from stillroom.errors import CorruptKnowledgeBaseError, DocumentError, StorageError
from stillroom.retrieval.index.bm25 import Bm25Index
from stillroom.retrieval.index.indexes import Indexes
from stillroom.retrieval.intake.reading import source_of, without_ocr_mark
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.folder import CORPUS
from stillroom.retrieval.store.vector_sets import VectorSets
from stillroom.retrieval.uploaded_files import uploaded_files
from stillroom.retrieval.verify.check_corpus import (
    CorpusDamage,
    Embed,
    check_corpus,
    check_next_vectors,
    repair_corpus,
)
from stillroom.retrieval.verify.check_indexes import check_dense, check_sparse
from stillroom.retrieval.verify.verify_report import (
    Finding,
    OnProgress,
    StepCounter,
    UnfinishedReembedding,
    VerifyReport,
    finding,
    hex_ids,
)


class Verification:
    """One run of `stillroom verify`."""

    def __init__(
        self, folder: Path, corpus: Corpus, indexes: Indexes, config: StillroomConfig, dimension: int, clock: Clock
    ) -> None:
        self._folder, self._corpus, self._indexes = folder, corpus, indexes
        self._config, self._dimension, self._clock = config, dimension, clock

    def run(self, embed: Embed | None, on_progress: OnProgress) -> VerifyReport:
        """Check everything, and repair it if `embed` is given.

        Args:
            embed: Embeds texts whose vectors are lost; None repairs nothing.

        Raises:
            StorageError: The disk is full or failing.
        """
        began = self._clock.monotonic()
        findings, damage = self._check_corpus(None if self._corpus.is_copy else embed, on_progress)
        if not damage.pages and not damage.vectors:
            findings += self._check_indexes(embed is not None, on_progress)
        if damage.pages:
            return VerifyReport(0, 0, tuple(findings), self._clock.monotonic() - began)
        found, unfinished = self._check_next(embed is not None)
        findings += [*found, *_check_uploads(self._folder, self._corpus, self._config.documents)]
        counts = (self._corpus.num_documents, self._corpus.num_chunks)
        return VerifyReport(*counts, tuple(findings), self._clock.monotonic() - began, unfinished)

    def _check_next(self, is_repairing: bool) -> tuple[list[Finding], UnfinishedReembedding | None]:
        """Check the vectors of an unfinished change of the embedder."""
        sets = VectorSets(self._corpus)
        record = sets.record("next")
        if record is None:
            return [], None
        invalid = check_next_vectors(self._folder / CORPUS, record.dimension)
        if is_repairing:
            sets.delete_next(invalid)
        found = finding(
            "vectors",
            "invalid vectors of the next embedder (another dimension, not finite, not of length 1)",
            "searches do not use them. Repairing deletes them, and `stillroom reembed` makes them again",
            hex_ids(invalid),
        )
        unfinished = UnfinishedReembedding(record.model, sets.num_done(), self._corpus.num_chunks)
        return [dataclasses.replace(found, is_repaired=is_repairing)] if invalid else [], unfinished

    def _check_corpus(self, embed: Embed | None, on_progress: OnProgress) -> tuple[list[Finding], CorpusDamage]:
        path = self._folder / CORPUS
        try:
            num_chunks = self._corpus.num_chunks
            dimension = self._dimension if self._corpus.embedding_table is None else None
            damage = check_corpus(path, dimension, _counter(num_chunks, on_progress, 0))
            found = list(damage.findings())
            if not found or embed is None:
                return found, damage
            repair_corpus(path, damage, embed)
            left = check_corpus(path, self._dimension, _counter(num_chunks, on_progress, 0))
        except sqlite3.DatabaseError as error:
            reason = reason_of(error)
            if code_of(error, 0) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                raise StorageError(f"{path}: {reason}; check the disk and its free space, then verify again") from None
            damage = CorpusDamage(pages=[reason])
            return list(damage.findings()), damage
        except CorruptKnowledgeBaseError as error:
            damage = CorpusDamage(pages=[str(error)])
            return list(damage.findings()), damage
        return _marked(found, list(left.findings())), left

    def _check_indexes(self, is_repairing: bool, on_progress: OnProgress) -> list[Finding]:
        found = self._compare(on_progress)
        if not found or not is_repairing:
            return found
        parts = {one.part for one in found}
        self._indexes.rebuild(dense="dense" in parts, sparse="sparse" in parts)
        return _marked(found, self._compare(on_progress))

    def _compare(self, on_progress: OnProgress) -> list[Finding]:
        """Compare both indexes, opened again from their files (except an embedded collection), with the corpus."""
        num_chunks = self._corpus.num_chunks
        with self._indexes.reopened_dense() as dense:
            found = list(
                check_dense(dense, self._indexes.dense_folder, self._corpus, _counter(num_chunks, on_progress, 1))
            )
        sparse = Bm25Index(self._folder / "sparse", self._corpus.corpus_id, self._corpus.commit_id)
        return found + list(check_sparse(sparse, self._corpus, _counter(num_chunks, on_progress, 2)))


def _counter(num_chunks: int, on_progress: OnProgress, part: int) -> StepCounter:
    """Count the steps of one of three parts, each with a step per chunk."""
    return StepCounter(num_chunks, lambda done, total: on_progress(part * total + done, 3 * total))


def _marked(found: list[Finding], remaining: list[Finding]) -> list[Finding]:
    """Mark the findings that do not remain as repaired."""
    problems = {one.problem for one in remaining}
    return [dataclasses.replace(one, is_repaired=one.problem not in problems) for one in found]


def _check_uploads(folder: Path, corpus: Corpus, config: DocumentsConfig) -> Iterator[Finding]:
    """Compare uploaded files with their records in the corpus, by name and hash. A deleted file is not a finding: its
    text is in SQLite. Nothing is repaired: only the user knows whether the file or the index is right."""
    sources, paths = corpus.sources(), corpus.paths()
    unknown, changed = [], []
    for path in uploaded_files(Path(os.path.abspath(folder))):
        name = corpus.names.name_of(str(path))
        source = sources.get(name)
        if source is None or (not source.content_hash and name not in paths):
            unknown.append(path)
        elif source.content_hash and _hash(path, config) != without_ocr_mark(source.content_hash):
            changed.append(path)  # without a hash, some of its records were removed
    if unknown:
        yield finding(
            "uploads",
            "uploaded files that are not indexed",
            "searches do not find them: an upload or a removal was killed. A server indexes those of uploads when it "
            "starts. Upload them again, index them as they are (stillroom add FILE), or delete them",
            unknown,
            is_repairable=False,
        )
    if changed:
        yield finding(
            "uploads",
            "uploaded files that have changed since they were indexed",
            "searches find their old content. Upload them again, or index them as they are: stillroom add FILE",
            changed,
            is_repairable=False,
        )


def _hash(path: Path, config: DocumentsConfig) -> str:
    try:
        return source_of(path, None, config).content_hash
    except DocumentError:
        return ""
