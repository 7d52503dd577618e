"""A write lock on a folder that detects removal or replacement of the folder or the lock file.

The operating system locks a file, not its name: after `rm -r` another process can lock a new file of the same name. The
holder keeps the file open, so its inode number is not reused, and comparing it with the file under the name is sound.
"""

import contextlib
import os
from pathlib import Path

from filelock import FileLock

from stillroom.core.private_files import create_file, file_mode

_POLL_SECONDS = 0.005


class FolderLock:
    """A write lock on the folder of a lock file. Not thread-safe; may be released by another thread."""

    def __init__(self, path: Path, timeout_s: float = 0.0) -> None:
        """
        Args:
            path: the lock file.
            timeout_s: longest wait of `acquire`.
        """
        self._path = path
        self._timeout_s = timeout_s
        self._lock: FileLock | None = None
        self._descriptor = -1

    @property
    def is_held(self) -> bool:
        """Whether the lock was acquired and its file is still under its name."""
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
            OSError: the folder cannot be written.
            NotImplementedError: the file system has no locks.
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
        """Release the lock. Idempotent."""
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
