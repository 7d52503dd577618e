"""Uploaded documents: bytes under a name, stored below the knowledge base's folder and indexed there.

    kb/uploads/notes/keys.md     the upload named `notes/keys.md`
    kb/uploads/.incoming/x/      one upload in progress: received bytes, and backups of the files it replaces

A name that could leave `uploads`, hide a file or imitate a record is refused before anything is written. A file that
cannot be read leaves nothing behind, and the file it was to replace stays.
"""

import contextlib
import errno
import filecmp
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

from stillroom.core.cancellation import Cancellation
from stillroom.core.document import DocumentInfo
from stillroom.core.ids import DocumentId
from stillroom.errors import (
    ChangeCancelledError,
    SeveralDocumentsError,
    StillroomError,
    StorageError,
    UnknownDocumentError,
    UsageError,
)
from stillroom.retrieval.atomic_files import make_folder_durably, replace_durably
from stillroom.retrieval.ingest import AddProgress, AddReport, RemoveReport
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.store.document_names import UPLOADS, is_upload
from stillroom.retrieval.store.folder import COMPLETE, INCOMING
from stillroom.retrieval.store.sql_rows import SourceFile
from stillroom.retrieval.uploaded_files import (
    checked_name,
    note_pending,
    open_incoming,
    restore_sources,
    unindexed_info,
    uploaded_files,
)

_STORAGE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS})
"""Errors of the disk, not of one file."""


@dataclass(frozen=True, slots=True)
class UploadResult:
    """Result of uploading one file."""

    name: str
    outcome: Literal["added", "updated", "unchanged", "failed"]
    documents: tuple[DocumentInfo, ...] = ()
    """Its documents in the knowledge base now; each record of a JSONL file is one."""
    reason: str = ""
    """Why it failed."""


@dataclass(slots=True)
class _IncomingFile:
    """An uploaded file until it is indexed or undone."""

    name: str
    path: Path
    """Its place below `uploads`."""
    received: Path
    """Where its bytes are until they are moved to `path`."""
    replaced: Path | None = None
    """Backup of the file that was at `path`."""
    is_new: bool = False
    """Whether it was moved to `path` and no file was there."""
    reason: str = ""
    """Why it failed."""
    is_pending: bool = False
    """Whether the corpus has noted it as pending."""
    source_before: SourceFile | None = None
    """Its record in the corpus before it was noted."""

    @property
    def source_name(self) -> str:
        """Its name in the corpus."""
        return f"{UPLOADS}/{self.name}"


class Uploads:
    """Uploaded files of one knowledge base. Several processes may upload at a time: each receives files in a folder of
    its own and moves them into place under the write lock."""

    def __init__(self, kb: KnowledgeBase) -> None:
        self._kb = kb
        self._folder = kb.path / UPLOADS

    def add(
        self,
        files: Iterable[tuple[str, BinaryIO]],
        progress: Callable[[AddProgress], None] | None = None,
        metadata: Mapping[str, object] | None = None,
        stop: Cancellation | None = None,
    ) -> list[UploadResult]:
        """Store and index files; unchanged files cost nothing. A file that cannot be read or written is in the results
        with its reason and does not stop the others.

        Args:
            metadata: As for `KnowledgeBase.add`.
            stop: Cancels the upload. New files that are not yet indexed completely are removed; a partly indexed
                replacement stays, and repeating the upload indexes the rest.

        Raises:
            ChangeCancelledError: `stop` was cancelled.
            UsageError: A name is not allowed or occurs twice; nothing was done.
            KnowledgeBaseBusyError: Another writer holds the lock; nothing was done.
            StorageError: The disk is full or failing.
        """
        named = [(checked_name(name), stream) for name, stream in files]
        if len({name for name, _ in named}) < len(named):
            raise UsageError("two files have the same name; give each its own")
        self._kb.corpus.check_is_there()  # otherwise a removed folder would be made again
        incoming = self._folder / INCOMING / uuid.uuid4().hex
        try:
            received = [self._receive(name, stream, incoming) for name, stream in named]
            with self._kb.writing("add"):
                self._place_all(received, metadata)
                on_progress = None if progress is None else partial(self._report, progress)
                return self._index(received, partial(self._kb.add, progress=on_progress, metadata=metadata, stop=stop))
        finally:
            shutil.rmtree(incoming, ignore_errors=True)

    def find(self, name: str) -> list[DocumentInfo]:
        """Return the document of that id, or the documents of the file of that path or upload name.

        A name that begins with `uploads/` is always an id, so that deleting it twice never deletes another upload.
        """
        if self._kb.hides_folders and name.startswith("/"):
            return []
        for candidate in [name] if name.startswith(f"{UPLOADS}/") else [name, f"{UPLOADS}/{name}"]:
            if found := self._kb.documents_of(candidate):
                return found
        return []

    def remove(self, name: str) -> RemoveReport:
        """Remove the documents that `find` returns, and an uploaded file with its last document; or delete a file of
        `not_indexed`. Files elsewhere stay on the disk.

        Raises:
            UnknownDocumentError: No document or file has this name.
            KnowledgeBaseBusyError: Another writer holds the lock.
        """
        with self._kb.writing("remove"):  # otherwise the file could be an upload in progress
            found = self.find(name)
            if not found and (unindexed := self._not_indexed(name)) is not None:
                restore_sources(self._kb.corpus, {unindexed.document_id: None})
                self._delete(self._kb.path / unindexed.document_id)
                return RemoveReport(0, 0)
            if not found:
                raise UnknownDocumentError(f"there is no document {name!r}; GET /v1/documents lists documents")
            return self._remove([info.document_id for info in found])

    def remove_all(self, targets: Sequence[str]) -> RemoveReport:
        """Remove documents as `KnowledgeBase.remove`, and uploaded files with their last document."""
        with self._kb.writing("remove"):
            return self._remove(targets)

    def _remove(self, targets: Sequence[str]) -> RemoveReport:
        before = self._indexed_files()
        try:
            return self._kb.remove(targets)
        finally:
            for path in before - self._indexed_files():
                self._delete(self._kb.path / path)

    def not_indexed(self) -> list[DocumentInfo]:
        """Return uploaded files without documents, by name: their upload or removal was interrupted."""
        indexed = self._indexed_files()
        found = (unindexed_info(path, path.relative_to(self._kb.path)) for path in uploaded_files(self._kb.path))
        return [info for info in found if info is not None and info.document_id not in indexed]

    def _not_indexed(self, name: str) -> DocumentInfo | None:
        return next((info for info in self.not_indexed() if info.document_id in (name, f"{UPLOADS}/{name}")), None)

    def find_any(self, name: str) -> list[DocumentInfo]:
        """Return what `find` returns, otherwise the file of `not_indexed` with that name."""
        found = self.find(name)
        unindexed = None if found else self._not_indexed(name)
        return found if unindexed is None else [unindexed]

    def one(self, name: str) -> DocumentInfo:
        """Return the document, or the file that is not indexed, of that id or name.

        Raises:
            UnknownDocumentError: Nothing has that name.
            SeveralDocumentsError: It is the name of a file with several documents.
        """
        found = self.find_any(name)
        if not found:
            raise UnknownDocumentError(f"there is no document {name!r}; GET /v1/documents lists them")
        if len(found) > 1:
            raise SeveralDocumentsError(f"{name!r} holds {len(found)} documents; ask for one by its id")
        return found[0]

    @property
    def are_incomplete(self) -> bool:
        """Whether `complete` has work to do; one cheap read."""
        return bool(self._kb.corpus.pending())

    def complete(self, stop: Cancellation | None = None) -> int:
        """Index the files of uploads that were killed. A file that cannot be read stays and is not tried again.

        Returns:
            The number of files indexed.

        Raises:
            KnowledgeBaseBusyError: Another writer holds the lock.
            ChangeCancelledError: `stop` was cancelled; the rest remains pending.
        """
        corpus = self._kb.corpus
        if not corpus.pending():
            return 0
        with self._kb.writing(COMPLETE):
            existing = [name for name in corpus.pending() if (self._kb.path / name).is_file()]
            paths = [self._kb.path / name for name in existing]
            failures = dict(self._kb.add(paths, stop=stop).failures) if paths else {}
            restore_sources(corpus, dict.fromkeys(corpus.pending()))
            for path in paths:
                if str(path) not in failures:
                    self._drop_stored(path)
        return len(existing) - len(failures)

    def _indexed_files(self) -> set[str]:
        return {name for name in self._kb.corpus.paths() if is_upload(name)}

    def name_of(self, document_id: DocumentId) -> str | None:
        """Return the upload name of a document (with `#record` for JSONL), or None if it was not uploaded."""
        return document_id.removeprefix(f"{UPLOADS}/") if is_upload(document_id) else None

    def _report(self, progress: Callable[[AddProgress], None], step: AddProgress) -> None:
        """Report progress with the upload name in place of the path."""
        progress(replace(step, current=os.path.relpath(step.current, self._folder) if step.current else ""))

    def _receive(self, name: str, stream: BinaryIO, incoming: Path) -> _IncomingFile:
        """Write a file below `incoming`."""
        file = _IncomingFile(name, self._folder / name, incoming / uuid.uuid4().hex)
        with self._handling_disk_errors(file):
            self._check_place(file.path)
            make_folder_durably(self._folder)
            with open_incoming(incoming, file.received) as target:
                shutil.copyfileobj(stream, target)
                target.flush()
                os.fsync(target.fileno())
            os.utime(incoming)  # a slow upload must not look like a leftover
        return file

    def _place_all(self, files: Sequence[_IncomingFile], metadata: Mapping[str, object] | None) -> None:
        """Move all changed files into place, or none if the disk fails. The corpus notes them as pending before."""
        changed = [file for file in files if not file.reason and self._is_changed(file)]
        noted = note_pending(self._kb.corpus, [file.source_name for file in changed], metadata) if changed else {}
        for file in changed:
            file.is_pending, file.source_before = True, noted[file.source_name]
        try:
            for file in changed:
                self._place(file)
        except BaseException:
            for file in files:
                self._undo(file)
            raise

    def _is_changed(self, file: _IncomingFile) -> bool:
        """Return whether a file differs from the file in its place. An equal file keeps its time and is not read."""
        is_changed = False
        with self._handling_disk_errors(file):
            self._check_place(file.path)
            is_changed = not file.path.exists() or not filecmp.cmp(file.path, file.received, shallow=False)
        return is_changed

    def _place(self, file: _IncomingFile) -> None:
        with self._handling_disk_errors(file):
            self._check_place(file.path)
            if not file.path.exists():
                file.is_new = True
                make_folder_durably(file.path.parent)
            else:
                backup = file.received.with_name(uuid.uuid4().hex)
                _link_or_copy(file.path, backup)
                file.replaced = backup
            replace_durably(file.received, file.path)

    @contextlib.contextmanager
    def _handling_disk_errors(self, file: _IncomingFile) -> Iterator[None]:
        """Fail the file on an OSError. Raises StorageError for errors that concern every file."""
        try:
            yield
        except OSError as error:
            if error.errno in _STORAGE_ERRORS:
                raise StorageError(
                    f"{file.name}: cannot be stored: {error.strerror}; check the disk and its free space, then retry"
                ) from error
            self._undo(file)
            file.reason = f"{file.name}: cannot be stored: {error.strerror or error}"

    def _check_place(self, path: Path) -> None:
        """Raises OSError if a link or a file is in the way of `path`."""
        for place in [self._folder, *(self._folder / part for part in _parents(path.relative_to(self._folder)))]:
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                raise NotADirectoryError(0, f"{place.name!r} is not a folder")
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise IsADirectoryError(0, "there is a folder of that name")

    def _index(self, files: Sequence[_IncomingFile], add: Callable[[list[Path]], AddReport]) -> list[UploadResult]:
        placed = [file for file in files if not file.reason]
        before = {file.name: self._hashes(file) for file in placed}
        try:
            failures = dict(add([file.path for file in placed]).failures) if placed else {}
        except ChangeCancelledError:
            for file in placed:
                self._cancel(file, before[file.name])
            raise
        except BaseException:  # committed files stay, the others are undone
            for file in placed:
                if self._hashes(file) == before[file.name]:
                    self._undo(file)
            raise
        for file in placed:
            if reason := failures.get(str(file.path), ""):
                file.reason = reason.replace(str(file.path), file.name).replace(file.source_name, file.name)
                self._undo(file)
            else:
                self._drop_stored(file.path)
        return [self._result(file, before.get(file.name, {})) for file in files]

    def _cancel(self, file: _IncomingFile, before: dict[DocumentId, str]) -> None:
        """Undo a file unless it was indexed completely, or records of the file it replaces are already removed."""
        source = self._kb.corpus.sources().get(file.source_name)
        if source is not None and source.size >= 0:  # read to its end
            return
        if file.is_new and self._hashes(file):
            self._kb.remove([str(file.path)])
        if self._hashes(file) == before:
            self._undo(file)

    def _result(self, file: _IncomingFile, before: dict[DocumentId, str]) -> UploadResult:
        documents = tuple(self._kb.documents_of(file.source_name))
        if file.reason:
            return UploadResult(file.name, "failed", documents, file.reason)
        outcome: Literal["added", "updated", "unchanged"] = "updated" if before else "added"
        return UploadResult(file.name, "unchanged" if before == self._hashes(file) else outcome, documents)

    def _hashes(self, file: _IncomingFile) -> dict[DocumentId, str]:
        """Return the content hash of each document of a file."""
        return self._kb.corpus.document_ids(file.source_name)

    def _undo(self, file: _IncomingFile) -> None:
        """Restore the state before the upload of a file. Idempotent."""
        with contextlib.suppress(OSError):
            if file.replaced is not None:
                os.replace(file.replaced, file.path)
            elif file.is_new:
                self._delete(file.path)
        file.replaced, file.is_new = None, False
        if file.is_pending:
            with contextlib.suppress(StillroomError):  # it stays pending, and the next `complete` handles it
                restore_sources(self._kb.corpus, {file.source_name: file.source_before})
            file.is_pending = False

    def _drop_stored(self, path: Path) -> None:
        """Delete a file whose bytes the corpus has."""
        if self._kb.corpus.is_copy:
            self._delete(path)

    def _delete(self, path: Path) -> None:
        """Delete a file, and its folders that are empty then."""
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            for parent in _parents(path.relative_to(self._folder)):
                (self._folder / parent).rmdir()


def _parents(path: Path) -> Iterator[Path]:
    """Yield the folders above a relative path, innermost first."""
    return (parent for parent in path.parents if parent != Path())


def _link_or_copy(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except OSError:  # a file system without links
        shutil.copy2(path, to)
