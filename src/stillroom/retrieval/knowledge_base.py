"""A folder with documents, their embeddings and the indexes over them: what `stillroom add` fills and `ask` searches.

    kb/manifest.json     what it was made with; wins over the configuration
    kb/corpus.sqlite3    the truth: text and embeddings
    kb/dense.npz         projection: the dense index; dense.lists where its lists are on disk
    kb/sparse/           projection: the BM25 index
    kb/qdrant/           in place of dense.npz: a dense index of the kind qdrant, embedded
    kb/write.lock        held while writing; writer.json says by whom

One writer at a time, any number of readers, in any mix of threads and processes. More: docs/retrieval.md
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig, SearchMode, StillroomConfig
from stillroom.core.cancellation import Cancellation
from stillroom.core.clock import Clock, SystemClock
from stillroom.core.document import Chunk, DocumentInfo, SearchResult
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.core.private_files import close_to_others
from stillroom.errors import (
    CorruptKnowledgeBaseError,
    IncompatibleKnowledgeBaseError,
    KnowledgeBaseError,
    KnowledgeBaseNotFoundError,
    StorageError,
)
from stillroom.retrieval.chunker import Chunker
from stillroom.retrieval.digest import IndexDigest, index_digest
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.hybrid import Candidates, HybridSearch
from stillroom.retrieval.index.bm25 import DamagedPostingsError
from stillroom.retrieval.index.indexes import Indexes
from stillroom.retrieval.ingest import AddProgress, AddReport, Ingest, RemoveReport, documents_at
from stillroom.retrieval.intake.reading import Failures, FileReader
from stillroom.retrieval.kb_writing import Following, keeping_up
from stillroom.retrieval.loaders.metadata import given_metadata, with_given
from stillroom.retrieval.repairing import Repairs
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.folder import (
    CORPUS,
    MANIFEST,
    WriteLock,
    check_corpus_is_there,
    check_manifest_is_there,
    check_may_be_made,
)
from stillroom.retrieval.store.manifest import FORMAT_VERSION, Manifest, load_manifest, new_manifest, upgraded
from stillroom.retrieval.store.rows import PENDING, SourceFile, SourceUpdate
from stillroom.retrieval.tiers.hot_lists import ListFigures
from stillroom.retrieval.vector_index import NUM_STAGES, VectorIndex
from stillroom.retrieval.verify.check import Verification
from stillroom.retrieval.verify.report import Tell, VerifyReport


class KnowledgeBase:
    """An open knowledge base. Thread-safe; opening reads two small files, the rest is loaded when first needed."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        config: StillroomConfig,
        clock: Clock,
        like: "KnowledgeBase | None" = None,
    ) -> None:
        """Use `open`."""
        self._path = path
        self._manifest = manifest
        self._config = manifest.applied_to(config)
        manifest.warn_of_other_settings(config, path)
        self._clock = clock
        self._embedder: Embedder = Embedder(self._config.embedder, None if like is None else like._embedder)
        self._corpus = Corpus(path / CORPUS)
        self._dimension = manifest.dimension
        self._indexes = Indexes(path, self._corpus, self._config.index, manifest.dimension, qdrant=self._config.qdrant)
        self._search = HybridSearch(self._corpus, self._indexes, self._embedder, self._config.search, clock)
        self.hides_folders = False
        self._lock = WriteLock(path, clock, self._corpus.check_is_there)
        self._repairs = Repairs(path, self._indexes, self._lock, clock)
        self._checking = Lock()
        self._is_embedder_checked = False
        self._unreadable: Failures = {}

    @classmethod
    def open(
        cls,
        path: Path,
        config: StillroomConfig,
        *,
        create: bool = False,
        clock: Clock | None = None,
        like: "KnowledgeBase | None" = None,
    ) -> "KnowledgeBase":
        """Open the knowledge base in a folder.

        Args:
            create: make one where the folder is missing or empty.
            like: an open one with which to share the embedder's weights, and nothing else.

        Raises:
            KnowledgeBaseNotFoundError: there is none, and `create` is false.
            KnowledgeBaseError: the folder holds something else.
            IncompatibleKnowledgeBaseError: another version of Stillroom made it, or it has another embedder than the
                configuration names.
            CorruptKnowledgeBaseError: a file of it is damaged or missing.
            ModelNotFoundError: a new one was to be made and its embedder is not there.
        """
        path, clock = Path(os.path.abspath(path)), clock or SystemClock()
        check_manifest_is_there(path)
        if not (path / MANIFEST).exists():
            if not create:
                raise KnowledgeBaseNotFoundError(
                    f"there is no knowledge base in {path}; make one with: stillroom add PATH --kb {path}"
                )
            _create(path, config, clock)
        close_to_others(path)
        manifest = load_manifest(path / MANIFEST)
        check_corpus_is_there(path)
        if manifest.format_version != FORMAT_VERSION:
            with WriteLock(path, clock).held_to_open("upgrade"):
                manifest = upgraded(path / MANIFEST, manifest)
        return cls(path, manifest, config, clock, like)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    @property
    def identity(self) -> str:
        """Of this knowledge base and its copies, wherever they lie; another that is made in its place has another."""
        return self._corpus.corpus_id

    @property
    def is_there(self) -> bool:
        """Whether its folder still holds the knowledge base that was opened; one cheap look."""
        return self._corpus.is_there

    def check_is_there(self) -> None:
        """Raises KnowledgeBaseNotFoundError if `is_there` is false."""
        self._corpus.check_is_there()

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
        """Index files and folders; what has not changed since the last time costs nothing.

        Files that cannot be read are in the report and do not stop the others. An interruption loses only the batch it
        falls into; adding the same paths again does the rest.

        Args:
            metadata: of every file that is added. It goes before what the file says itself and holds until the file is
                removed; None as a value takes back what was said before.
            exclude: files and folders to pass over, as patterns in .gitignore.
            stop: cancels it between two pieces of work; what was committed until then is kept.

        Raises:
            KnowledgeBaseBusyError: somebody else is writing.
            ChangeCancelledError: `stop` was cancelled.
            UsageError: a path is empty or does not exist, or a pattern is none.
            IndexUnavailableError: the dense index is on a server that cannot be reached. What was committed until then
                is kept, and goes there next time.
        """
        said = given_metadata(metadata or {})
        with self._lock.held("add"), keeping_up(self._indexes):
            following = Following(self._corpus, self._indexes, progress, stop)
            reader = FileReader(self._config.documents, self._unreadable, following.check)
            ingest = Ingest(self._corpus, self._chunker(), self._checked_embedder(), reader, self._clock, following)
            return ingest.run(paths, said, exclude)

    def remove(self, targets: Sequence[str]) -> RemoveReport:
        """Forget documents: each target is a document id, a file (absolute or from the working folder) or a folder. If
        it is interrupted, the same again does the rest.

        Raises:
            UnknownDocumentError: no target matches anything; one that alone does not is in the report.
            KnowledgeBaseBusyError: somebody else is writing.
        """
        with self._lock.held("remove"), keeping_up(self._indexes):
            names, paths = self._corpus.names, self._corpus.paths()
            known = {one: names.path_of(name) for name, document_ids in paths.items() for one in document_ids}
            doomed, unknown = documents_at(targets, known, names)
            return RemoveReport(len(doomed), self._corpus.remove(doomed), unknown)

    def writing(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Nobody else writes in here, and this thread may add and remove. Raises as `WriteLock.held`."""
        return self._lock.reserved(what)

    def documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        """What is indexed, by document id; those behind `after`, and at most `limit`."""
        return self._corpus.documents(after, limit)

    def documents_of(self, name: str) -> list[DocumentInfo]:
        """The document of that id, public or not, or those of the file of that name or path; none if there are none."""
        return self._corpus.documents_of(self._corpus.names.name_of(name))

    def public_documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        """`documents`, by public id; those behind the public id `after`."""
        return self._corpus.public_documents(after, limit)

    def paths(self) -> list[str]:
        """Names of files that there are documents of."""
        return list(self._corpus.paths())

    def content_hashes(self, path: str) -> dict[DocumentId, str]:
        """Of each document of a file: a hash of what it says."""
        return self._corpus.document_ids(self._corpus.names.name_of(path))

    def expect(self, paths: Sequence[str], metadata: Mapping[str, object] | None) -> dict[str, SourceFile | None]:
        """Note files that are about to be indexed, with what is said of them: should this process be killed, another
        one can complete it. Inside `writing`.

        Returns:
            What was known of each, by name, for `unexpect`.

        Raises:
            UsageError: the metadata is none.
        """
        said, known = given_metadata(metadata or {}), self._corpus.sources()
        names = [self._corpus.names.name_of(path) for path in paths]
        before = {name: known.get(name) for name in names}
        noted = []
        for name, source in before.items():
            both = with_given({} if source is None else source.metadata, said)
            noted.append(SourceUpdate(name, SourceFile(name, PENDING, 0, "", both)))
        self._corpus.commit(sources=noted)
        return before

    def unexpect(self, before: Mapping[str, SourceFile | None]) -> None:
        """Take back what `expect` noted, or forget files (None). Inside `writing`."""
        self._corpus.commit(sources=[SourceUpdate(name, source) for name, source in before.items()])

    def expected(self) -> list[str]:
        """Names of files that `expect` noted and that were not indexed since."""
        return self._corpus.pending()

    def is_read(self, path: str) -> bool:
        """Whether a file was read to its end, and nothing of it was removed since."""
        source = self._corpus.sources().get(self._corpus.names.name_of(path))
        return source is not None and source.size >= 0

    @property
    def num_documents(self) -> int:
        """Files, and records of JSONL files."""
        return self._corpus.num_documents

    @property
    def num_chunks(self) -> int:
        return self._corpus.num_chunks

    @property
    def generation(self) -> tuple[int, int]:
        """Another one after every change of a document, whoever made it, and again when words find it; cheap."""
        return self._corpus.generation, self._indexes.sparse_generation

    @property
    def num_changes(self) -> int:
        """Of documents so far, whoever made them; one cheap read, whatever state the indexes are in."""
        return self._corpus.generation

    # Search

    def search(
        self, query: str, *, mode: SearchMode | None = None, top_k: int | None = None, where: str = ""
    ) -> SearchResult:
        """The chunks that match best, best first, also of what another process has added since; none where nothing was
        added. None takes the configured default.

        Args:
            where: a filter such as `year >= 2020 and team = legal` (docs/filters.md); blank allows every document.

        Raises:
            UsageError: the query is blank, the mode unknown, top_k less than 1, or the filter is none.
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
        """`search` in at most `num_stages` results: provisional ones, and in the end exactly what `search` gives if the
        documents do not change. Whoever iterates may stop at any stage. Raises as `search`, with the first."""
        needs_vectors = (mode or self._config.search.mode) != "sparse"
        self._repairs.before_search(needs_vectors=needs_vectors)
        if needs_vectors:
            self._checked_embedder()
        try:
            yield from self._search.search_staged(query, mode, top_k, num_stages, where)
        except DamagedPostingsError:
            self._repairs.mend_words()
            yield from self._search.search_staged(query, mode, top_k, 1, where)

    def hide_folders(self) -> None:
        """From now on, answer as to somebody who may not learn where files of this machine are: names and filters know
        documents by their public ids (`core.ids.public_id`)."""
        self.hides_folders = True
        self._search.hide_folders()

    def allowed(self, where: str) -> AllowedIds:
        """The chunks of all documents that a filter allows now: what `search` finds some of.

        Raises:
            FilterError: it is no filter.
        """
        return self._search.allowed(where)

    def candidates(self, query: str, num_candidates: int) -> Candidates:
        """What dense and sparse search each find, with the scores of both for every candidate, not fused."""
        self._checked_embedder()
        try:
            return self._search.candidates(query, num_candidates)
        except DamagedPostingsError:
            self._repairs.mend_words()
            return self._search.candidates(query, num_candidates)

    def record_ids(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, str]:
        """The JSONL record that each chunk comes from; chunks of other documents are left out."""
        found = self._corpus.chunks(chunk_ids)
        return {chunk_id: chunk.record_id for chunk_id, chunk in found.items() if chunk.record_id is not None}

    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        """Those of the chunks that are in the knowledge base now."""
        return self._corpus.existing(chunk_ids)

    def chunks(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, Chunk]:
        """The chunks of these ids; those that are gone are left out."""
        return self._corpus.chunks(chunk_ids)

    def chunks_of(self, document_id: DocumentId, offset: int = 0, limit: int | None = None) -> list[Chunk]:
        """A document's chunks in order, without the first `offset` and at most `limit`; none where there is no such
        document."""
        return [chunk for chunk, _ in self._corpus.chunks_of(document_id, offset, limit)]

    @property
    def index_config(self) -> IndexConfig:
        """As the dense index was made."""
        return self._config.index

    def dense_index(self) -> VectorIndex:
        """The dense index, brought up to date; for looking at and measuring, while nobody writes."""
        return self._indexes.current()[0]

    def search_effort(self) -> int | None:
        """See `Indexes.effort`."""
        return self._indexes.effort()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings [len(texts), dimension], each of length 1, in float32 arithmetic."""
        return self._checked_embedder().embed_queries(texts)

    def embed_question(self, question: str) -> NDArray[np.float32]:
        """The embedding [dimension] of a question, read-only; those of the last questions are kept."""
        return self._checked_embedder().embed_query(question)

    def digest(self) -> IndexDigest:
        """A hash of all that decides rankings: equal digests give equal rankings. Reads every chunk; while it does,
        nobody can write, if this process could.

        Raises:
            KnowledgeBaseBusyError: somebody is writing.
            StorageError: the postings are behind, and the folder cannot be written.
        """
        with self._lock.held_to_look("digest") as may_write:
            try:
                return self._digest(may_write)
            except CorruptKnowledgeBaseError:  # in a part of a file that nobody had asked for yet
                self._indexes.discard_dense()
                return self._digest(may_write)

    def verify(self, *, repair: bool = False, progress: Tell | None = None) -> VerifyReport:
        """Check SQLite, vectors and postings, each by itself and against the others (see `verify`); nobody can write
        meanwhile, if this process could.

        Args:
            repair: make whole what can be. A vector that was lost is embedded again, which needs the embedder.
            progress: told how many of how many steps are done.

        Raises:
            KnowledgeBaseBusyError: somebody is writing.
            StorageError: the disk is full or failing.
        """
        run = Verification(self._path, self._corpus, self._indexes, self._config, self._dimension, self._clock)
        with self._lock.held("verify") if repair else self._lock.held_to_look("verify"):
            return run.run(self._embed_again if repair else None, progress or (lambda done, total: None))

    @property
    def list_figures(self) -> ListFigures | None:
        """Of lists in RAM and on disk; None where `index` asks for no such tiers, or nothing was searched yet."""
        return self._indexes.list_figures

    # Life

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._repairs.close()
        self._indexes.close()
        self._corpus.close()

    def __enter__(self) -> "KnowledgeBase":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside

    def _chunker(self) -> Chunker:
        embedder = self._embedder
        return Chunker(embedder.tokenizer, self._config.chunker.max_tokens, embedder.max_seq_length)

    def _checked_embedder(self) -> Embedder:
        """The embedder, once its files are known to be those that made the stored vectors.

        Raises:
            IncompatibleKnowledgeBaseError: they are not.
        """
        with self._checking:
            if not self._is_embedder_checked:
                if self._embedder.fingerprint != self._manifest.fingerprint:
                    raise IncompatibleKnowledgeBaseError(
                        f"the embedder {self._manifest.model!r} is not the one that {self._path} was made with "
                        "(other files under the same name); put the old files back, or make the knowledge base again"
                    )
                self._is_embedder_checked = True
        return self._embedder

    def _digest(self, may_write: bool) -> IndexDigest:
        if may_write:
            self._indexes.write()
        elif not self._indexes.build_private_postings():
            raise StorageError(
                f"{self._path} cannot be written, and its postings are behind; search it where it can be"
            )
        return index_digest(self._manifest, self._corpus, *self._indexes.current())

    def _embed_again(self, texts: list[str]) -> NDArray[np.float32]:
        return self._checked_embedder().embed_documents(texts)


def _create(path: Path, config: StillroomConfig, clock: Clock) -> None:
    """An empty knowledge base in a missing or empty folder, unless somebody else has just made one."""
    check_may_be_made(path)
    manifest = new_manifest(config, Embedder(config.embedder))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        close_to_others(path)
        with WriteLock(path, clock).held_to_open("create"):
            if not (path / MANIFEST).exists():
                manifest.save(path / MANIFEST)
    except (OSError, StorageError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KnowledgeBaseError(f"{path} cannot be made: {reason}; choose another folder") from error
