"""The folder of a knowledge base: file names, the write lock, and leftovers of killed processes.

The lock is an operating system lock: it ends with its process, so it is never stale. `writer.json` names its holder and
is read only while the lock is held.
"""

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import Timeout

from stillroom.core.clock import Clock
from stillroom.core.folder_lock import FolderLock
from stillroom.core.private_files import open_file
from stillroom.errors import CorruptKnowledgeBaseError, KnowledgeBaseBusyError, KnowledgeBaseError, StorageError
from stillroom.retrieval.store.document_names import UPLOADS
from stillroom.retrieval.store.manifest import MANIFEST_ADVICE

MANIFEST = "manifest.json"
CORPUS = "corpus.sqlite3"
PROJECTIONS = ("dense.npz", "dense.lists", "sparse", "qdrant")
"""Files made from the corpus; if one exists, there was a corpus."""

INCOMING = ".incoming"
"""Folder in `uploads` for uploads in progress."""

_LOCK = "write.lock"
_WRITER = "writer.json"

_LOCKED_LEFTOVERS = (".*.tmp", "sparse/.*.tmp", "sparse/.tmp*")
"""Temporary files written under the lock; the next holder may remove them at once."""

_UNLOCKED_LEFTOVERS = (
    ".list_heat.npz.*.tmp",
    ".scratch-*",
    "vectors-*/.*.tmp",
    "vectors-*/.scratch-*",
    f"{UPLOADS}/{INCOMING}/*",
)
"""Temporary files written without the lock; removed after `_MAX_AGE_S`."""

_MAX_AGE_S = 3600.0

_OPENING_TIMEOUT_S = 10.0

REPAIR, REEMBED, COMPLETE = "repair", "reembed", "complete uploads"
"""Actions that make files from the corpus, switch to another embedder, and index the files of killed uploads. No user
asked for them at this moment, so other writers wait for their end."""


def check_is_empty(path: Path) -> None:
    """Raises KnowledgeBaseError if a folder holds other files than those of an interrupted creation."""
    if path.exists() and (not path.is_dir() or any(not _is_own(entry.name) for entry in path.iterdir())):
        raise KnowledgeBaseError(f"{path} is not empty and not a knowledge base; give a new or an empty folder")


def check_manifest_exists(path: Path) -> None:
    """Raises CorruptKnowledgeBaseError if a folder has a corpus and no manifest."""
    if (path / CORPUS).exists() and not (path / MANIFEST).exists():
        raise CorruptKnowledgeBaseError(
            f"{path / MANIFEST} is missing, the documents are there; restore a backup. {MANIFEST_ADVICE}"
        )


def check_corpus_exists(path: Path) -> None:
    """Raises CorruptKnowledgeBaseError if a folder has indexes and no corpus; SQLite would make an empty one."""
    corpus = path / CORPUS
    if corpus.exists() and corpus.stat().st_size:
        return
    if any((path / name).exists() for name in PROJECTIONS):
        state = "empty" if corpus.exists() else "missing"
        raise CorruptKnowledgeBaseError(
            f"{corpus} is {state}, and with it every document; restore a backup, or remove the folder and make the "
            f"knowledge base again: stillroom add PATH --kb {path}"
        )


def leftovers(path: Path, now: float) -> list[Path]:
    """Return temporary files of killed processes. Exact only while the lock is held.

    Args:
        now: Unix time in seconds.
    """
    locked = {file for pattern in _LOCKED_LEFTOVERS for file in path.glob(pattern)}
    unlocked = {file for pattern in _UNLOCKED_LEFTOVERS for file in path.glob(pattern)}
    return sorted((locked - unlocked) | {file for file in unlocked if _age(file, now) > _MAX_AGE_S})


def remove_leftovers(path: Path, now: float) -> None:
    """Remove `leftovers`, and empty folders of uploads of any age, as far as possible. An upload makes its folder again
    if that happens before its first file is there. Precondition: the caller holds the lock."""
    for file in leftovers(path, now):
        if file.is_dir():
            shutil.rmtree(file, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                file.unlink()
    for folder in path.glob(f"{UPLOADS}/{INCOMING}/*"):
        with contextlib.suppress(OSError):  # it holds a file
            folder.rmdir()


class WriteLock:
    """The write lock of a folder."""

    def __init__(self, folder: Path, clock: Clock, check: Callable[[], object] = lambda: None) -> None:
        """
        Args:
            check: Raises an error if the folder was replaced since it was opened.
        """
        self._folder = folder
        self._clock = clock
        self._check = check
        self._reserved_by: int | None = None
        """The thread in `reserved`, while it is not in `held`."""

    @contextlib.contextmanager
    def held(self, action: str, *, timeout_s: float = 0.0, joins_repair: bool = False) -> Iterator[None]:
        """Hold the lock. Leftovers of killed writers are removed first.

        Args:
            action: Shown to other processes that are refused meanwhile.
            timeout_s: Time to wait for another holder; at least 10 s for a repair, a switch to another
                embedder or the completion of uploads, unless this is a repair.
            joins_repair: Let a repair wait for another one, too.

        Raises:
            KnowledgeBaseBusyError: Another process or thread holds the lock; the message names it.
            KnowledgeBaseNotFoundError: The folder was removed or replaced since it was opened.
            StorageError: The folder cannot be written.
        """
        if self._reserved_by == threading.get_ident():
            self._reserved_by = None
            try:
                yield
            finally:
                self._reserved_by = threading.get_ident()
            return
        self._check()  # otherwise this could lock another folder
        try:
            lock = self._acquired(timeout_s, waits=action != REPAIR or joins_repair)
        except Timeout as error:
            raise KnowledgeBaseBusyError(f"{self._holder()}; wait until it has finished, then retry") from error
        except OSError as error:
            raise StorageError(
                f"{self._folder} cannot be written: {error.strerror or error}; check the disk and the permissions"
            ) from error
        try:
            self._note_holder(action)
            self._check()
            remove_leftovers(self._folder, self._clock.unix())
            yield
        finally:
            if lock.is_held:  # otherwise the file is another writer's
                with contextlib.suppress(OSError):
                    (self._folder / _WRITER).unlink(missing_ok=True)
            lock.release()

    def _acquired(self, timeout_s: float, *, waits: bool) -> FolderLock:
        lock = FolderLock(self._folder / _LOCK, timeout_s)
        try:
            lock.acquire()
        except Timeout:
            if not waits or self._holder_note().get("what") not in (REPAIR, REEMBED, COMPLETE):
                raise
            lock = FolderLock(self._folder / _LOCK, _OPENING_TIMEOUT_S)
            lock.acquire()
        return lock

    @contextlib.contextmanager
    def reserved(self, action: str) -> Iterator[None]:
        """As `held`; in this context, the thread may enter `held` repeatedly without releasing the lock."""
        with self.held(action):
            self._reserved_by = threading.get_ident()
            try:
                yield
            finally:
                self._reserved_by = None

    @contextlib.contextmanager
    def held_if_writable(self, action: str) -> Iterator[bool]:
        """As `held` if the folder can be written, otherwise without the lock. Yields whether the lock is held."""
        may_write = os.access(self._folder, os.W_OK)
        with self.held(action) if may_write else contextlib.nullcontext():
            yield may_write

    def held_while_opening(self, action: str) -> contextlib.AbstractContextManager[None]:
        """As `held`, for quick work when a folder is opened: waits up to 10 s for another holder."""
        return self.held(action, timeout_s=_OPENING_TIMEOUT_S)

    def _note_holder(self, action: str) -> None:
        content = {"pid": os.getpid(), "host": socket.gethostname(), "what": action, "since": self._clock.unix()}
        with contextlib.suppress(OSError), open_file(self._folder / _WRITER) as file:  # fails on a full disk
            file.write(json.dumps(content).encode() + b"\n")

    def _holder(self) -> str:
        """Return `another process is writing to kb: process 42 on alba (add, since 14:03:10)`, or without what is not
        known; `this process is writing to kb (add, since 14:03:10)` if another thread of this process does."""
        found = self._holder_note()
        try:
            since = time.strftime("%H:%M:%S", time.localtime(float(found["since"])))
            pid, host, what = int(found["pid"]), found["host"], f"({found['what']}, since {since})"
        except (ValueError, KeyError, TypeError):
            return f"another process is writing to {self._folder}"
        if (pid, host) == (os.getpid(), socket.gethostname()):
            return f"this process is writing to {self._folder} {what}"
        return f"another process is writing to {self._folder}: process {pid} on {host} {what}"

    def _holder_note(self) -> dict[str, Any]:
        """Return what the holder wrote; empty if it cannot be read."""
        try:
            found = json.loads((self._folder / _WRITER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _is_own(name: str) -> bool:
    """Return whether an interrupted creation may have left a file of this name."""
    return name in (_LOCK, _WRITER) or (name.startswith(f".{MANIFEST}.") and name.endswith(".tmp"))


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:
        return 0.0
