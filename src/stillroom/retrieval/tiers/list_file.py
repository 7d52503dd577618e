"""Memory-mapped file of inverted lists and their full vectors.

    quantizers      an IndexIVFPQ of faiss without entries
    lists           codes, then rows of each list; padded to 8 bytes
    ids, vectors    chunk id and full vector of each row, in the order of addition; vectors are optional
    checksums       CRC-32 of each list and of each vector
    contents        JSON: places of the parts, and the corpus

Opening reads quantizers, ids and checksums. A list or vector is checked when it is first read, so the time to open does
not depend on the size of the file and no damaged data is served. A new file is written beside the old one and renamed;
processes that have mapped the old one continue to read it.
"""

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stillroom.core.private_files import open_file
from stillroom.errors import CorruptKnowledgeBaseError
from stillroom.retrieval.atomic_files import replace_durably
from stillroom.retrieval.lazy_faiss import faiss
from stillroom.retrieval.tiers.partition import Lists

Vectors = NDArray[np.float32]
Entries = tuple[NDArray[np.int64], NDArray[np.uint8]]
"""Rows [s] and codes [s, code bytes] of one list."""

_END = struct.Struct("<QI4s")
"""Length of the contents, their CRC-32, magic."""
_MAGIC = b"SRL1"
_PAGE = mmap.PAGESIZE
_BLOCK = 4096
"""Vectors per read."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Corpus and generation of a file."""

    corpus_id: str
    generation: int
    num_trained: int
    """Vectors at the training of the quantizers."""
    commit_id: str = ""
    """See `Corpus.commit_id`."""


@dataclass(frozen=True)
class ListPlaces:
    """Where lists lie in memory, each array [nlist]."""

    codes: NDArray[np.int64]
    """Address of each list's codes."""
    rows: NDArray[np.int64]
    """Address of each list's rows."""
    sizes: NDArray[np.int64]


class ListFile:
    """Immutable content of a file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Map a file.

        Raises:
            FileNotFoundError: the file is missing.
            CorruptKnowledgeBaseError: the file is malformed, truncated, or was replaced during this call.
        """
        self.path = path
        self.mapped: Any = None
        """faiss' view of the lists."""
        try:
            with path.open("rb") as stream:
                self._open(stream)
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, struct.error) as error:
            raise CorruptKnowledgeBaseError(f"{path} is damaged ({error}); it will be rebuilt") from error

    def _open(self, stream: BinaryIO) -> None:
        status = os.fstat(stream.fileno())
        self.inode = status.st_ino
        self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        contents = _contents(self._map)
        self.origin = Origin(**contents["origin"])
        self._at: dict[str, list[int]] = contents["parts"]
        quantizers = self._checked("quantizers", contents["crcs"])
        self.shell: Any = faiss.deserialize_index(np.frombuffer(quantizers, dtype=np.uint8).copy())
        """An IndexIVFPQ without entries."""
        self.sizes = np.frombuffer(self._checked("sizes", contents["crcs"]), dtype=np.int64)
        """[nlist]: entries of each list."""
        self.ids = np.frombuffer(self._checked("ids", contents["crcs"]), dtype=np.int64)
        """[n]: chunk id of each row."""
        self._list_crcs = np.frombuffer(self._checked("list_crcs", contents["crcs"]), dtype=np.uint32)
        self._vector_crcs = np.frombuffer(self._checked("vector_crcs", contents["crcs"]), dtype=np.uint32)
        vectors = np.frombuffer(self._part("vectors"), dtype=np.float32)
        self._vectors = vectors.reshape(-1, int(self.shell.d))
        if len(self.sizes) != self.shell.nlist or len(self._vectors) not in (0, len(self.ids)):
            raise ValueError("its parts do not fit together")
        padded = capacity(self.sizes) * self.entry_bytes
        self._offsets = self._at["lists"][0] + np.concatenate([[0], np.cumsum(padded)])
        if self._offsets[-1] != sum(self._at["lists"]):
            raise ValueError("its lists are truncated")
        codes = np.frombuffer(self._map, np.uint8).ctypes.data + self._offsets[:-1]
        self.places = ListPlaces(codes, codes + capacity(self.sizes) * self.code_size, self.sizes)
        """Where the lists are mapped, as long as this object lives."""
        self._is_list_good = np.zeros(len(self.sizes), dtype=bool)
        self._is_vector_good = np.zeros(len(self._vectors), dtype=bool)
        self._map_lists(status.st_size)
        if os.stat(self.path).st_ino != self.inode:  # faiss opens by name
            raise OSError("it was replaced while it was opened")

    @property
    def code_size(self) -> int:
        return int(self.shell.code_size)

    @property
    def entry_bytes(self) -> int:
        """Bytes of a code and its row."""
        return self.code_size + 8

    @property
    def has_vectors(self) -> bool:
        return len(self._vectors) == len(self.ids)

    def quantizers_crc(self) -> int:
        """Return the checksum of the quantizers; if it is equal, list numbers mean the same."""
        return zlib.crc32(self._part("quantizers"))

    def entries(self, number: int) -> Entries:
        """Return rows and codes of one list, as views into the file.

        Raises:
            CorruptKnowledgeBaseError: the list is damaged.
        """
        self.check_lists(np.array([number]))
        return self._entries(number)

    def check_lists(self, numbers: Lists) -> None:
        """Check the checksums of lists [p] that were not checked yet.

        Raises:
            CorruptKnowledgeBaseError: a list is damaged.
        """
        for number in numbers[~self._is_list_good[numbers]].tolist():
            rows, codes = self._entries(number)
            if zlib.crc32(rows.data, zlib.crc32(codes.data)) != self._list_crcs[number]:
                raise CorruptKnowledgeBaseError(f"{self.path}: list {number} is damaged; the index will be rebuilt")
            self._is_list_good[number] = True

    def vectors(self, rows: NDArray[np.int64]) -> Vectors:
        """Return a copy of the full vectors [r, d] of rows [r].

        Raises:
            CorruptKnowledgeBaseError: a vector is damaged.
        """
        new = rows[~self._is_vector_good[rows]]
        width = self._vectors.shape[1] * 4
        self._will_need((self._at["vectors"][0] + row * width, width) for row in new.tolist())
        for row in new.tolist():
            if zlib.crc32(self._vectors[row].data) != self._vector_crcs[row]:
                raise CorruptKnowledgeBaseError(f"{self.path}: a vector is damaged; the index will be rebuilt")
            self._is_vector_good[row] = True
        return self._vectors[rows]

    def will_need(self, numbers: Lists) -> None:
        """Let the system read these lists ahead (madvise)."""
        self._will_need(
            (int(self._offsets[number]), int(self._offsets[number + 1] - self._offsets[number])) for number in numbers
        )

    def drop_pages(self) -> None:
        """Drop the file's pages from memory and the page cache, for measuring. Replaces `mapped`."""
        self.mapped = None
        self._map.madvise(mmap.MADV_DONTNEED)
        with self.path.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._map_lists(len(self._map))

    # Inside

    def _part(self, name: str) -> memoryview:
        start, num_bytes = self._at[name]
        if start < 0 or num_bytes < 0 or start + num_bytes > len(self._map):
            raise ValueError(f"{name} is truncated")
        return memoryview(self._map)[start : start + num_bytes]

    def _checked(self, name: str, crcs: dict[str, int]) -> memoryview:
        part = self._part(name)
        if zlib.crc32(part) != crcs[name]:
            raise ValueError(f"{name} is damaged")
        return part

    def _entries(self, number: int) -> Entries:
        size, start = int(self.sizes[number]), int(self._offsets[number])
        codes = np.frombuffer(self._map, np.uint8, size * self.code_size, start).reshape(size, self.code_size)
        rows_at = start + int(capacity(self.sizes[number])) * self.code_size
        return np.frombuffer(self._map, np.int64, size, rows_at), codes

    def _will_need(self, extents: Iterable[tuple[int, int]]) -> None:
        for start, num_bytes in extents:
            if num_bytes:
                first = start // _PAGE * _PAGE
                self._map.madvise(mmap.MADV_WILLNEED, first, start + num_bytes - first)

    def _map_lists(self, file_bytes: int) -> None:
        """Map each list at its place in the file."""
        mapped: Any = faiss.OnDiskInvertedLists()
        mapped.nlist, mapped.code_size = len(self.sizes), self.code_size
        mapped.filename, mapped.read_only, mapped.totsize = str(self.path), True, file_bytes
        mapped.prefetch_nthread = 0  # `will_need` prefetches without threads
        one = faiss.OnDiskOneList()
        capacities = capacity(self.sizes).tolist()
        for number, (size, offset) in enumerate(zip(self.sizes.tolist(), self._offsets.tolist(), strict=False)):
            one.size, one.capacity, one.offset = size, capacities[number], offset
            mapped.lists.push_back(one)  # copied
        mapped.do_mmap()
        self.mapped = mapped


def write_list_file(
    path: Path,
    origin: Origin,
    shell: Any,
    lists: Iterable[Entries],
    ids: NDArray[np.int64],
    vectors: Iterable[Vectors] = (),
) -> None:
    """Write a file atomically, with at most one list and one block of vectors in memory.

    Args:
        shell: an IndexIVFPQ without entries.
        lists: entries of each list in turn; rows count from 0.
        ids: chunk ids of the rows, [n].
        vectors: vectors of all rows in blocks [b, d], or empty.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open_file(temporary) as stream:
            _ListWriter(stream).write(origin, shell, lists, ids, vectors)
            stream.flush()
            os.fsync(stream.fileno())
        replace_durably(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def blocks(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield rows [n] in blocks of a few thousand."""
    for start in range(0, len(rows), _BLOCK):
        yield rows[start : start + _BLOCK]


class _ListWriter:
    """Writes the parts of a file, one after the other."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._parts: dict[str, list[int]] = {}
        self._crcs: dict[str, int] = {}

    def write(
        self,
        origin: Origin,
        shell: Any,
        lists: Iterable[Entries],
        ids: NDArray[np.int64],
        vectors: Iterable[Vectors],
    ) -> None:
        self._put("quantizers", faiss.serialize_index(shell))
        sizes, list_crcs = self._put_lists(lists)
        self._put("ids", ids.astype(np.int64, copy=False))
        self._put("vector_crcs", self._put_vectors(vectors))
        self._put("sizes", np.array(sizes, dtype=np.int64))
        self._put("list_crcs", np.array(list_crcs, dtype=np.uint32))
        contents = json.dumps({"origin": asdict(origin), "parts": self._parts, "crcs": self._crcs}).encode()
        self._stream.write(contents + _END.pack(len(contents), zlib.crc32(contents), _MAGIC))

    def _put(self, name: str, array: NDArray[Any]) -> None:
        start = self._start()
        content = np.ascontiguousarray(array).tobytes()
        self._stream.write(content)
        self._parts[name], self._crcs[name] = [start, len(content)], zlib.crc32(content)

    def _put_lists(self, lists: Iterable[Entries]) -> tuple[list[int], list[int]]:
        """Write the lists and return their sizes and checksums."""
        start = self._start()
        sizes, crcs = [], []
        for rows, codes in lists:
            num_empty = int(capacity(np.int64(len(rows)))) - len(rows)
            code_bytes, row_bytes = codes.tobytes(), rows.astype(np.int64, copy=False).tobytes()
            for content, entry in ((code_bytes, codes.shape[1]), (row_bytes, 8)):
                self._stream.write(content + bytes(num_empty * entry))
            sizes.append(len(rows))
            crcs.append(zlib.crc32(row_bytes, zlib.crc32(code_bytes)))
        self._parts["lists"] = [start, self._stream.tell() - start]
        return sizes, crcs

    def _put_vectors(self, vectors: Iterable[Vectors]) -> NDArray[np.uint32]:
        start = self._start()
        crcs: list[int] = []
        for block in vectors:
            content = np.ascontiguousarray(block, dtype=np.float32)
            self._stream.write(content.data)
            crcs += [zlib.crc32(row.data) for row in content]
        self._parts["vectors"] = [start, self._stream.tell() - start]
        return np.array(crcs, dtype=np.uint32)

    def _start(self) -> int:
        """Pad to 64 bytes and return the offset of the next part."""
        self._stream.write(bytes(-self._stream.tell() % 64))
        return self._stream.tell()


def _contents(mapped: mmap.mmap) -> dict[str, Any]:
    num_bytes, crc, magic = _END.unpack(mapped[-_END.size :])
    content = mapped[len(mapped) - _END.size - num_bytes : -_END.size] if num_bytes < len(mapped) else b""
    if magic != _MAGIC or zlib.crc32(content) != crc:
        raise ValueError("it is truncated or has another format")
    found: dict[str, Any] = json.loads(content)
    return found


def capacity(size: Any) -> Any:
    """Return the capacity of a list of this size: rows are aligned to 8 bytes."""
    return -(-size // 8) * 8
