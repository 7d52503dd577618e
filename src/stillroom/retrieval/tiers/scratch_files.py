"""Files without names, which are gone with this process: in the folder of a knowledge base, or among the system's own
temporary files where that folder cannot be written or its disk is full."""

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
    """A file of lists.

    Args:
        folder: of the knowledge base.
        write: writes it to a path; called once more, with another, where the first would not do.

    Raises:
        OSError: it can be written nowhere.
    """

    def make(place: Path) -> ListFile:
        write(place / "lists")
        return ListFile(place / "lists")  # mapped, it lives on without a name

    try:
        return _made_in(folder, make)
    except OSError:
        return _made_in(None, make)


class Spill:
    """Vectors in rows, which count from 0."""

    def __init__(self, folder: Path, dimension: int) -> None:
        """`folder`: of the knowledge base. Raises as `put`."""
        self._dimension = dimension
        self._count = 0
        try:
            self._is_elsewhere, self._descriptor = False, _opened(self, folder)
        except OSError:
            self._is_elsewhere, self._descriptor = True, _opened(self, None)

    def __len__(self) -> int:
        return self._count

    def put(self, start: int, vectors: Vectors) -> None:
        """The rows from `start` on are these [n, d], and the last ones.

        Raises:
            OSError: there is no room. The rows before `start` stay.
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
        """Those [r, d] of these rows."""
        width = 4 * self._dimension
        found = b"".join(os.pread(self._descriptor, width, width * row) for row in rows.tolist())
        return np.frombuffer(found, dtype=np.float32).reshape(len(rows), self._dimension)

    def as_array(self) -> Vectors:
        """All [n, d], mapped; there is at least one."""
        mapped = mmap.mmap(self._descriptor, 4 * self._dimension * self._count, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, dtype=np.float32).reshape(self._count, self._dimension)

    def _move(self, num_bytes: int) -> None:
        """To the system's own temporary files. Who reads the old file just now may finish."""
        new = _opened(self, None)
        for at in range(0, num_bytes, _BLOCK_BYTES):
            _write(new, os.pread(self._descriptor, min(_BLOCK_BYTES, num_bytes - at), at), at)
        self._is_elsewhere, self._descriptor = True, new


def _opened(owner: object, folder: Path | None) -> int:
    """A new file that is closed with its owner."""
    descriptor = _made_in(folder, lambda place: os.open(place / "vectors", os.O_RDWR | os.O_CREAT, 0o600))
    weakref.finalize(owner, os.close, descriptor)
    return descriptor


def _write(descriptor: int, content: bytes, at: int) -> None:
    left = memoryview(content)
    while left:  # a write may do less than all
        num_written = os.pwrite(descriptor, left, at)
        left, at = left[num_written:], at + num_written


def _made_in(folder: Path | None, make: Callable[[Path], Made]) -> Made:
    """What is made in a new folder that is then removed; None is the system's place for such."""
    prefix = "stillroom-" if folder is None else ".scratch-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as place:
        return make(Path(place))
