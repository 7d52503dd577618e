"""KV on disk: one immutable file per node, verified at every read. No torch.

Invariant: `read` returns exactly the bytes that `write` stored for that key and model, or fails. Records do not change;
which of them were used after they were written stands in a list beside them. One process writes to a model's folder,
any number read it. A process killed at any point leaves whole records and at most one temporary file, which the next
writer removes. Files are not synced: a file torn by a power cut fails its checksum. Design:
docs/kv-records.md
"""

import contextlib
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import Timeout

from stillroom.core.folder_lock import FolderLock
from stillroom.core.kv import NodeKey, NodeRecord
from stillroom.core.private_files import make_folder
from stillroom.kvstore.files import (
    TEMPORARY_SUFFIX,
    add_used_key,
    fingerprints,
    folder_of,
    in_blocks,
    key_of,
    path_of,
    read_header,
    read_payload,
    read_used_keys,
    record_paths,
    remove_file,
    replace_used_keys,
    temporary_paths,
    write_file,
)
from stillroom.kvstore.record import (
    FINGERPRINT_SIZE,
    Buffer,
    Defect,
    Header,
    encode,
    header_size_of,
)

logger = logging.getLogger(__name__)

_LOCK = "writer.lock"
_PATIENCE_SECONDS = 0.5
"""How long a store tries to become the writer; `shrink_other_models` holds the lock for a record at a time."""


@dataclass(frozen=True, slots=True)
class RecordCheck:
    """Result of `DiskStore.verify`."""

    num_records: int
    """Records that verified."""
    num_bytes: int
    """Their size on disk."""
    failures: Mapping[NodeKey, Defect]
    """Records that failed since the store was opened; a writer has removed them."""


class DiskStore:
    """The records of one model in a knowledge base's folder of KV.

    Used by one thread. Disk errors are never raised: a record that cannot be read is a miss, a record that cannot be
    written is not stored, and both are counted.
    """

    def __init__(self, root: Path, fingerprint: bytes) -> None:
        """Open the folder, as its writer if it has none, and read the header of every record.

        Args:
            root: folder of all models' KV; made if missing.
            fingerprint: 32 bytes that identify the model, its weights, and the type and layout of its KV.
        """
        assert len(fingerprint) == FINGERPRINT_SIZE, fingerprint
        self.folder = folder_of(root, fingerprint)
        self.fingerprint = fingerprint
        self.verify_failures: Counter[Defect] = Counter()
        """Records that failed verification, by reason."""
        self.num_write_failures = 0
        """Records that could not be written."""
        self._entries: dict[NodeKey, tuple[NodeRecord, int]] = {}
        self._num_bytes = 0
        self._used_keys: set[NodeKey] = set()
        """The keys in the list of used records."""
        self._rejected: dict[NodeKey, Defect] = {}
        self._is_verifying = False
        self._warned: set[tuple[int | None, str]] = set()
        self._lock = self._try_lock()
        self._scan()

    @property
    def is_writer(self) -> bool:
        """Whether this process may store and remove records; otherwise it only reads them."""
        return self._lock is not None

    @property
    def num_bytes(self) -> int:
        """Size on disk of all known records."""
        return self._num_bytes

    def records(self) -> list[tuple[NodeRecord, int]]:
        """Return every known record and its size on disk in bytes. Payloads are verified when they are read."""
        return list(self._entries.values())

    def has(self, key: NodeKey) -> bool:
        """Whether the record is known."""
        return key in self._entries

    def write(self, record: NodeRecord, payload: Buffer, checksum: bytes) -> bool:
        """Store a node's KV and replace what is stored of it; False, and nothing of it is left, if that fails.

        Args:
            checksum: of the payload, computed when it was gathered from the device.
        """
        if not self._may_write():
            return False
        header = encode(record, self.fingerprint, len(payload), checksum)
        path = path_of(self.folder, record.key)
        temporary = path.with_suffix(TEMPORARY_SUFFIX)
        self._forget(record.key)
        try:
            write_file(temporary, (header, payload))
            os.replace(temporary, path)
        except OSError as error:
            remove_file(temporary)
            remove_file(path)
            self.num_write_failures += 1
            self._warn_once(error, "KV cannot be stored on disk and is kept in memory only")
            return False
        self._rejected.pop(record.key, None)
        self._remember(record, len(header) + len(payload))
        if record.key in self._used_keys and not record.is_used:  # computed again since
            self._used_keys.remove(record.key)
            self._list_used(lambda: replace_used_keys(self.folder, self._used_keys))
        return True

    def mark_used(self, key: NodeKey) -> None:
        """Record that a node whose record says otherwise was used. Does nothing if another process is the writer."""
        entry = self._entries.get(key)
        if entry is None or entry[0].is_used or not self._may_write():
            return
        self._entries[key] = (replace(entry[0], is_used=True), entry[1])
        self._used_keys.add(key)
        self._list_used(lambda: add_used_key(self.folder, key))

    def read(self, key: NodeKey, into: memoryview) -> bool:
        """Read a node's KV into a buffer of exactly its size; False, and the buffer is garbage, if that fails.

        A record that fails verification is counted and removed. A missing record is a miss. A record that cannot be
        opened just now, for example for lack of file descriptors, stays.
        """
        try:
            found = read_payload(path_of(self.folder, key), self.fingerprint, into)
        except (FileNotFoundError, NotADirectoryError):
            self._forget(key)
            return False
        except OSError as error:
            self._warn_once(error, "KV on disk cannot be read and is computed again")
            return False
        if isinstance(found, Header):
            return True
        self._reject(key, found)
        if not self._is_verifying:
            logger.warning(
                "stored KV %s failed verification (%s) and will be computed again", key.hex()[:16], found.value
            )
        return False

    def remove(self, key: NodeKey) -> None:
        """Remove a record. Does nothing if it is missing or another process is the writer."""
        if self._may_write():
            self._forget(key)
            remove_file(path_of(self.folder, key))

    def verify(self, progress: Callable[[int, int], None] | None = None) -> RecordCheck:
        """Read and verify every record. Those that fail are in the result, and not in the log.

        Args:
            progress: called after each record with the number of records read and of all records.
        """
        num_records = num_bytes = 0
        buffer = bytearray()
        entries = list(self._entries.values())
        self._is_verifying = True
        for num_done, (record, size) in enumerate(entries, 1):
            payload_size = size - header_size_of(record)
            if len(buffer) < payload_size:
                buffer = bytearray(payload_size)
            if self.read(record.key, memoryview(buffer)[:payload_size]):
                num_records += 1
                num_bytes += size
            if progress is not None:
                progress(num_done, len(entries))
        self._is_verifying = False
        return RecordCheck(num_records, num_bytes, dict(self._rejected))

    def close(self) -> None:
        """Release the writer lock; reads continue to work."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _try_lock(self) -> FolderLock | None:
        try:
            make_folder(self.folder)
            lock = FolderLock(self.folder / _LOCK, _PATIENCE_SECONDS)
            lock.acquire()
            return lock
        except Timeout:
            reason = "another process or instance writes the KV cache of this knowledge base; this one only reads it"
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            reason = f"the KV cache of this knowledge base cannot be written ({error}); it is only read"
        logger.warning(reason)
        return None

    def _may_write(self) -> bool:
        """Whether this process writes to the folder.

        A folder that was removed meanwhile is created and locked again, unless another process locks the new folder.
        """
        if self._lock is None or self._lock.is_held:
            return self._lock is not None
        logger.warning("the KV folder was removed or replaced while this process used it; its KV is computed again")
        known = set(self._entries)
        self._entries.clear()
        self._num_bytes = 0
        self._lock.release()
        self._lock = self._try_lock()
        for path in list(record_paths(self.folder)) if self._lock is not None else ():
            if key_of(path) in known:
                self._admit(path)
            else:  # of another process; this process would never evict it
                remove_file(path)
        return self._lock is not None

    def _scan(self) -> None:
        if self.is_writer:
            for path in list(temporary_paths(self.folder)):
                remove_file(path)
        for path in list(record_paths(self.folder)):
            self._admit(path)
        self._read_used()
        if self._rejected:
            counts = ", ".join(f"{defect.value} {count}" for defect, count in sorted(self.verify_failures.items()))
            logger.warning(
                "%d stored KV records failed verification (%s) and are not used", len(self._rejected), counts
            )

    def _read_used(self) -> None:
        listed = read_used_keys(self.folder)
        self._used_keys = used = {key for key in listed if key in self._entries}
        for key in used:
            record, size = self._entries[key]
            self._entries[key] = (replace(record, is_used=True), size)
        if self.is_writer and listed:
            self._list_used(lambda: replace_used_keys(self.folder, used))

    def _list_used(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._warn_once(error, "after a restart, prepared KV that was used counts as unused")

    def _admit(self, path: Path) -> None:
        """Remember the record in this file, if its header verifies."""
        header = read_header(path, self.fingerprint)
        if isinstance(header, Header):
            self._remember(header.record, header.file_size)
        elif header is not None:
            self._reject(key_of(path), header)

    def _remember(self, record: NodeRecord, size: int) -> None:
        self._entries[record.key] = (record, size)
        self._num_bytes += size

    def _forget(self, key: NodeKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._num_bytes -= entry[1]

    def _reject(self, key: NodeKey, defect: Defect) -> None:
        self.verify_failures[defect] += 1
        self._rejected[key] = defect
        self._forget(key)
        self.remove(key)

    def _warn_once(self, error: OSError, consequence: str) -> None:
        if (error.errno, consequence) not in self._warned:
            self._warned.add((error.errno, consequence))
            logger.warning("%s: %s", consequence, error)


def open_disk(root: Path, fingerprint: bytes, num_writers: int = 1) -> DiskStore:
    """Open a model's folder, or if another process writes to it, the first of `num_writers - 1` further ones.

    Processes that run at the same time then keep KV each in a folder of its own. Further folders are named as those of
    other models, so that KV of removed documents is dropped from all of them.

    Returns:
        A store that writes, or if every folder has a writer, a reader of the model's own.
    """
    for folder_fingerprint in _of_writers(fingerprint, num_writers) if num_writers > 1 else ():
        folder = folder_of(root, folder_fingerprint)
        with contextlib.suppress(OSError):
            make_folder(folder)
        if (lock := _locked(folder)) is not None:
            lock.release()
            store = DiskStore(root, folder_fingerprint)
            if store.is_writer:
                return store
    return DiskStore(root, fingerprint)


def _of_writers(fingerprint: bytes, num_writers: int) -> list[bytes]:
    """Return the names of a model's folders, its own first."""
    further = (hashlib.sha256(b"stillroom-kv-writer\0%d\0" % number + fingerprint) for number in range(1, num_writers))
    return [fingerprint, *(name.digest() for name in further)]


def shrink_other_models(root: Path, fingerprint: bytes, max_bytes: int, num_writers: int = 1) -> int:
    """Remove KV of other models until at most this many bytes of it are left.

    Starts with the model that was stored to least recently, and with its last records, which depend on earlier ones.
    Models that a process writes to keep theirs.

    Args:
        num_writers: as in `open_disk`; all these folders are of this model.

    Returns:
        Bytes of other models that are left.
    """
    records: dict[Path, list[tuple[float, int, Path]]] = {}
    own = _of_writers(fingerprint, num_writers)
    for other in fingerprints(root):
        folder = folder_of(root, other)
        if other not in own and (found := [*_sized(record_paths(folder))]):
            records[folder] = sorted(found, reverse=True)
    left = sum(size for found in records.values() for _, size, _ in found)
    for folder in sorted(records, key=lambda folder: records[folder][0]):
        for _, size, path in records[folder]:
            if left <= max_bytes or (lock := _locked(folder)) is None:
                break
            left -= size if remove_file(path) else 0
            lock.release()  # a process that starts with that model can become its writer
    return left


def _sized(paths: Iterable[Path]) -> Iterator[tuple[float, int, Path]]:
    """Yield modification time, size on disk and path of each file."""
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            yield status.st_mtime, in_blocks(status.st_size), path


def _locked(folder: Path) -> FolderLock | None:
    """Lock a folder for writing; None if another process writes to it, or it cannot be written."""
    lock = FolderLock(folder / _LOCK)
    try:
        lock.acquire()
    except (Timeout, OSError, NotImplementedError):
        return None
    return lock
