"""Records that waiting requests will need, read and verified by another thread before anybody asks for them.

Invariant: `get` gives KV that verified when it was read, with its checksum, and never of a record that was cancelled
since it was requested. It may have been in memory for long, so whatever uses it verifies it again. The thread runs one
function that depends on nothing but the files; all else here is used by the engine's thread alone.
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
"""Gives so many bytes of a record's verified KV, or None if it cannot; in any thread."""


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """What became of records that were read before they were needed."""

    used_bytes: int = 0
    wasted_bytes: int = 0
    """Of those that nobody needed after all."""


@dataclass(slots=True)
class _ReadEntry:
    future: Future[ReadPayload | None]
    num_bytes: int
    num_waiting: int = 0
    """Who requested it and has not released it."""
    is_used: bool = False


class Prefetcher:
    """Reads one record after the other, in the order of requests, and keeps each until nobody waits for it."""

    def __init__(self, read: Reader, capacity_bytes: int) -> None:
        """
        Args:
            capacity_bytes: of all records that are kept or under way; what would exceed it is refused.
        """
        self.stats = PrefetchStats()
        self._read = read
        self._capacity = capacity_bytes
        self._executor = ThreadPoolExecutor(1, "stillroom-prefetch")
        self._entries: dict[NodeKey, _ReadEntry] = {}
        self._abandoned: list[_ReadEntry] = []  # cancelled while they were read, which takes memory until it ends
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of all records that are kept or under way."""
        self._forget_ended()
        return self._num_bytes

    def request(self, key: NodeKey, num_bytes: int) -> bool:
        """Somebody will need this record. False if there is no room for it, or no thread to be had, and then there is
        nothing to release."""
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
        """The record's KV, not to be written to; None if the caller must read it.

        Waits for a read that is under way; one that has not begun is left to the caller, who is here already.
        """
        entry = self._entries.get(key)
        if entry is None or entry.future.cancel():
            return None
        kv = entry.future.result()
        if kv is not None and not entry.is_used:
            entry.is_used = True
            self.stats = replace(self.stats, used_bytes=self.stats.used_bytes + entry.num_bytes)
        return kv

    def release(self, key: NodeKey) -> None:
        """Who requested it does not need it any more."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.num_waiting -= 1
            if entry.num_waiting == 0:
                self.cancel(key)

    def cancel(self, key: NodeKey) -> None:
        """The record is gone, or another now: nobody gets what was read of it."""
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
        """Forget everything, and wait for the thread to end. Nothing may be requested any more."""
        for key in list(self._entries):
            self.cancel(key)
        self._executor.shutdown()
        self._forget_ended()

    def _forget_ended(self) -> None:
        under_way = [entry for entry in self._abandoned if not entry.future.done()]
        self._num_bytes -= sum(entry.num_bytes for entry in self._abandoned) - sum(one.num_bytes for one in under_way)
        self._abandoned = under_way


def read_record(folder: Path, fingerprint: bytes, is_pinned: bool, key: NodeKey, num_bytes: int) -> ReadPayload | None:
    """A record's payload of so many bytes, verified; None if that fails for whatever reason.

    Args:
        folder: of the model's records.
        is_pinned: whether to put it into page-locked memory.
    """
    try:
        payload = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        found = read_payload(path_of(folder, key), fingerprint, payload.numpy().data)
    except (OSError, MemoryError, RuntimeError):  # PyTorch's own allocator raises the latter
        return None
    return ReadPayload(payload, found.checksum) if isinstance(found, Header) else None
