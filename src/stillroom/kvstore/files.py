"""Paths of record files, and operations on them that need no model. No torch.

A record is `<root>/<fingerprint>/<first two digits of the key>/<key>.kv`, in hexadecimal. A file appears whole under
its name and never changes, so these functions are safe while other processes use the same folders: to them a removed
file is a miss. Files of other names are left alone.
"""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NO_TENANT, NodeKey, OwnerTag
from stillroom.core.private_files import appended_file, make_folder, opened_file
from stillroom.kvstore.record import (
    KEY_SIZE,
    PAGE_SIZE,
    Buffer,
    Defect,
    Header,
    header_size,
    header_size_for,
    inspect,
    is_intact,
)

KV_FOLDER = "kv"
"""Name of the root in a knowledge base's folder."""
USED_KEYS = "used.keys"
"""Name of the file, in a model's folder, that lists the records which were used after they were written."""
SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"
_BLOCK_BYTES = 4096
"""Allocation unit of common file systems, or a multiple of it."""
_RECORD = re.compile(r"[0-9a-f]{64}\.kv")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.tmp")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class PreparedUsage:
    """Records of chunks that were computed before a question asked for them, or in their document's context."""

    num_chunks: int = 0
    num_used: int = 0
    """Those that a question has used."""
    num_bytes: int = 0
    chunks_by_bits: Mapping[int, int] = field(default_factory=dict)
    """Chunks by bits of each number."""

    def __add__(self, other: "PreparedUsage") -> "PreparedUsage":
        return PreparedUsage(
            self.num_chunks + other.num_chunks,
            self.num_used + other.num_used,
            self.num_bytes + other.num_bytes,
            dict(Counter(self.chunks_by_bits) + Counter(other.chunks_by_bits)),
        )


@dataclass(frozen=True, slots=True)
class FolderUsage:
    """Stored KV of one model."""

    fingerprint: bytes
    num_records: int
    num_bytes: int
    prepared: PreparedUsage = PreparedUsage()


def size_on_disk(payload_size: int, num_seen: int = 1, notes_size: int = 0) -> int:
    """Return the bytes of a record's file, header and payload, in whole blocks of the file system."""
    return in_blocks(header_size_for(num_seen, notes_size) + payload_size)


def in_blocks(num_bytes: int) -> int:
    """Round up to whole blocks of the file system."""
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def folder_of(root: Path, fingerprint: bytes) -> Path:
    """Return the folder of one model's records."""
    return root / fingerprint.hex()


def path_of(folder: Path, key: NodeKey) -> Path:
    """Return the path of a node's record."""
    name = key.hex()
    return folder / name[:2] / (name + SUFFIX)


def key_of(path: Path) -> NodeKey:
    """Return the key of a record by its path."""
    return NodeKey(bytes.fromhex(path.stem))


def record_paths(folder: Path) -> Iterator[Path]:
    """Yield every file that is named like a record, unordered."""
    return _paths(folder, _RECORD)


def temporary_paths(folder: Path) -> Iterator[Path]:
    """Yield every file whose writing was not completed."""
    return _paths(folder, _TEMPORARY)


def read_header(path: Path, fingerprint: bytes, trailer_size: int = 0) -> Header | Defect | None:
    """Read and verify a record's header, of one page or more; None if the file is missing or cannot be opened.

    Args:
        trailer_size: bytes behind the record that are not part of it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _inspect(descriptor, key_of(path), fingerprint, trailer_size)
    except OSError:
        return Defect.UNREADABLE
    finally:
        os.close(descriptor)


def read_payload(path: Path, fingerprint: bytes, into: memoryview) -> Header | Defect:
    """Read a record's payload into a buffer of exactly its size; return the header if all of it verifies.

    Raises:
        OSError: the file is missing or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = _inspect(descriptor, key_of(path), fingerprint)
        if isinstance(header, Defect):
            return header
        if header.payload_size != len(into) or not _fill(descriptor, into):
            return Defect.SIZE
    except OSError:
        return Defect.UNREADABLE
    finally:
        os.close(descriptor)
    return header if is_intact(into, header.checksum) else Defect.CHECKSUM


def stored_record(path: Path) -> bytes | None:
    """Return the bytes of a record on disk; None if it is gone."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def read_used_keys(folder: Path) -> list[NodeKey]:
    """Return the keys of a model's records that were used after they were written; keys of removed records may be among
    them. A damaged list names fewer or unknown keys."""
    try:
        data = (folder / USED_KEYS).read_bytes()
    except OSError:
        return []
    return [NodeKey(data[start : start + KEY_SIZE]) for start in range(0, len(data) - KEY_SIZE + 1, KEY_SIZE)]


def add_used_key(folder: Path, key: NodeKey) -> None:
    """Add a key to the list of used records. Raises OSError."""
    descriptor = appended_file(folder / USED_KEYS)
    try:
        os.write(descriptor, key)
    finally:
        os.close(descriptor)


def replace_used_keys(folder: Path, keys: Iterable[NodeKey]) -> None:
    """Replace the list of used records. Raises OSError."""
    path = folder / USED_KEYS
    temporary = path.with_suffix(TEMPORARY_SUFFIX)
    write_file(temporary, (b"".join(sorted(keys)),))
    os.replace(temporary, path)


def fingerprints(root: Path) -> list[bytes]:
    """Return the fingerprints of the models that have a folder."""
    return [bytes.fromhex(name) for name in sorted(_names(root)) if _FINGERPRINT.fullmatch(name)]


def usage(root: Path) -> list[FolderUsage]:
    """Return the number of records and bytes of each model, without verification of payloads."""
    found = []
    for fingerprint in fingerprints(root):
        folder = folder_of(root, fingerprint)
        used, sizes, prepared = set(read_used_keys(folder)), [], PreparedUsage()
        for path in record_paths(folder):
            with contextlib.suppress(OSError):
                sizes.append(path.stat().st_size)
                prepared += _prepared_usage(read_header(path, fingerprint), used)
        found.append(FolderUsage(fingerprint, len(sizes), sum(sizes), prepared))
    return found


def _prepared_usage(header: Header | Defect | None, used: Collection[NodeKey]) -> PreparedUsage:
    """Usage of one record; nothing if it is not prepared, or damaged."""
    if not isinstance(header, Header) or not (header.record.is_in_document or not header.record.is_used):
        return PreparedUsage()
    is_used = header.record.is_used or header.record.key in used
    return PreparedUsage(1, int(is_used), header.file_size, {header.record.bits: 1})


def forget_chunks(
    root: Path,
    is_alive: Callable[[ChunkId], bool],
    owner: OwnerTag = NO_TENANT,
    except_for: bytes | None = None,
    *,
    trailer_size: int = 0,
    is_all: bool = False,
) -> int:
    """Remove the records that `records_to_forget` finds; return the number of those removed."""
    found = records_to_forget(root, is_alive, owner, except_for, trailer_size=trailer_size, is_all=is_all)
    return sum(map(remove_file, found))


def records_to_forget(
    root: Path,
    is_alive: Callable[[ChunkId], bool],
    owner: OwnerTag = NO_TENANT,
    except_for: bytes | None = None,
    *,
    trailer_size: int = 0,
    is_all: bool = False,
) -> Iterator[Path]:
    """Yield the paths of a tenant's records, of every model, that have seen chunks which are not alive.

    A record names the chunks that it has seen; records computed behind it in a prompt are found by their parent. A
    record that is damaged or of another version does not say what it has seen and is useless; it is found for every
    tenant.

    Args:
        except_for: fingerprint of a model whose records are left alone.
        trailer_size: as in `read_header`.
        is_all: yield all of the tenant's records.
    """
    is_alive = cache(is_alive)
    for fingerprint in fingerprints(root):
        if fingerprint == except_for:
            continue
        folder = folder_of(root, fingerprint)
        headers = {key_of(path): read_header(path, fingerprint, trailer_size) for path in record_paths(folder)}
        dead = {key for key, header in headers.items() if isinstance(header, Defect) and header != Defect.UNREADABLE}
        records = [header.record for header in headers.values() if isinstance(header, Header)]
        records.sort(key=lambda record: record.first_position)  # a parent comes before its children
        for record in records:
            if record.owner != owner:
                continue
            seen = {*record.seen, *(() if record.chunk_id is None else (record.chunk_id,))}
            if is_all or record.parent in dead or not all(map(is_alive, seen)):
                dead.add(record.key)
        yield from (path_of(folder, key) for key in dead)


def clear_all(root: Path) -> tuple[int, list[OSError]]:
    """Remove every model's records. Records written meanwhile may stay.

    Returns:
        The number of records removed, and the errors of records that could not be removed.
    """
    paths = (path for one in fingerprints(root) for path in record_paths(folder_of(root, one)))
    return remove_files(paths)


def remove_files(paths: Iterable[Path]) -> tuple[int, list[OSError]]:
    """Remove files; return the number of those removed, and the errors of those that could not be."""
    num_removed, failures = 0, []
    for path in paths:
        try:
            os.unlink(path)
            num_removed += 1
        except FileNotFoundError:
            pass  # another process removed it
        except OSError as error:
            failures.append(error)
    return num_removed, failures


def write_file(path: Path, parts: Iterable[Buffer]) -> None:
    """Write a file whole, and create its folder if it is missing. Raises OSError."""
    try:
        descriptor = opened_file(path)
    except FileNotFoundError:  # the first record of its folder
        make_folder(path.parent)
        descriptor = opened_file(path)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def remove_file(path: Path) -> bool:
    """Remove a file; False if it was missing or could not be removed."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _inspect(descriptor: int, key: NodeKey, fingerprint: bytes, trailer_size: int = 0) -> Header | Defect:
    """Read and verify the header, up to the beginning of the payload."""
    file_size = os.fstat(descriptor).st_size - trailer_size
    data = os.read(descriptor, PAGE_SIZE)
    size = header_size(data)
    if isinstance(size, Defect):
        return size
    if len(data) < size <= file_size:
        rest = bytearray(size - len(data))
        data += rest if _fill(descriptor, memoryview(rest)) else b""
    return inspect(data, file_size, key, fingerprint)


def _fill(descriptor: int, buffer: memoryview) -> bool:
    """Fill a buffer; False if the file ends before."""
    while buffer:
        num_read = os.readv(descriptor, [buffer])
        if num_read == 0:
            return False
        buffer = buffer[num_read:]
    return True


def _paths(folder: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    for shard in _names(folder):
        if _SHARD.fullmatch(shard):
            for name in _names(folder / shard):
                if pattern.fullmatch(name) and name.startswith(shard):
                    yield folder / shard / name


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
