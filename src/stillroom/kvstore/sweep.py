"""Drop the records of documents and owners that no longer exist, for every model in a folder. No torch.

The rule takes the owner of a record and the documents' chunks that its KV has seen, and nothing else.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NodeKey, NodeRecord, OwnerTag
from stillroom.kvstore.files import fingerprints, folder_of, path_of, read_header, record_paths, remove_file
from stillroom.kvstore.record import Header

Existing = Callable[[set[ChunkId]], set[ChunkId]]
"""Returns those of some chunks that still exist."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep dropped."""

    num_removed: int = 0
    """Records."""
    num_left: int = 0
    """Records that should be gone and could not be removed."""


def sweep(root: Path, existing_of: Callable[[OwnerTag], Existing | None]) -> SweepReport:
    """Remove the records whose owner is gone, and those whose KV has seen a chunk that is gone.

    Safe while other processes use the folder: to them a record that is gone is a miss. The records are listed before
    the owners are asked, so that what another process adds meanwhile is not taken for something that is gone.

    Args:
        existing_of: the chunks of an owner that exist; None if the owner is gone.
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
    """The rule: the owner exists, and so does every chunk that the record has seen, as far as that is known at all."""
    return living is not None and seen is not None and seen <= living


def _living(existing: Existing | None, chunks: set[ChunkId]) -> set[ChunkId] | None:
    return None if existing is None else existing(chunks)


def _records(root: Path, fingerprint: bytes) -> list[NodeRecord]:
    """Of one model; those that do not verify are left to the store, which counts them."""
    headers = (read_header(path, fingerprint) for path in record_paths(folder_of(root, fingerprint)))
    return [header.record for header in headers if isinstance(header, Header)]


def _seen(records: Iterable[NodeRecord]) -> dict[NodeKey, frozenset[ChunkId]]:
    """The chunks that each record's KV has seen: those that it names, and those before it in the prompt.

    A record whose parent is gone is left out: what it has seen is not known.
    """
    found: dict[NodeKey, frozenset[ChunkId]] = {}
    for record in sorted(records, key=lambda record: record.first_position):  # a parent comes before its children
        before = frozenset[ChunkId]() if record.parent == record.key else found.get(record.parent)
        if before is not None:
            own = set() if record.chunk_id is None else {record.chunk_id}
            found[record.key] = before.union(record.seen, own)
    return found
