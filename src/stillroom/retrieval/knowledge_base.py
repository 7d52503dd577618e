"""The knowledge base: documents in a folder, their embeddings and indexes; `add` fills it, `search` searches it.

    kb/manifest.json     settings that it was made with; they override the configuration
    kb/corpus.sqlite3    the truth: text and embeddings
    kb/dense.npz         projection: the dense index; dense.lists if its lists are on disk
    kb/vectors-1/        instead of dense.npz after the first change of the embedder, and so on
    kb/sparse/           projection: the BM25 index
    kb/qdrant/           instead of dense.npz: an embedded Qdrant collection
    kb/write.lock        held while writing; writer.json names the writer

One writer at a time, any number of readers, in any mix of threads and processes. With its documents in PostgreSQL, the
folder is this machine's copy, and other machines write too. More: docs/retrieval.md, docs/postgresql.md
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import EmbedderConfig, IndexConfig, SearchMode, StillroomConfig
from stillroom.core.cancellation import Cancellation
from stillroom.core.clock import Clock, SystemClock
from stillroom.core.document import SearchResult
from stillroom.errors import ConfigError, CorruptKnowledgeBaseError
from stillroom.retrieval import reembedding
from stillroom.retrieval.chunker import Chunker
from stillroom.retrieval.digest import IndexDigest, current_digest
from stillroom.retrieval.embedded_corpus import ActiveCorpus, EmbeddedCorpus
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.hybrid import Candidates, HybridSearch
from stillroom.retrieval.index.indexes import DenseFiles, Indexes
from stillroom.retrieval.ingest import AddObserver, AddProgress, AddReport, Ingest, RemoveReport
from stillroom.retrieval.intake.reading import Failures, FileReader
from stillroom.retrieval.loaders.document_metadata import given_metadata
from stillroom.retrieval.loaders.ocr_use import check_installed
from stillroom.retrieval.opened_folder import OpenedFolder
from stillroom.retrieval.opening import open_folder
from stillroom.retrieval.reembedding import (
    BackgroundReembedding,
    OnReembedProgress,
    Reembedding,
    ReembedReport,
    delete_old_vectors,
)
from stillroom.retrieval.repaired_search import RepairedSearch
from stillroom.retrieval.repairing import Repairs
from stillroom.retrieval.reranker import Reranker, score_all
from stillroom.retrieval.store.document_names import documents_at
from stillroom.retrieval.store.folder import WriteLock
from stillroom.retrieval.store.manifest import Manifest, new_manifest
from stillroom.retrieval.store.postgresql.address import address_of, local_folder
from stillroom.retrieval.store.vector_sets import ActiveVectors, VectorSetRecord, VectorSets
from stillroom.retrieval.stored_documents import StoredDocuments
from stillroom.retrieval.vector_index import NUM_STAGES
from stillroom.retrieval.verify.check import Verification
from stillroom.retrieval.verify.verify_report import OnProgress, VerifyReport


class KnowledgeBase(StoredDocuments):
    """An open knowledge base. Thread-safe. Opening reads two small files; the rest is loaded when first needed."""

    def __init__(
        self, opened: OpenedFolder, config: StillroomConfig, clock: Clock, weights_of: "KnowledgeBase | None" = None
    ) -> None:
        """Use `open`."""
        super().__init__(opened.corpus)
        self.path, manifest = opened.path, opened.manifest
        self._clock = clock
        self._weights_of = weights_of
        reranker = config.search.reranker
        self._reranker: Reranker | None = (
            Reranker(reranker, clock, None if weights_of is None else weights_of._reranker) if reranker else None
        )
        self._active = ActiveCorpus(self.corpus, manifest, config, self._open_vectors)
        self._active.manifest.warn_of_other_model(config, address_of(self.path) or self.path)
        self._sets = VectorSets(self.corpus)
        self.hides_folders = False
        self._lock = WriteLock(self.path, clock, self.corpus.check_is_there)
        self._repairs = Repairs(
            self.path, lambda: self._active.current().indexes, self._lock, clock, follows=self.corpus.is_copy
        )
        self.corpus.after_each_look(self._repairs.follow_look)
        self._search = RepairedSearch(self._active, self._repairs)
        self._reembedding = BackgroundReembedding(
            lambda on_progress, stop: self.reembed(
                progress=on_progress, stop=stop, num_together=reembedding.IN_BACKGROUND
            )
        )
        self._unreadable: Failures = {}

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: StillroomConfig,
        *,
        create: bool | Manifest = False,
        clock: Clock | None = None,
        weights_of: "KnowledgeBase | None" = None,
    ) -> "KnowledgeBase":
        """Open the knowledge base in a folder, or in PostgreSQL.

        Args:
            path: The folder, or a URL such as `postgresql://user@host/database?kb=name` (docs/postgresql.md).
            create: Make a new one if there is none; with the settings of a manifest if one is given.
            weights_of: An open knowledge base with which to share the embedder's weights, and nothing else.

        Raises as `opening.open_folder`.
        """
        clock = clock or SystemClock()
        made = create if isinstance(create, Manifest) else None
        manifest = (lambda: made or new_manifest(config, Embedder(config.embedder))) if create else None
        return cls(open_folder(local_folder(path), config, clock, manifest), config, clock, weights_of)

    @property
    def indexes(self) -> Indexes:
        """The dense and the sparse index, for measurements."""
        return self._active.opened.indexes

    # Documents

    def add(
        self,
        paths: Sequence[str | Path],
        *,
        progress: Callable[[AddProgress], None] | None = None,
        metadata: Mapping[str, object] | None = None,
        exclude: Sequence[str] = (),
        stop: Cancellation | None = None,
    ) -> AddReport:
        """Index files and folders; unchanged files cost nothing.

        Files that cannot be read are in the report and do not stop the others. An interruption loses only the current
        batch; adding the same paths again does the rest.

        Args:
            metadata: Metadata of every added file, kept until the file is removed. It overrides metadata in the file;
                None as a value removes a field given before.
            exclude: Patterns of files and folders to skip, as in .gitignore.
            stop: Cancels the call between two pieces of work; committed batches are kept.

        Raises:
            KnowledgeBaseBusyError: Another writer holds the lock.
            ChangeCancelledError: `stop` was cancelled.
            UsageError: A path is empty or does not exist, or a pattern is invalid.
            ConfigError: `documents.ocr` is on, and its library is not installed.
            IndexUnavailableError: The server with the dense index cannot be reached. Committed batches are kept and
                sent with the next change.
        """
        given = given_metadata(metadata or {})
        if self._active.config.documents.ocr == "on":
            check_installed()
        with self._changing("add") as current:
            observer = AddObserver(self.corpus, current.indexes, progress, stop)
            reader = FileReader(self._active.config.documents, self._unreadable, observer.check)
            embedder = current.checked_embedder()
            ingest = Ingest(self.corpus, self._chunker(embedder), embedder, reader, self._clock, observer)
            return ingest.run(paths, given, exclude)

    def remove(self, targets: Sequence[str]) -> RemoveReport:
        """Remove documents: each target is a document id, a file (absolute or relative) or a folder. After an
        interruption, the same call does the rest.

        Raises:
            UnknownDocumentError: No target names a document; single unknown targets are in the report.
            KnowledgeBaseBusyError: Another writer holds the lock.
        """
        with self._changing("remove"):
            names = self.corpus.names
            known = {id_: names.path_of(name) for name, ids in self.corpus.paths().items() for id_ in ids}
            found, unknown = documents_at(targets, known, names)
            return RemoveReport(len(found), self.corpus.remove(found), unknown)

    def writing(self, action: str) -> contextlib.AbstractContextManager[None]:
        """Hold the write lock; this thread may call `add` and `remove` in it. Raises as `WriteLock.held`."""
        return self._lock.reserved(action)

    @property
    def generation(self) -> tuple[int, int, int]:
        """Changes with every change of documents or of the embedder, by any process, and again when the postings show
        it; cheap."""
        current = self._active.current()
        return self.corpus.generation, current.indexes.sparse_generation, current.record.number

    # Search

    def search(
        self, query: str, *, mode: SearchMode | None = None, top_k: int | None = None, where: str = ""
    ) -> SearchResult:
        """Return the best chunks, best first, including documents that other processes have added since.

        Args:
            mode: None uses the configured mode; likewise `top_k`.
            where: A filter such as `year >= 2020 and team = legal` (docs/filters.md); blank allows every document.

        Raises:
            UsageError: The query is blank, the mode unknown, top_k less than 1, or the filter invalid.
        """
        return next(self.search_staged(query, mode=mode, top_k=top_k, num_stages=1, where=where))

    def search_staged(
        self,
        query: str,
        *,
        mode: SearchMode | None = None,
        top_k: int | None = None,
        num_stages: int = NUM_STAGES,
        where: str = "",
    ) -> Iterator[SearchResult]:
        """Yield up to `num_stages` results: provisional ones, then the result of `search` if the documents do not
        change. The caller may stop at any stage. Raises as `search`, with the first result."""
        return self._search.search_staged(query, mode, top_k, num_stages, where)

    def hide_folders(self) -> None:
        """From now on, name documents by public ids (`core.ids.public_id`) in names and filters, for callers that must
        not learn paths of this machine."""
        self.hides_folders = True
        self._active.hide_folders()

    def avoid_torch(self) -> None:
        """Embed queries without torch from now on, where that is possible (`Embedder.avoid_torch`)."""
        self._active.avoid_torch()

    def allowed(self, where: str) -> AllowedIds:
        """Return the chunks of all documents that a filter allows now. Raises FilterError if it is invalid."""
        return self._active.current().search.allowed(where)

    def candidates(self, query: str, num_candidates: int) -> Candidates:
        """Return the unfused candidates of dense and sparse search, each with both scores."""
        return self._search.candidates(query, num_candidates)

    @property
    def manifest(self) -> Manifest:
        """The settings that it was made with, and its present embedder."""
        return self._active.manifest

    @property
    def index_config(self) -> IndexConfig:
        """The settings that the dense index was made with."""
        return self._active.config.index

    @property
    def embedder(self) -> Embedder:
        """The embedder whose vectors searches use now. Raises as `EmbeddedCorpus.checked_embedder`."""
        return self._active.current().checked_embedder()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return float32 embeddings [len(texts), dimension], each of length 1."""
        return self.embedder.embed_queries(texts)

    def embed_sentences(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """As `embed`, of sentences that are compared with each other, in the type of documents' products; no search
        waits for it."""
        return self.embedder.embed_sentences(texts)

    def embed_question(self, question: str) -> NDArray[np.float32]:
        """Return the read-only embedding [dimension] of a question; the latest questions are cached."""
        return self.embedder.embed_query(question)

    def rerank(self, query: str, texts: Sequence[str]) -> list[float]:
        """Score each text for a query with the reranker.

        Raises:
            UsageError: `search.reranker` names no model.
            ModelError: the model cannot be used.
        """
        return score_all(self._reranker, query, texts)

    def digest(self) -> IndexDigest:
        """Hash everything that decides rankings: equal digests give equal rankings. Reads every chunk, under the write
        lock if the folder can be written.

        Raises:
            KnowledgeBaseBusyError: Another writer holds the lock.
            StorageError: The postings are behind, and the folder cannot be written.
        """
        with self._lock.held_if_writable("digest") as may_write:
            indexes = self._active.current().indexes
            try:
                return current_digest(self._active.manifest, self.corpus, indexes, may_write=may_write)
            except CorruptKnowledgeBaseError:  # in a part of a file that was not read before
                indexes.discard_dense()
                return current_digest(self._active.manifest, self.corpus, indexes, may_write=may_write)

    def verify(self, *, repair: bool = False, progress: OnProgress | None = None) -> VerifyReport:
        """Check SQLite, vectors and postings, each by itself and against the others, under the write lock if the folder
        can be written.

        Args:
            repair: Repair what can be repaired. Lost vectors are embedded again, which needs the embedder. A copy of a
                database is not repaired: remove the folder, and it is made again.
            progress: Called with the numbers of done and of all steps.

        Raises:
            KnowledgeBaseBusyError: Another writer holds the lock.
            StorageError: The disk is full or failing.
        """
        with self._lock.held("verify") if repair else self._lock.held_if_writable("verify"):
            current = self._active.current()
            run = Verification(
                self.path, self.corpus, current.indexes, self._active.config, current.record.dimension, self._clock
            )
            embed = self.embedder.embed_whole if repair else None
            return run.run(embed, progress or (lambda done, total: None))

    # The embedder

    @property
    def model(self) -> str:
        """Name of the embedder whose vectors searches use now."""
        return self._active.current().record.model

    @property
    def embedder_name(self) -> str:
        """Name of the embedder of the last search; no file is read."""
        return self._active.config.embedder.model

    def reembed(
        self,
        model: str | None = None,
        *,
        progress: OnReembedProgress | None = None,
        stop: Cancellation | None = None,
        num_together: int = reembedding.COMMITTED_TOGETHER,
    ) -> ReembedReport:
        """Embed every document again with another model, and then search with it. Searches use the present vectors
        until the switch, and documents may be changed meanwhile. An interrupted call can be repeated and continues.

        Args:
            model: None takes the model in the settings, or the present one, if its files have changed.
            num_together: Most chunks per commit; an interruption loses the current one.

        Raises:
            KnowledgeBaseBusyError: Another process does the same.
            ModelError: The model is missing, cannot be loaded, or is no embedding model.
            ConfigError: The index of the knowledge base does not fit the model's dimension, or is in pgvector.
            StorageError: The disk is full; searches go on, and the next call continues.
            ChangeCancelledError: `stop` was cancelled.
        """
        current = self._active.current()
        if self.corpus.embedding_table is not None:
            raise ConfigError(
                "the embedder of a knowledge base with index.kind = 'pgvector' cannot be changed in place; make a new "
                "one with the other embedder, and add the documents to it"
            )
        model = model or self._active.wanted_model or current.config.embedder.model
        asked = dataclasses.replace(current.config.embedder, model=model)
        config = dataclasses.replace(current.config, embedder=asked)
        run = Reembedding(self.path, self.corpus, config, self._new_embedder(asked), self._lock, self._clock)
        steps = progress or (lambda _: None), stop or Cancellation(), self._active.current
        return run.run(current.record, *steps, num_together)

    def begin_reembedding(self) -> None:
        """Call `reembed` in a thread if the settings name another embedder than that of the vectors. Idempotent."""
        if self._active.wanted_model is not None:
            self._reembedding.begin()

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._reembedding.end()
        self._repairs.close()
        self.indexes.close()
        self.corpus.close()

    def __enter__(self) -> "KnowledgeBase":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside

    def _open_vectors(self, record: VectorSetRecord, config: StillroomConfig) -> EmbeddedCorpus:
        """Open the corpus with the vectors of a set, which is the active one."""
        dense = DenseFiles(ActiveVectors(self.corpus, record), record.folder(self.path))
        indexes = Indexes(
            self.path,
            self.corpus,
            config.index,
            record.dimension,
            qdrant=config.qdrant,
            dense=dense,
            pgvector=config.pgvector,
        )
        embedder = self._new_embedder(config.embedder)
        search = HybridSearch(self.corpus, indexes, embedder, config.search, self._clock, self._reranker)
        return EmbeddedCorpus(record, config, embedder, indexes, search)

    def _new_embedder(self, config: EmbedderConfig) -> Embedder:
        """Make an embedder that loads nothing yet, and shares the weights of the other knowledge base if it can."""
        return Embedder(config, None if self._weights_of is None else self._weights_of._active.opened.embedder)

    @contextlib.contextmanager
    def _changing(self, action: str) -> Iterator[EmbeddedCorpus]:
        """Hold the write lock, and write the indexes at the end."""
        with self._lock.held(action):
            current = self._active.current()
            self.corpus.expect_vectors(current.record.number)
            delete_old_vectors(self.path, self._sets, self.corpus, self._active.config)
            with self._repairs.updating_indexes():
                yield current

    def _chunker(self, embedder: Embedder) -> Chunker:
        most = embedder.max_seq_length - embedder.num_prompt_tokens
        return Chunker(embedder.tokenizer, self._active.config.chunker.max_tokens, most)
