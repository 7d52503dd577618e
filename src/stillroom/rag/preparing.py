"""Prepares a knowledge base's documents: computes their KV before a question asks for it, most valuable first.

A document's value is how often searches returned it (a Count-Min sketch, llmds 2.4); of equal ones the newest is first.
RAGCache (3.2) measures that 3 % of the documents take 60 % of the requests.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from stillroom.cluster.document_share import DocumentShare
from stillroom.core.cancellation import Cancellation
from stillroom.core.clock import Clock
from stillroom.core.document import DocumentInfo
from stillroom.core.ids import DocumentId
from stillroom.errors import (
    ChangeCancelledError,
    EngineClosedError,
    KnowledgeBaseBusyError,
    PreparedFullError,
    StillroomError,
)
from stillroom.rag.document_demand import DocumentDemand
from stillroom.retrieval.knowledge_base import KnowledgeBase

if TYPE_CHECKING:  # it imports torch
    from stillroom.backends.document_windows import DocumentWindow, DocumentWindows

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_CHECKS = 2.0
_SECONDS_BETWEEN_PASSES = 60.0
"""After these, a budget that was full, or that has room again, is tried."""
_MOST_WITHOUT_ROOM = 20
"""Documents in a row without room after which a run ends: smaller ones behind a large one may fit."""


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    num_chunks_done: int
    num_chunks_total: int


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """The result of `DocumentPreparer.run`."""

    num_documents: int
    """Documents whose chunks are prepared now; chunks that are too long do not count."""
    num_documents_total: int
    num_chunks: int
    """Chunks that are prepared now, by this run or before."""
    num_chunks_total: int
    num_computed: int
    """Chunks that this run computed."""
    num_skipped: int
    """Chunks that are too long for the model or the KV pool."""
    num_bytes: int
    """Bytes of prepared KV that no question has used yet."""
    seconds: float
    is_full: bool
    """Whether the budget had no room for a document (`prepare.disk_bytes`, `prepare.host_bytes`)."""
    is_interrupted: bool
    """Whether it ended before that for another reason: a signal, `stop`, an error."""


@dataclass(slots=True)
class _Counts:
    """What a run has done so far; fields as of `PrepareReport`."""

    num_documents: int = 0
    num_chunks: int = 0
    num_computed: int = 0
    num_skipped: int = 0
    is_full: bool = False
    is_interrupted: bool = True


class DocumentPreparer:
    """Prepares the documents of one `Stillroom`: on request, or in a thread while its model answers no question."""

    def __init__(
        self, kb: KnowledgeBase, load: Callable[[], "DocumentWindows"], demand: DocumentDemand, clock: Clock
    ) -> None:
        """
        Args:
            load: loads the model if need be. Raises UsageError: the model keeps no KV.
        """
        self._kb, self._load, self._demand, self._clock = kb, load, demand, clock
        self._thread: threading.Thread | None = None
        self._stop = Cancellation()
        self._wake = threading.Event()
        self._prepared: dict[DocumentId, float] = {}
        """When the documents that the thread has prepared were added."""
        self._seen_changes: tuple[int, int] | None = None
        """Changes of documents and of the share before the last pass that ended."""
        self._announced: tuple[int, int] | None = None
        """The same of the last pass that was announced."""
        self._due = 0.0
        self._was_full = False
        self._displaced = 0
        """Bytes of prepared KV that were damaged, or evicted unused, until `_prepared` was last emptied."""
        self.share = DocumentShare()
        """The documents that the thread prepares: those of one engine of a cluster, else all."""
        self.report: PrepareReport | None = None
        """Of the last run, also of one that was interrupted."""

    def run(
        self,
        documents: Collection[DocumentId] | None = None,
        on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
        stop: Cancellation | None = None,
        known: dict[DocumentId, float] | None = None,
    ) -> PrepareReport:
        """Prepare documents until all are prepared or the budget is full. What is kept already is not computed again.

        A document for which the budget has no room is left out, and the next ones are tried.

        Args:
            documents: None: all.
            stop: ends the run from another thread; what is computed by then is kept.
            known: documents that are not looked at again unless they were added later; the run adds to them.

        Raises:
            UsageError: the model keeps no KV.
            KnowledgeBaseBusyError: another process keeps KV in this knowledge base, so that nothing could be stored.
            ChangeCancelledError: `stop` was cancelled.
            EngineError: the engine was closed, or fails.
        """
        stop, began, known = stop or Cancellation(), self._clock.monotonic(), {} if known is None else known
        chosen = None if documents is None else set(documents)
        infos = [info for info in self._kb.documents() if chosen is None or info.document_id in chosen]
        infos.sort(key=lambda info: preparing_order(info, self._demand))
        total, counts, num_without_room = sum(info.num_chunks for info in infos), _Counts(), 0
        windows: DocumentWindows | None = None
        try:
            windows = self._load()
            if not windows.may_store:
                raise KnowledgeBaseBusyError(
                    "another process keeps KV in this knowledge base, so nothing that is prepared here could be "
                    "stored; stop it first (a server with reuse.mode = prepared prepares by itself)"
                )
            for info in infos:
                if known.get(info.document_id) == info.added_at:
                    counts.num_chunks += info.num_chunks
                    counts.num_documents += 1
                    continue
                try:
                    for _ in self._computed_windows(info, windows, counts, stop):
                        on_progress(PrepareProgress(counts.num_chunks, total))
                except PreparedFullError:
                    counts.is_full = True
                    num_without_room += 1
                    if num_without_room == _MOST_WITHOUT_ROOM:
                        break
                    continue
                known[info.document_id] = info.added_at
                counts.num_documents += 1
                num_without_room = 0
            counts.is_interrupted = False
        finally:
            self.report = PrepareReport(
                num_documents_total=len(infos),
                num_chunks_total=total,
                num_bytes=0 if windows is None else windows.num_bytes,
                seconds=self._clock.monotonic() - began,
                **asdict(counts),
            )
        return self.report

    def _computed_windows(
        self, info: DocumentInfo, windows: "DocumentWindows", counts: _Counts, stop: Cancellation
    ) -> Iterator["DocumentWindow"]:
        """Compute the windows of a document, count them, and yield each when it is kept.

        Raises:
            PreparedFullError: the budget has no room for a window; its first chunks that have room are kept.
        """
        chunks = self._kb.chunks_of(info.document_id)
        cut = windows.windows_of(chunks)
        counts.num_skipped += len(chunks) - sum(len(window.new) for window in cut)
        for window in cut:
            num_kept, end = 0, len(window.new)  # chunks that are kept, and the fewest that have no room, less one
            while num_kept < end:
                num_tried = end if num_kept == 0 and end == len(window.new) else num_kept + (end - num_kept + 1) // 2
                stop.check()
                try:
                    is_computed = windows.compute(window.first(num_tried), stop)
                except PreparedFullError:
                    end = num_tried - 1
                else:
                    counts.num_computed += (num_tried - num_kept) * is_computed
                    counts.num_chunks += num_tried - num_kept
                    num_kept = num_tried
            yield window
            if num_kept < len(window.new):
                raise PreparedFullError("the budget of prepared KV is full")

    def begin(self) -> None:
        """Start the thread, which prepares all documents, again after each change of documents. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stillroom-preparing", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Look for changed documents, and another share of them, now instead of a few seconds later."""
        self._wake.set()

    @property
    def is_running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def end(self) -> None:
        """End the thread; what it has computed is kept. Idempotent."""
        self._stop.cancel()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def run_if_due(self) -> None:
        """Prepare all documents of the share that are not known to be prepared, if a document or the share changed
        since the last pass.

        Also a minute after the last pass, if the budget was full then, or has room again for KV that was damaged, or
        evicted before a question used it: then every document is looked at again. Only KV that questions use evicts
        prepared KV, and what it leaves free is less than what it evicted, so that without questions a second pass
        computes nothing.
        Raises as `run`.
        """
        changes, windows = (self._kb.num_changes, self.share.num_changes), self._load()
        num_displaced = windows.num_displaced_bytes - self._displaced
        fits_again = num_displaced > 0 and windows.fits_again(num_displaced)
        has_changed = changes != self._seen_changes
        if not has_changed and not ((self._was_full or fits_again) and self._clock.monotonic() >= self._due):
            return
        if fits_again:
            self._prepared.clear()
            self._displaced += num_displaced
        infos = [info for info in self._kb.documents() if self.share.has(info.document_id)]
        is_told = changes != self._announced and self._announce(changes, infos)
        report = self.run([info.document_id for info in infos], stop=self._stop, known=self._prepared)
        self._seen_changes, self._was_full = changes, report.is_full
        self._due = self._clock.monotonic() + _SECONDS_BETWEEN_PASSES
        if is_told or report.num_computed:
            _log(report)

    def _announce(self, changes: tuple[int, int], infos: Sequence[DocumentInfo]) -> bool:
        """Log that a pass begins after a change; False if every document is known to be prepared."""
        self._announced = changes
        new = [info for info in infos if self._prepared.get(info.document_id) != info.added_at]
        if new:
            num_chunks = sum(info.num_chunks for info in new)
            logger.info("preparing %d documents, %d chunks, while no question waits", len(new), num_chunks)
        return bool(new)

    def _run(self) -> None:
        told = ""
        while not self._stop.is_cancelled:
            try:
                self.run_if_due()
            except (ChangeCancelledError, EngineClosedError):
                return
            except StillroomError as error:
                if str(error) != told:
                    told = str(error)
                    logger.warning("documents are not prepared now: %s", error)
            except Exception:
                logger.exception("preparing documents failed; it is tried again")
            self._wake.wait(_SECONDS_BETWEEN_CHECKS)
            self._wake.clear()


def preparing_order(info: DocumentInfo, demand: DocumentDemand) -> tuple[int, float, DocumentId]:
    """Return the sort key of a document: the smallest is prepared first."""
    return -demand.of(info.document_id), -info.added_at, info.document_id


def _log(report: PrepareReport) -> None:
    logger.info(
        "prepared windows with %d chunks in %.1f s; %d of %d documents, %d of %d chunks are prepared%s",
        report.num_computed,
        report.seconds,
        report.num_documents,
        report.num_documents_total,
        report.num_chunks,
        report.num_chunks_total,
        "; the budget is full" if report.is_full else "",
    )
