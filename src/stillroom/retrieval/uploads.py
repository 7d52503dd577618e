"""Documents that come as bytes under a name: kept in the knowledge base's folder, so that their sources have a path.

    kb/uploads/notes/keys.md     what was uploaded as `notes/keys.md`
    kb/uploads/.incoming/x/      of one upload: what is on its way in, and what it replaces, until it is known to be
                                 readable

A name is a path below `uploads` and nothing else: what could lead elsewhere, hide a file or imitate a record of another
one is refused before anything is written. What cannot be read leaves nothing behind, and what was there before stays.
"""

import contextlib
import errno
import filecmp
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Literal

from stillroom.core.cancellation import Cancellation
from stillroom.core.document import DocumentInfo
from stillroom.core.ids import DocumentId
from stillroom.core.private_files import make_folder, open_file
from stillroom.errors import ChangeCancelledError, StillroomError, StorageError, UnknownDocumentError, UsageError
from stillroom.retrieval.atomic_files import make_folder_durably, replace_durably
from stillroom.retrieval.ingest import AddProgress, AddReport, RemoveReport
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.store.document_names import UPLOADS, is_upload
from stillroom.retrieval.store.folder import INCOMING
from stillroom.retrieval.store.rows import SourceFile
from stillroom.retrieval.uploaded_files import checked_name, unindexed_info, uploaded_files

_STORAGE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS})
"""What another name would not help against."""


@dataclass(frozen=True, slots=True)
class UploadResult:
    """What became of one file."""

    name: str
    outcome: Literal["added", "updated", "unchanged", "failed"]
    documents: tuple[DocumentInfo, ...] = ()
    """What is in the knowledge base of it now; each record of a JSONL file is one."""
    reason: str = ""
    """Why it failed."""


@dataclass(slots=True)
class _Stored:
    """A file that came and is not yet known to be readable."""

    name: str
    path: Path
    new: Path
    """Where its bytes are until it may have its place."""
    replaced: Path | None = None
    """Where the bytes are that stood there before."""
    is_new: bool = False
    reason: str = ""
    """Why it could not be written."""
    before: dict[str, SourceFile | None] = field(default_factory=dict)
    """What the corpus knew of it, where that was changed."""


@dataclass(frozen=True, slots=True)
class _Options:
    """Of one upload."""

    progress: Callable[[AddProgress], None] | None
    metadata: Mapping[str, object] | None
    stop: Cancellation


class Uploads:
    """The files below one knowledge base's `uploads`. Several processes may upload: what comes waits in a folder of its
    own, and takes its place only while nobody else can write."""

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
        """Keep files and index them; what has not changed costs nothing. A file that cannot be read or written is in
        the results with its reason and does not stop the others.

        Args:
            metadata: as of `KnowledgeBase.add`.
            stop: cancels it between two pieces of work. A new file that was not wholly indexed until then is removed;
                one that replaces another stays, and the same upload indexes the rest.

        Raises:
            ChangeCancelledError: `stop` was cancelled.
            UsageError: a name is no path below `uploads`, or stands twice; nothing was done.
            KnowledgeBaseBusyError: somebody else is writing; nothing was done.
            StorageError: the disk is full or failing.
        """
        named = [(checked_name(name), stream) for name, stream in files]
        if len({name for name, _ in named}) < len(named):
            raise UsageError("two files have the same name; give each its own")
        self._kb.check_is_there()  # or its folder would be made again
        incoming = self._folder / INCOMING / uuid.uuid4().hex
        try:
            stored = [self._receive(name, stream, incoming) for name, stream in named]
            with self._kb.writing("add"):
                self._place_all(stored, metadata)
                return self._index(stored, _Options(progress, metadata, stop or Cancellation()))
        finally:
            shutil.rmtree(incoming, ignore_errors=True)

    def find(self, name: str) -> list[DocumentInfo]:
        """The document of that id, or those of the file of that path or uploaded name; none if there are none.

        `uploads/...` is always an id, so that deleting it twice never deletes an upload of that name.
        """
        if self._kb.hides_folders and name.startswith("/"):
            return []
        for candidate in [name] if name.startswith(f"{UPLOADS}/") else [name, f"{UPLOADS}/{name}"]:
            if found := self._kb.documents_of(candidate):
                return found
        return []

    def remove(self, name: str) -> RemoveReport:
        """Forget what `find` finds, and the uploaded file if nothing else comes from it; or delete a file of
        `not_indexed`. Other files stay on the disk.

        Raises:
            UnknownDocumentError: there is nothing of that name.
            KnowledgeBaseBusyError: somebody else is writing.
        """
        with self._kb.writing("remove"):  # or the file could be one that somebody uploads just now
            found = self.find(name)
            if not found and (lone := self._not_indexed(name)) is not None:
                self._kb.unexpect({lone.document_id: None})
                self._delete(self._kb.path / lone.document_id)
                return RemoveReport(0, 0)
            if not found:
                raise UnknownDocumentError(f"there is no document {name!r}; GET /v1/documents lists what there is")
            return self._remove([info.document_id for info in found])

    def remove_all(self, targets: Sequence[str]) -> RemoveReport:
        """As `KnowledgeBase.remove`, and uploaded files go with their last documents."""
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
        """Files that have their place and no documents, by name: their upload or removal was interrupted."""
        indexed = self._indexed_files()
        found = (unindexed_info(path, path.relative_to(self._kb.path)) for path in uploaded_files(self._kb.path))
        return [info for info in found if info is not None and info.document_id not in indexed]

    def _not_indexed(self, name: str) -> DocumentInfo | None:
        return next((one for one in self.not_indexed() if one.document_id in (name, f"{UPLOADS}/{name}")), None)

    def find_any(self, name: str) -> list[DocumentInfo]:
        """As `find`, and else the file of that name that is not indexed."""
        found = self.find(name)
        lone = None if found else self._not_indexed(name)
        return found if lone is None else [lone]

    @property
    def are_incomplete(self) -> bool:
        """Whether there is something to `complete`; one cheap read."""
        return bool(self._kb.expected())

    def complete(self, stop: Cancellation | None = None) -> int:
        """Index the files whose upload was killed after they had their places. One that cannot be read stays as it is
        and is not tried again.

        Returns:
            How many files were indexed.

        Raises:
            KnowledgeBaseBusyError: somebody else is writing.
            ChangeCancelledError: `stop` was cancelled; the rest is still to be completed.
        """
        if not self._kb.expected():
            return 0
        with self._kb.writing("complete uploads"):
            names = self._kb.expected()
            there = [name for name in names if (self._kb.path / name).is_file()]
            failures = self._kb.add([self._kb.path / name for name in there], stop=stop).failures if there else ()
            self._kb.unexpect(dict.fromkeys(self._kb.expected()))
        return len(there) - len(failures)

    def _indexed_files(self) -> set[str]:
        return {path for path in self._kb.paths() if self.name_of(DocumentId(path)) is not None}

    def name_of(self, document_id: DocumentId) -> str | None:
        """As it was uploaded, and `#record` for a record of a JSONL file; None for what came from elsewhere."""
        return document_id.removeprefix(f"{UPLOADS}/") if is_upload(document_id) else None

    def _receive(self, name: str, stream: BinaryIO, incoming: Path) -> _Stored:
        """On the disk, but not yet in its place."""
        one = _Stored(name, self._folder / name, incoming / uuid.uuid4().hex)
        with self._storing(one):
            self._check_place(one.path)
            make_folder_durably(self._folder)
            make_folder(incoming)
            with open_file(one.new) as target:
                shutil.copyfileobj(stream, target)
                target.flush()
                os.fsync(target.fileno())
            os.utime(incoming)  # however long it took, it is no leftover
        return one

    def _place_all(self, stored: Sequence[_Stored], metadata: Mapping[str, object] | None) -> None:
        """All that came, or none where the disk is in the way. The corpus knows before of those that are new, so that
        `complete` can index them if this process is killed."""
        new = [one for one in stored if not one.reason and self._is_new(one)]
        before = self._kb.expect([str(one.path) for one in new], metadata) if new else {}
        for one in new:
            one.before = {name: source for name, source in before.items() if name == f"{UPLOADS}/{one.name}"}
        try:
            for one in new:
                self._place(one)
        except BaseException:
            self._undo_all(stored)
            raise

    def _is_new(self, one: _Stored) -> bool:
        """Whether it is another file than the one that has its place; that one keeps its time, and is not read."""
        is_new = False
        with self._storing(one):
            self._check_place(one.path)
            is_new = not one.path.exists() or not filecmp.cmp(one.path, one.new, shallow=False)
        return is_new

    def _place(self, one: _Stored) -> None:
        with self._storing(one):
            self._check_place(one.path)
            if not one.path.exists():
                one.is_new = True
                make_folder_durably(one.path.parent)
            else:
                old = one.new.with_name(uuid.uuid4().hex)
                _link_or_copy(one.path, old)
                one.replaced = old
            replace_durably(one.new, one.path)

    @contextlib.contextmanager
    def _storing(self, one: _Stored) -> Iterator[None]:
        """What hinders it is its reason, or a StorageError where it would hinder every file."""
        try:
            yield
        except OSError as error:
            if error.errno in _STORAGE_ERRORS:
                raise StorageError(
                    f"{one.name}: cannot be kept: {error.strerror}; see to the disk and its free space, then try again"
                ) from error
            self._undo(one)
            one.reason = f"{one.name}: cannot be kept: {error.strerror or error}"

    def _check_place(self, path: Path) -> None:
        """Nothing on the way leads elsewhere."""
        for place in [self._folder, *(self._folder / part for part in _parents(path.relative_to(self._folder)))]:
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                raise NotADirectoryError(0, f"{place.name!r} is not a folder")
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise IsADirectoryError(0, "there is a folder of that name")

    def _index(self, stored: Sequence[_Stored], options: _Options) -> list[UploadResult]:
        kept = [one for one in stored if not one.reason]
        before = {one.name: self._hashes(one) for one in kept}
        paths = [one.path for one in kept]
        try:
            failures = dict(self._added(paths, options).failures) if kept else {}
        except ChangeCancelledError:
            for one in kept:
                self._cancel(one, before[one.name])
            raise
        except BaseException:  # what was committed has its file, and the rest is as it was before
            for one in kept:
                if self._hashes(one) == before[one.name]:
                    self._undo(one)
            raise
        for one in kept:
            if reason := failures.get(str(one.path), ""):
                one.reason = reason.replace(str(one.path), one.name).replace(f"{UPLOADS}/{one.name}", one.name)
                self._undo(one)
        return [self._result(one, before.get(one.name, {})) for one in stored]

    def _added(self, paths: Sequence[Path], options: _Options) -> AddReport:
        def tell(step: AddProgress) -> None:
            if options.progress is not None:
                name = os.path.relpath(step.current, self._folder) if step.current else ""
                options.progress(replace(step, current=name))

        return self._kb.add(paths, progress=tell, metadata=options.metadata, stop=options.stop)

    def _cancel(self, one: _Stored, before: dict[DocumentId, str]) -> None:
        """As it was before it came, unless it was indexed to its end, or records of what it replaced are gone."""
        if self._kb.is_read(str(one.path)):
            return
        if one.is_new and self._hashes(one):
            self._kb.remove([str(one.path)])
        if self._hashes(one) == before:
            self._undo(one)

    def _result(self, one: _Stored, before: dict[DocumentId, str]) -> UploadResult:
        documents = tuple(self._kb.documents_of(str(one.path)))
        if one.reason:
            return UploadResult(one.name, "failed", documents, one.reason)
        outcome: Literal["added", "updated", "unchanged"] = "updated" if before else "added"
        return UploadResult(one.name, "unchanged" if before == self._hashes(one) else outcome, documents)

    def _hashes(self, one: _Stored) -> dict[DocumentId, str]:
        return self._kb.content_hashes(str(one.path))

    def _undo_all(self, stored: Sequence[_Stored]) -> None:
        for one in stored:
            self._undo(one)

    def _undo(self, one: _Stored) -> None:
        """As it was before it came; once."""
        with contextlib.suppress(OSError):
            if one.replaced is not None:
                os.replace(one.replaced, one.path)
            elif one.is_new:
                self._delete(one.path)
        one.replaced, one.is_new = None, False
        if one.before:
            with contextlib.suppress(StillroomError):  # it stays expected: the next `complete` looks at it
                self._kb.unexpect(one.before)
            one.before = {}

    def _delete(self, path: Path) -> None:
        """A file, and the folders that are empty without it."""
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            for parent in _parents(path.relative_to(self._folder)):
                (self._folder / parent).rmdir()


def _parents(path: Path) -> Iterator[Path]:
    """The folders above a relative path, innermost first."""
    return (parent for parent in path.parents if parent != Path())


def _link_or_copy(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except OSError:  # not every file system has links
        shutil.copy2(path, to)
