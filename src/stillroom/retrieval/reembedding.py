"""Embeds the chunks of a knowledge base again with another model, while searches and changes of documents go on.

1. `VectorSets.begin` makes the next set beside the active one (`store/vector_sets.py`).
2. Chunks without a vector in it are embedded and stored batch by batch, without the write lock. Documents that are
   added meanwhile are embedded by their writer with the present model, and here with the next one.
3. The dense index of the next set is built in its own folder.
4. Under the write lock the last changes are caught up, and one transaction makes the next set the active one.
5. The old vectors and their index are deleted.

Every step can be interrupted: the next run continues with the chunks that are missing, and the next writer deletes what
step 5 left. Only one process at a time does this, under `reembed.lock`.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from stillroom.config.settings import StillroomConfig
from stillroom.core.cancellation import Cancellation
from stillroom.core.clock import Clock
from stillroom.core.folder_lock import FolderLock
from stillroom.core.ids import ChunkId
from stillroom.errors import (
    ChangeCancelledError,
    ConfigError,
    EngineClosedError,
    IndexUnavailableError,
    KnowledgeBaseBusyError,
    KnowledgeBaseNotFoundError,
    ModelError,
    StillroomError,
    StorageError,
)
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.index.indexes import DenseFiles, Indexes
from stillroom.retrieval.index.qdrant_index import CollectionStore
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.folder import REEMBED, WriteLock
from stillroom.retrieval.store.vector_sets import (
    ActiveVectors,
    NextVectors,
    VectorSetRecord,
    VectorSets,
    delete_unused_files,
)

logger = logging.getLogger(__name__)

COMMITTED_TOGETHER = 512
"""Most chunks that are embedded and committed together."""

_FIRST_COMMITTED = 32
_SECONDS_PER_COMMIT = 5.0
"""The number of chunks per commit doubles while commits take less: an interruption loses seconds of work."""

IN_BACKGROUND = 16
"""The same in a server: one batch of the embedder, which takes one core, so that questions have the others."""

_LOCK = "reembed.lock"

_SECONDS_BETWEEN_TRIES = 1.0
"""Wait for another writer before the switch; its changes are embedded meanwhile."""

_SECONDS_AFTER_FAILURE = 60.0


@dataclass(frozen=True, slots=True)
class ReembedProgress:
    """Progress of a change of the embedding model, in chunks."""

    num_done: int
    num_total: int
    """Grows while documents are added."""


@dataclass(frozen=True, slots=True)
class ReembedReport:
    """Result of a change of the embedding model."""

    model: str
    """The model that made the vectors of the knowledge base now."""
    is_changed: bool
    """False if the vectors were made by this model already."""
    num_chunks: int
    num_embedded: int
    """Chunks embedded by this run; those of an interrupted run before it do not count."""
    dimension: int
    seconds: float


OnReembedProgress = Callable[[ReembedProgress], None]


class Reembedding:
    """One change of the embedding model of an open knowledge base."""

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        config: StillroomConfig,
        embedder: Embedder,
        lock: WriteLock,
        clock: Clock,
    ) -> None:
        """
        Args:
            folder: Folder of the knowledge base.
            config: Settings of the knowledge base, with the next model.
            embedder: The next model.
        """
        self._folder, self._corpus, self._config = folder, corpus, config
        self._embedder, self._lock, self._clock = embedder, lock, clock
        self._sets = VectorSets(corpus)
        self._after = (0, 0)
        self._num_done = self._num_embedded = 0
        self._num_together = _FIRST_COMMITTED

    def run(
        self,
        active: VectorSetRecord,
        on_progress: OnReembedProgress,
        stop: Cancellation,
        on_switch: Callable[[], object],
        num_together: int = COMMITTED_TOGETHER,
    ) -> ReembedReport:
        """Embed every chunk that the next set lacks, build its index, and make it the active set.

        Args:
            active: The active set.
            on_switch: Called under the write lock after the switch, before the old vectors are deleted.
            num_together: Most chunks per commit; the first commits are smaller.

        Raises:
            KnowledgeBaseBusyError: Another process does the same, maybe on another machine.
            ModelError: The model is missing, cannot be loaded, or is no embedding model. Nothing is recorded.
            ConfigError: The index of the knowledge base does not fit the model's dimension.
            StorageError: The disk is full; the active set is unchanged, and the next run continues.
            ChangeCancelledError: `stop` was cancelled; the next run continues.
        """
        began = self._clock.monotonic()
        model, fingerprint = self._stored_name(), self._embedder.fingerprint
        with self._alone(), self._corpus.changing_vectors():
            is_changed = fingerprint != active.fingerprint
            if is_changed:
                logger.info("changing the embedder from %s to %s", active.model, model)
                self._embedder.check()  # before the change is recorded
                self._clean_up()
                self._warn_of_discarded(fingerprint)
                dimension = self._embedder.dimension
                record = self._sets.begin(active, model, fingerprint, dimension)
                self._num_done = self._sets.num_done()
                self._switch_to(record, _Steps(on_progress, stop, on_switch, num_together))
            else:
                self._warn_of_discarded(fingerprint)
                self._sets.discard_next()
                dimension = active.dimension
            with contextlib.suppress(KnowledgeBaseBusyError):  # the next writer does it
                self._clean_up()
        seconds = self._clock.monotonic() - began
        return ReembedReport(model, is_changed, self._corpus.num_chunks, self._num_embedded, dimension, seconds)

    def _switch_to(self, record: VectorSetRecord, steps: "_Steps") -> None:
        vectors = NextVectors(self._corpus, record)
        files = DenseFiles(vectors, record.folder(self._folder))
        config = self._config
        indexes = Indexes(self._folder, self._corpus, config.index, record.dimension, qdrant=config.qdrant, dense=files)
        with contextlib.closing(indexes):
            while True:
                self._complete(vectors, indexes, steps)
                try:
                    with self._lock.held(REEMBED):
                        self._complete(vectors, indexes, steps)
                        indexes.close()  # an embedded collection is open in one process only
                        if self._sets.switch(record.number):
                            steps.on_switch()
                            return
                    self._after = (0, 0)  # look at every chunk again
                except KnowledgeBaseBusyError:
                    steps.stop.wait(_SECONDS_BETWEEN_TRIES)

    def _complete(self, vectors: NextVectors, indexes: Indexes, steps: "_Steps") -> None:
        """Embed what is missing, and bring the index up to that state."""
        while True:
            steps.stop.check()
            missing = self._sets.missing(self._after, min(self._num_together, steps.num_together))
            steps.report(self._num_done, missing.num_chunks)
            if not missing.keys:
                break
            began = self._clock.monotonic()
            found = self._corpus.chunks([chunk_id for _, chunk_id in missing.keys])
            keys = [key for key in missing.keys if key[1] in found]  # others were removed just now
            texts = [found[ChunkId(chunk_id)].indexed_text for _, chunk_id in keys]
            on_batch = steps.within(self._num_done, missing.num_chunks)
            self._sets.put(keys, self._embedder.embed_whole(texts, on_batch))
            self._num_done += len(keys)
            self._num_embedded += len(keys)
            self._after = missing.keys[-1]
            if self._clock.monotonic() - began < _SECONDS_PER_COMMIT and self._num_together < steps.num_together:
                self._num_together *= 2
        vectors.cover(missing)
        try:
            indexes.write_dense()
        except StorageError as error:
            raise StorageError(
                f"the new index in {indexes.dense_folder} cannot be written: {error.__cause__}; searches use the "
                "present one. Free disk space or repair the disk, then run the same command again: it does the rest"
            ) from error

    def _clean_up(self) -> None:
        try:
            with self._lock.held(REEMBED):
                delete_old_vectors(self._folder, self._sets, self._corpus, self._config)
        except KnowledgeBaseBusyError:  # the other writer does it
            if self._sets.record("old") is not None:
                raise

    def _warn_of_discarded(self, fingerprint: str) -> None:
        """Log an unfinished change to another model than that with `fingerprint`, whose vectors are deleted next."""
        begun = self._sets.record("next")
        if begun is not None and begun.fingerprint != fingerprint:
            logger.warning(
                "the unfinished change to the embedder %s is discarded, with the vectors of %d chunks",
                begun.model,
                self._sets.num_done(),
            )

    def _stored_name(self) -> str:
        folder = Path(self._config.embedder.model).expanduser()
        return str(folder.absolute()) if folder.is_dir() else self._config.embedder.model

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        lock = FolderLock(self._folder / _LOCK)
        try:
            lock.acquire()
        except Timeout as error:
            raise KnowledgeBaseBusyError(
                f"another process is embedding the documents of {self._folder} again; wait until it has finished"
            ) from error
        except OSError as error:
            raise StorageError(
                f"{self._folder} cannot be written: {error.strerror or error}; check the disk and the permissions"
            ) from error
        try:
            yield
        finally:
            lock.release()


@dataclass(frozen=True, slots=True)
class _Steps:
    """How a run reports and ends."""

    on_progress: OnReembedProgress
    stop: Cancellation
    on_switch: Callable[[], object]
    num_together: int

    def report(self, num_done: int, num_total: int) -> None:
        self.on_progress(ReembedProgress(min(num_done, num_total), num_total))

    def within(self, num_done: int, num_total: int) -> Callable[[int], None]:
        """Return what the embedder calls after each batch with its number of texts; it stops a cancelled run."""

        def on_batch(num_texts: int) -> None:
            nonlocal num_done
            self.stop.check()
            num_done += num_texts
            self.report(num_done, num_total)

        return on_batch


def delete_old_vectors(folder: Path, sets: VectorSets, corpus: Corpus, config: StillroomConfig) -> None:
    """Delete the old set and unused index files, as far as possible. Needs the write lock. Cheap if there are none."""
    old = sets.record("old")
    if old is not None:
        if config.index.kind == "qdrant":
            vectors = ActiveVectors(corpus, old)
            store = CollectionStore(old.folder(folder), vectors, config.index, config.qdrant, old.dimension)
            try:
                store.delete()
            except (KnowledgeBaseBusyError, IndexUnavailableError):  # the next writer tries again
                return
        delete_unused_files(folder, sets)
        sets.drop_old()
    elif sets.active_number or any(folder.glob("vectors-*")):
        delete_unused_files(folder, sets)


class BackgroundReembedding:
    """A thread that changes the embedding model of a knowledge base, for a server."""

    def __init__(self, run: Callable[[OnReembedProgress, Cancellation], ReembedReport]) -> None:
        self._run_once = run
        self._stop = Cancellation()
        self._thread: threading.Thread | None = None
        self._tenths = -1

    def begin(self) -> None:
        """Start the thread. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stillroom-reembed", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Stop the thread and wait for it; what it has embedded is kept. Idempotent."""
        self._stop.cancel()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                report = self._run_once(self._report, self._stop)
                if report.is_changed:
                    logger.info("searches use the embedder %s now (%d chunks)", report.model, report.num_chunks)
                return
            except (ChangeCancelledError, EngineClosedError, KnowledgeBaseNotFoundError):
                return
            except (ModelError, ConfigError) as error:
                logger.error("the embedder cannot be changed, and searches go on with the present one: %s", error)
                return
            except StillroomError as error:
                logger.warning("the change of the embedder is tried again in a minute: %s", error)
            except Exception:
                logger.exception("the change of the embedder failed; searches go on with the present one")
                return
            with contextlib.suppress(ChangeCancelledError):
                self._stop.wait(_SECONDS_AFTER_FAILURE)

    def _report(self, done: ReembedProgress) -> None:
        """Log every tenth of the work."""
        tenths = 10 * done.num_done // max(1, done.num_total)
        if tenths > self._tenths and done.num_done < done.num_total:
            self._tenths = tenths
            logger.info("changing the embedder: %d of %d chunks are embedded", done.num_done, done.num_total)
