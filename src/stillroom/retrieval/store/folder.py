"""The folder of a knowledge base as a place: its files, who may write, and what a killed process left behind.

One writes at a time. The lock is the system's and ends with its process, however that ends, so a stale one cannot be;
who holds it says so in `writer.json`, which is believed only while the lock is held.
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

from filelock import Timeout

from stillroom.core.clock import Clock
from stillroom.core.folder_lock import FolderLock
from stillroom.core.private_files import open_file
from stillroom.errors import CorruptKnowledgeBaseError, KnowledgeBaseBusyError, KnowledgeBaseError, StorageError
from stillroom.retrieval.store.document_names import UPLOADS
from stillroom.retrieval.store.manifest import SAME_MANIFEST

MANIFEST = "manifest.json"
CORPUS = "corpus.sqlite3"
PROJECTIONS = ("dense.npz", "dense.lists", "sparse", "qdrant")
"""What is made from the corpus, so that there was one where any of them is."""

INCOMING = ".incoming"
"""In it: those that have no place yet."""

_LOCK = "write.lock"
_WRITER = "writer.json"

_OF_WRITERS = (".*.tmp", "sparse/.*.tmp", "sparse/.tmp*")
"""Half-written files. Whoever holds the lock may remove them: nobody else writes any."""

_OF_ANYBODY = (".list_heat.npz.*.tmp", ".scratch-*", f"{UPLOADS}/{INCOMING}/*")
"""Those that are written without the lock, too."""

_MAX_AGE_S = 3600.0
"""Nobody needs one of those for so long."""

_OPENING_TIMEOUT_S = 10.0


def check_may_be_made(path: Path) -> None:
    """Refuse a folder with anything in it but what an interrupted making left behind.

    Raises:
        KnowledgeBaseError: it holds something.
    """
    if path.exists() and (not path.is_dir() or any(not _is_own(entry.name) for entry in path.iterdir())):
        raise KnowledgeBaseError(f"{path} is not empty and no knowledge base; give a new or an empty folder")


def check_manifest_is_there(path: Path) -> None:
    """Refuse a folder that has lost its manifest: it would count as something else, or as nothing.

    Raises:
        CorruptKnowledgeBaseError: it is missing, and the corpus is there.
    """
    if (path / CORPUS).exists() and not (path / MANIFEST).exists():
        raise CorruptKnowledgeBaseError(
            f"{path / MANIFEST} is missing, the documents are there; put it back from a backup. {SAME_MANIFEST}"
        )


def check_corpus_is_there(path: Path) -> None:
    """Refuse a folder whose corpus was lost: SQLite would make an empty one.

    Raises:
        CorruptKnowledgeBaseError: it is missing or empty, and there are indexes of it.
    """
    corpus = path / CORPUS
    if corpus.exists() and corpus.stat().st_size:
        return
    if any((path / name).exists() for name in PROJECTIONS):
        state = "empty" if corpus.exists() else "missing"
        raise CorruptKnowledgeBaseError(
            f"{corpus} is {state}, and with it every document; put it back from a backup, or remove the folder "
            f"and make the knowledge base again: stillroom add PATH --kb {path}"
        )


def leftovers(path: Path, now: float) -> list[Path]:
    """What processes that were killed left half written. Exact only while the lock is held.

    Args:
        now: Unix time in seconds.
    """
    found = {one for pattern in _OF_WRITERS for one in path.glob(pattern)}
    shared = {one for pattern in _OF_ANYBODY for one in path.glob(pattern)}
    return sorted((found - shared) | {one for one in shared if _age(one, now) > _MAX_AGE_S})


def sweep(path: Path, now: float) -> None:
    """Remove `leftovers`. Only under the lock; what cannot be removed stays."""
    for one in leftovers(path, now):
        if one.is_dir():
            shutil.rmtree(one, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                one.unlink()


class WriteLock:
    """The right to write to one folder."""

    def __init__(self, folder: Path, clock: Clock, check: Callable[[], object] = lambda: None) -> None:
        """
        Args:
            check: raises if the folder is no longer the one that was opened.
        """
        self._folder = folder
        self._clock = clock
        self._check = check
        self._reserved_by: int | None = None
        """A thread that holds the lock, and is not writing right now."""

    @contextlib.contextmanager
    def held(self, what: str, *, timeout_s: float = 0.0) -> Iterator[None]:
        """Write in here. What a killed writer left half written is removed first.

        Args:
            what: is done, for whoever is refused meanwhile.
            timeout_s: how long to wait for somebody else.

        Raises:
            KnowledgeBaseBusyError: somebody else is writing; it says who.
            KnowledgeBaseNotFoundError: the folder was removed or replaced since it was opened.
            StorageError: the folder cannot be written.
        """
        if self._reserved_by == threading.get_ident():
            self._reserved_by = None
            try:
                yield
            finally:
                self._reserved_by = threading.get_ident()
            return
        self._check()  # or the lock would be one on another folder
        lock = FolderLock(self._folder / _LOCK, timeout_s)
        try:
            lock.acquire()
        except Timeout as error:
            raise KnowledgeBaseBusyError(
                f"somebody else is writing to {self._folder}{self._who()}; wait until that has finished, then try again"
            ) from error
        except OSError as error:
            raise StorageError(
                f"{self._folder} cannot be written: {error.strerror or error}; see to the disk and the folder's rights"
            ) from error
        try:
            self._sign(what)
            self._check()
            sweep(self._folder, self._clock.unix())
            yield
        finally:
            if lock.is_held:  # else it is another writer's
                with contextlib.suppress(OSError):
                    (self._folder / _WRITER).unlink(missing_ok=True)
            lock.release()

    @contextlib.contextmanager
    def reserved(self, what: str) -> Iterator[None]:
        """As `held`, and in here this thread may enter `held`, once at a time, which does not let go of it."""
        with self.held(what):
            self._reserved_by = threading.get_ident()
            try:
                yield
            finally:
                self._reserved_by = None

    @contextlib.contextmanager
    def held_to_look(self, what: str) -> Iterator[bool]:
        """As `held`, for what can do without writing: not held where the folder may not be written.

        Yields:
            Whether it is held.
        """
        may_write = os.access(self._folder, os.W_OK)
        with self.held(what) if may_write else contextlib.nullcontext():
            yield may_write

    def held_to_open(self, what: str) -> contextlib.AbstractContextManager[None]:
        """As `held`, for what is done once and quickly when a folder is opened; who comes second waits."""
        return self.held(what, timeout_s=_OPENING_TIMEOUT_S)

    def _sign(self, what: str) -> None:
        content = {"pid": os.getpid(), "host": socket.gethostname(), "what": what, "since": self._clock.unix()}
        with contextlib.suppress(OSError), open_file(self._folder / _WRITER) as file:  # not on a full disk
            file.write(json.dumps(content).encode() + b"\n")

    def _who(self) -> str:
        """`: process 42 on alba (add, since 14:03:10)`; empty where that is unknown."""
        try:
            found = json.loads((self._folder / _WRITER).read_text(encoding="utf-8"))
            since = time.strftime("%H:%M:%S", time.localtime(float(found["since"])))
            return f": process {int(found['pid'])} on {found['host']} ({found['what']}, since {since})"
        except (OSError, ValueError, KeyError, TypeError):
            return ""


def _is_own(name: str) -> bool:
    """Whether an interrupted making may have left it."""
    return name in (_LOCK, _WRITER) or (name.startswith(f".{MANIFEST}.") and name.endswith(".tmp"))


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:
        return 0.0
