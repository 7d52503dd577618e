"""Unnamed temporary files of lists and vectors, which disappear with the process.

They are in the folder of the knowledge base, or among the system's temporary files if that folder is not writable or
its disk is full.
"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stillroom.retrieval.tiers.list_file import ListFile

Vectors = NDArray[np.float32]
Made = TypeVar("Made")

_BLOCK_BYTES = 1 << 22


def scratch_list_file(folder: Path, write: Callable[[Path], None]) -> ListFile:
    """Write and open an unnamed file of lists.

    Args:
        folder: folder of the knowledge base.
        write: writes the file to a path; called a second time with another path if the first fails.

    Raises:
        OSError: neither place can be written.
    """

    def make(place: Path) -> ListFile:
        write(place / "lists")
        return ListFile(place / "lists")  # mapped, so it survives the removal of its name

    try:
        return _make_in(folder, make)
    except OSError:
        return _make_in(None, make)


class Spill:
    """Vectors in an unnamed file, by row from 0."""

    def __init__(self, folder: Path, dimension: int) -> None:
        """`folder`: folder of the knowledge base. Raises as `put`."""
        self._dimension = dimension
        self._count = 0
        try:
            self._is_elsewhere, self._descriptor = False, _opened(self, folder)
        except OSError:
            self._is_elsewhere, self._descriptor = True, _opened(self, None)

    def __len__(self) -> int:
        return self._count

    def put(self, start: int, vectors: Vectors) -> None:
        """Write vectors [n, d] at row `start` and drop rows behind them.

        Raises:
            OSError: the disk is full. The rows before `start` stay.
        """
        content = np.ascontiguousarray(vectors, dtype=np.float32).tobytes()
        at = 4 * self._dimension * start
        try:
            _write(self._descriptor, content, at)
        except OSError:
            if self._is_elsewhere:
                raise
            self._move(at)
            _write(self._descriptor, content, at)
        self._count = start + len(vectors)

    def vectors(self, rows: NDArray[np.int64]) -> Vectors:
        """Return the vectors [r, d] of rows [r]."""
        width = 4 * self._dimension
        found = b"".join(os.pread(self._descriptor, width, width * row) for row in rows.tolist())
        return np.frombuffer(found, dtype=np.float32).reshape(len(rows), self._dimension)

    def as_array(self) -> Vectors:
        """Return all vectors [n, d], mapped. Precondition: there is at least one."""
        mapped = mmap.mmap(self._descriptor, 4 * self._dimension * self._count, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, dtype=np.float32).reshape(self._count, self._dimension)

    def _move(self, num_bytes: int) -> None:
        """Move to the system's temporary files. Reads of the old file in progress can finish."""
        new = _opened(self, None)
        for at in range(0, num_bytes, _BLOCK_BYTES):
            _write(new, os.pread(self._descriptor, min(_BLOCK_BYTES, num_bytes - at), at), at)
        self._is_elsewhere, self._descriptor = True, new


def _opened(owner: object, folder: Path | None) -> int:
    """Open a new unnamed file that is closed when `owner` is collected."""
    descriptor = _make_in(folder, lambda place: os.open(place / "vectors", os.O_RDWR | os.O_CREAT, 0o600))
    weakref.finalize(owner, os.close, descriptor)
    return descriptor


def _write(descriptor: int, content: bytes, at: int) -> None:
    left = memoryview(content)
    while left:  # a write may be partial
        num_written = os.pwrite(descriptor, left, at)
        left, at = left[num_written:], at + num_written


def _make_in(folder: Path | None, make: Callable[[Path], Made]) -> Made:
    """Call `make` with a temporary folder below `folder`; None takes the system's place for temporary files."""
    prefix = "stillroom-" if folder is None else ".scratch-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as place:
        return make(Path(place))
