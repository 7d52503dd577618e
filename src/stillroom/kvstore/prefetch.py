"""Prefetching: another thread reads and verifies the records that waiting requests will need.

Invariant: `get` returns KV that verified when it was read, with its checksum, and never a record that was cancelled
since it was requested. The caller verifies it again, as it may have been in memory for long. The thread runs one
function that depends on the files only; the engine thread alone uses everything else here.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stillroom.core.kv import NodeKey
from stillroom.kvstore.files import path_of, read_payload
from stillroom.kvstore.record import Header, is_intact


@dataclass(frozen=True, slots=True)
class ReadPayload:
    """A record's payload in memory."""

    payload: torch.Tensor
    """Flat bytes."""
    checksum: bytes
    """Of the record, computed when the KV left the device."""

    def is_intact(self) -> bool:
        """Whether the bytes are still those of the record."""
        return is_intact(self.payload.numpy().data, self.checksum)


Reader = Callable[[NodeKey, int], ReadPayload | None]
"""Reads this many bytes of a record's verified KV; None if it cannot. Runs in any thread."""


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """Bytes of prefetched records."""

    used_bytes: int = 0
    wasted_bytes: int = 0
    """Prefetched and never used."""


@dataclass(slots=True)
class _ReadEntry:
    future: Future[ReadPayload | None]
    num_bytes: int
    num_waiting: int = 0
    """Requests that have not been released."""
    is_used: bool = False


class Prefetcher:
    """Reads records in the order of requests, and keeps each until all its requests are released."""

    def __init__(self, read: Reader, capacity_bytes: int, num_threads: int = 1) -> None:
        """
        Args:
            capacity_bytes: of all records that are kept or being read; requests beyond it are refused.
            num_threads: that read at the same time.
        """
        self.stats = PrefetchStats()
        self._read = read
        self._capacity = capacity_bytes
        self._executor = ThreadPoolExecutor(num_threads, "stillroom-prefetch")
        self._entries: dict[NodeKey, _ReadEntry] = {}
        self._abandoned: list[_ReadEntry] = []  # cancelled while being read; they take memory until the read ends
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all records that are kept or being read."""
        self._forget_ended()
        return self._num_bytes

    @property
    def is_reading(self) -> bool:
        """Whether a read has not ended."""
        return not all(entry.future.done() for entry in list(self._entries.values()))

    def request(self, key: NodeKey, num_bytes: int) -> bool:
        """Start reading a record; False, and there is nothing to release, if memory or a thread is lacking."""
        entry = self._entries.get(key)
        if entry is None and self.num_bytes + num_bytes > self._capacity:
            return False
        if entry is None or entry.future.cancelled():
            try:
                future = self._executor.submit(self._read, key, num_bytes)
            except RuntimeError:
                return False
            if entry is None:
                entry = self._entries[key] = _ReadEntry(future, num_bytes)
                self._num_bytes += num_bytes
            entry.future = future
        entry.num_waiting += 1
        return True

    def get(self, key: NodeKey) -> ReadPayload | None:
        """Return the record's KV, which must not be written to; None if the caller must read it.

        Waits for a read in progress. A read that has not begun is cancelled, and the caller reads instead.
        """
        entry = self._entries.get(key)
        if entry is None or entry.future.cancel():
            return None
        kv = entry.future.result()
        if kv is not None and not entry.is_used:
            entry.is_used = True
            self.stats = replace(self.stats, used_bytes=self.stats.used_bytes + entry.num_bytes)
        return kv

    def is_done(self, key: NodeKey) -> bool:
        """Whether `get` would return without waiting and without a cancellation."""
        entry = self._entries.get(key)
        return entry is not None and entry.future.done() and not entry.future.cancelled()

    def release(self, key: NodeKey) -> None:
        """Undo one `request`."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.num_waiting -= 1
            if entry.num_waiting == 0:
                self.cancel(key)

    def cancel(self, key: NodeKey) -> None:
        """Drop what was read of a record that was removed or replaced."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        if entry.future.cancel() or entry.future.done():
            self._num_bytes -= entry.num_bytes
        else:
            self._abandoned.append(entry)
        if not (entry.is_used or entry.future.cancelled()):
            self.stats = replace(self.stats, wasted_bytes=self.stats.wasted_bytes + entry.num_bytes)

    def close(self) -> None:
        """Drop everything and wait for the thread to end. No request is allowed afterwards."""
        for key in list(self._entries):
            self.cancel(key)
        self._executor.shutdown()
        self._forget_ended()

    def _forget_ended(self) -> None:
        running = [entry for entry in self._abandoned if not entry.future.done()]
        self._num_bytes -= sum(entry.num_bytes for entry in self._abandoned) - sum(entry.num_bytes for entry in running)
        self._abandoned = running


def read_record(folder: Path, fingerprint: bytes, is_pinned: bool, key: NodeKey, num_bytes: int) -> ReadPayload | None:
    """Read and verify a record's payload of this many bytes; None if that fails for any reason.

    Args:
        folder: of the model's records.
        is_pinned: use page-locked memory.
    """
    try:
        payload = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        found = read_payload(path_of(folder, key), fingerprint, payload.numpy().data)
    except (OSError, MemoryError, RuntimeError):  # PyTorch's own allocator raises the latter
        return None
    return ReadPayload(payload, found.checksum) if isinstance(found, Header) else None
