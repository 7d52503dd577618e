"""A lock on a folder that notices when the folder, or the lock's file, was removed or replaced under its holder.

The system's lock is on a file, not on its name: after `rm -r` another process can lock a new file of the same name, and
both would believe that they alone write. The holder keeps the file open, so its inode number is not used again, and
comparing it with what stands under the name is sound.
"""

import contextlib
import os
from pathlib import Path

from filelock import FileLock

from stillroom.core.private_files import create_file, file_mode

_POLL_SECONDS = 0.005


class FolderLock:
    """The right to write to the folder of a lock file. Not thread-safe; may be released by another thread."""

    def __init__(self, path: Path, timeout_s: float = 0.0) -> None:
        """
        Args:
            path: of the lock's file.
            timeout_s: how long `acquire` waits for another holder.
        """
        self._path = path
        self._timeout_s = timeout_s
        self._lock: FileLock | None = None
        self._descriptor = -1

    @property
    def is_held(self) -> bool:
        """Whether it was acquired, and its file still stands under its name."""
        if self._lock is None:
            return False
        try:
            found, held = os.stat(self._path), os.fstat(self._descriptor)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            filelock.Timeout: another process or thread holds it.
            OSError, NotImplementedError: the folder cannot be written, or has no locks.
        """
        assert self._lock is None, "acquired twice"
        while True:
            create_file(self._path)
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            lock = FileLock(self._path, timeout=self._timeout_s, thread_local=False, mode=file_mode(self._path.parent))
            try:
                lock.acquire(poll_interval=_POLL_SECONDS)
            except BaseException:
                self._close()
                raise
            self._lock = lock
            if self.is_held:
                return
            self.release()  # its file was removed between opening and locking it

    def release(self) -> None:
        """Let go of it. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self._close()
            lock.release(force=True)

    def __enter__(self) -> "FolderLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)
