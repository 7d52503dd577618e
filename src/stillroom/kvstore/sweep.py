"""Removes the records of documents and owners that no longer exist, for every model in a folder. No torch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NodeKey, NodeRecord, OwnerTag
from stillroom.kvstore.files import fingerprints, folder_of, path_of, read_header, record_paths, remove_file
from stillroom.kvstore.record import Header

Existing = Callable[[set[ChunkId]], set[ChunkId]]
"""Returns those of the given chunks that still exist."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Result of a sweep."""

    num_removed: int = 0
    """Records removed."""
    num_left: int = 0
    """Records that could not be removed."""


def sweep(root: Path, existing_of: Callable[[OwnerTag], Existing | None]) -> SweepReport:
    """Remove the records whose owner is gone, or whose KV has seen a chunk that is gone.

    Safe while other processes use the folder: to them a removed record is a miss. Records are listed before existing
    chunks are queried, so records and chunks added meanwhile are not taken for removed.

    Args:
        existing_of: returns the query for an owner's chunks; None if the owner is gone.
    """
    records = {fingerprint: _records(root, fingerprint) for fingerprint in fingerprints(root)}
    seen = {fingerprint: _seen(found) for fingerprint, found in records.items()}
    chunks: dict[OwnerTag, set[ChunkId]] = {}
    for fingerprint, found in records.items():
        for record in found:
            chunks.setdefault(record.owner, set()).update(seen[fingerprint].get(record.key, ()))
    living = {owner: _living(existing_of(owner), of_owner) for owner, of_owner in chunks.items()}
    num_removed = num_left = 0
    for fingerprint, found in records.items():
        for record in found:
            if not _is_kept(living[record.owner], seen[fingerprint].get(record.key)):
                is_gone = remove_file(path_of(folder_of(root, fingerprint), record.key))
                num_removed, num_left = num_removed + is_gone, num_left + (not is_gone)
    return SweepReport(num_removed, num_left)


def _is_kept(living: set[ChunkId] | None, seen: frozenset[ChunkId] | None) -> bool:
    """Whether the owner exists and every chunk that the record has seen, which must be known, exists."""
    return living is not None and seen is not None and seen <= living


def _living(existing: Existing | None, chunks: set[ChunkId]) -> set[ChunkId] | None:
    return None if existing is None else existing(chunks)


def _records(root: Path, fingerprint: bytes) -> list[NodeRecord]:
    """Return the records of one model; invalid ones are left to `DiskStore`, which counts them."""
    headers = (read_header(path, fingerprint) for path in record_paths(folder_of(root, fingerprint)))
    return [header.record for header in headers if isinstance(header, Header)]


def _seen(records: Iterable[NodeRecord]) -> dict[NodeKey, frozenset[ChunkId]]:
    """Return the chunks that each record's KV has seen: those that it names and those that its parent has seen.

    A record whose parent is missing is left out, as what it has seen is not known.
    """
    found: dict[NodeKey, frozenset[ChunkId]] = {}
    for record in sorted(records, key=lambda record: record.first_position):  # a parent comes before its children
        before = frozenset[ChunkId]() if record.parent == record.key else found.get(record.parent)
        if before is not None:
            own = set() if record.chunk_id is None else {record.chunk_id}
            found[record.key] = before.union(record.seen, own)
    return found
