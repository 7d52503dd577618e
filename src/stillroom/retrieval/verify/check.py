"""`stillroom verify`: SQLite, vectors and postings of a knowledge base, each whole and all saying the same.

SQLite first, for the others are compared with it; uploaded files last. Repairing makes SQLite whole, then makes an
index that differs anew. The caller holds the write lock, unless it may not write and only looks.
"""

import dataclasses
import sqlite3
from pathlib import Path

from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import Clock
from stillroom.core.sqlite_errors import code_of, reason_of
from stillroom.errors import CorruptKnowledgeBaseError, StorageError
from stillroom.retrieval.index.bm25 import Bm25Index
from stillroom.retrieval.index.indexes import Indexes
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.folder import CORPUS
from stillroom.retrieval.verify.corpus import CorpusDamage, Embed, check_corpus, repair_corpus
from stillroom.retrieval.verify.indexes import check_dense, check_sparse
from stillroom.retrieval.verify.report import Finding, Steps, Tell, VerifyReport
from stillroom.retrieval.verify.uploads import check_uploads


class Verification:
    """One run."""

    def __init__(
        self, folder: Path, corpus: Corpus, indexes: Indexes, config: StillroomConfig, dimension: int, clock: Clock
    ) -> None:
        """`indexes`: those that searches use; they are told what was made anew."""
        self._folder, self._corpus, self._indexes = folder, corpus, indexes
        self._config, self._dimension, self._clock = config, dimension, clock

    def run(self, embed: Embed | None, tell: Tell) -> VerifyReport:
        """Check everything.

        Args:
            embed: makes vectors of texts; None repairs nothing.

        Raises:
            StorageError: the disk is full or failing.
        """
        began = self._clock.monotonic()
        findings, damage = self._check_corpus(embed, tell)
        if not damage.pages and not damage.vectors:
            findings += self._check_indexes(embed is not None, tell)
        if not damage.pages:
            findings += check_uploads(self._folder, self._corpus, self._config.documents)
        counts = (0, 0) if damage.pages else (self._corpus.num_documents, self._corpus.num_chunks)
        return VerifyReport(*counts, tuple(findings), self._clock.monotonic() - began)

    def _check_corpus(self, embed: Embed | None, tell: Tell) -> tuple[list[Finding], CorpusDamage]:
        path = self._folder / CORPUS
        try:
            num_chunks = self._corpus.num_chunks
            damage = check_corpus(path, self._dimension, Steps(num_chunks, _third(tell, 0)))
            found = list(damage.findings())
            if not found or embed is None:
                return found, damage
            repair_corpus(path, damage, embed)
            left = check_corpus(path, self._dimension, Steps(num_chunks, _third(tell, 0)))
        except sqlite3.DatabaseError as error:
            reason = reason_of(error)
            if code_of(error, 0) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                raise StorageError(f"{path}: {reason}; see to the disk and its free space, then check again") from None
            damage = CorpusDamage(pages=[reason])
            return list(damage.findings()), damage
        except CorruptKnowledgeBaseError as error:
            damage = CorpusDamage(pages=[str(error)])
            return list(damage.findings()), damage
        remaining = {finding.problem for finding in left.findings()}
        return [_marked(finding, finding.problem not in remaining) for finding in found], left

    def _check_indexes(self, is_repairing: bool, tell: Tell) -> list[Finding]:
        found = self._compare(tell)
        if not found or not is_repairing:
            return found
        parts = {finding.part for finding in found}
        self._indexes.rebuild(dense="dense" in parts, sparse="sparse" in parts)
        remaining = {finding.problem for finding in self._compare(tell)}
        return [_marked(finding, finding.problem not in remaining) for finding in found]

    def _compare(self, tell: Tell) -> list[Finding]:
        """With both indexes opened anew; an embedded collection, which only one may open, as it is open."""
        num_chunks = self._corpus.num_chunks
        with self._indexes.reopened_dense() as dense:
            found = list(check_dense(dense, self._folder, self._corpus, Steps(num_chunks, _third(tell, 1))))
        sparse = Bm25Index(self._folder / "sparse", self._corpus.corpus_id, self._corpus.commit_id)
        return found + list(check_sparse(sparse, self._corpus, Steps(num_chunks, _third(tell, 2))))


def _third(tell: Tell, number: int) -> Tell:
    """The work has three parts of as many chunks each."""
    return lambda done, total: tell(number * total + done, 3 * total)


def _marked(finding: Finding, is_repaired: bool) -> Finding:
    return dataclasses.replace(finding, is_repaired=is_repaired)
