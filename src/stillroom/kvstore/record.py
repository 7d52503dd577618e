"""Record format of one stored node: header, then payload. No file access, no torch.

Invariant: only a file whose every byte is as written passes `inspect` and `is_intact`. The header's checksum covers the
header; the payload's checksum is a field of the header and was computed when the KV left the device. Both guard against
accidents (torn writes, bad memory, bad disks, mixed-up files), not against forged records. Design: docs/kv-records.md
"""

import struct
from dataclasses import dataclass
from enum import StrEnum

import xxhash

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NodeKey, NodeRecord, OwnerTag

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes; a memoryview has format "B"."""

MAGIC = b"STILLKV\0"
VERSION = 7
FINGERPRINT_SIZE = KEY_SIZE = 32
PAGE_SIZE = 4096
"""Headers are multiples of this, so that payloads are page-aligned."""
MAX_HEADER_SIZE = 4096 * PAGE_SIZE
"""16 MiB: the notes of 2 million tokens. A file that states a longer header is damaged."""

# magic, version, header size, key, parent, content, fingerprint, first position, tokens, chunk id or -1, avg cost,
# frequency, payload size, payload checksum, owner, whether it is in its document's context, whether it was used, bits
# of a number, number of chunk ids seen, length of the notes; then the chunk ids, the notes, zeros, and at the header's
# end the checksum of all before it
_FIELDS = struct.Struct("<8sII32s32s32s32sIIqddQ16s8s??BII")
_PREFIX = struct.Struct("<8sII")
_ID_SIZE = 8
_CHECKSUM_SIZE = 16
_NO_CHUNK = -1


class Defect(StrEnum):
    """Why a record failed verification."""

    MAGIC = "magic"
    """The file is not a record."""
    VERSION = "version"
    """Another version of the format."""
    IDENTITY = "identity"
    """It is the record of another node."""
    MODEL = "model"
    """It holds KV of another model."""
    SIZE = "size"
    """It is shorter or longer than its header states or the caller expects."""
    CHECKSUM = "checksum"
    """Some bytes differ from those written."""
    UNREADABLE = "unreadable"
    """The disk failed to read it."""
    SIGNATURE = "signature"
    """A record of a shared tier that no process with the tier's key has written."""
    NON_FINITE = "non_finite"
    """KV on the device holds NaN or an infinity; no record is made."""


@dataclass(frozen=True, slots=True)
class Header:
    """A record without its payload."""

    record: NodeRecord
    fingerprint: bytes
    """32 bytes that identify the model, its weights and the type of its KV."""
    payload_size: int
    """Bytes."""
    checksum: bytes
    """Of the payload; see `checksum_of`."""

    @property
    def file_size(self) -> int:
        """Bytes."""
        return header_size_of(self.record) + self.payload_size


def checksum_of(payload: Buffer) -> bytes:
    """Return the 128-bit XXH3 of a payload; computed once, when KV leaves the device, and kept with every copy."""
    return xxhash.xxh3_128_digest(payload)


def header_size_of(record: NodeRecord) -> int:
    """Return the bytes of a record's header, a whole number of pages."""
    return header_size_for(len(record.seen), len(record.notes))


def header_size_for(num_seen: int, notes_size: int) -> int:
    """Return the bytes of the header of a record with this many chunks seen and bytes of notes."""
    size = _FIELDS.size + _ID_SIZE * num_seen + notes_size + _CHECKSUM_SIZE
    return -(-size // PAGE_SIZE) * PAGE_SIZE


def encode(record: NodeRecord, fingerprint: bytes, payload_size: int, checksum: bytes) -> bytes:
    """Return the header of a record.

    Precondition: `header_size_of(record) <= MAX_HEADER_SIZE`.

    Args:
        checksum: of the payload.
    """
    assert len(record.key) == len(record.parent) == len(fingerprint) == FINGERPRINT_SIZE, record
    assert len(checksum) == _CHECKSUM_SIZE, checksum
    size = header_size_of(record)
    assert size <= MAX_HEADER_SIZE, size
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        size,
        record.key,
        record.parent,
        record.content,
        fingerprint,
        record.first_position,
        record.num_tokens,
        _NO_CHUNK if record.chunk_id is None else record.chunk_id,
        record.avg_cost,
        record.frequency,
        payload_size,
        checksum,
        record.owner,
        record.is_in_document,
        record.is_used,
        record.bits,
        len(record.seen),
        len(record.notes),
    )
    header = fields + struct.pack(f"<{len(record.seen)}q", *record.seen) + record.notes
    header += bytes(size - _CHECKSUM_SIZE - len(header))
    return header + xxhash.xxh3_128_digest(header)


def header_size(data: bytes) -> int | Defect:
    """Return the length that a record's header states, or why it is invalid.

    Args:
        data: the first page of the file, or all of a shorter file.
    """
    if data[: len(MAGIC)] != MAGIC:
        return Defect.MAGIC
    if len(data) < _PREFIX.size:
        return Defect.SIZE
    _, version, size = _PREFIX.unpack_from(data)
    if version != VERSION:
        return Defect.VERSION
    if size % PAGE_SIZE or not PAGE_SIZE <= size <= MAX_HEADER_SIZE:
        return Defect.CHECKSUM
    return int(size)


def decode_header(data: bytes) -> Header | Defect:
    """Return the header at the beginning of a record, or why it is invalid."""
    size = header_size(data)
    if isinstance(size, Defect):
        return size
    if len(data) < size:
        return Defect.SIZE
    end = size - _CHECKSUM_SIZE
    if xxhash.xxh3_128_digest(data[:end]) != data[end:size]:
        return Defect.CHECKSUM
    _, _, _, key, parent, content, fingerprint, *numbers = _FIELDS.unpack_from(data)
    first, num_tokens, chunk_id, cost, frequency, payload_size, checksum, owner, *rest = numbers
    is_in_document, is_used, bits, num_seen, notes_size = rest
    notes_at = _FIELDS.size + _ID_SIZE * num_seen
    record = NodeRecord(
        key=NodeKey(key),
        parent=NodeKey(parent),
        first_position=first,
        num_tokens=num_tokens,
        chunk_id=None if chunk_id == _NO_CHUNK else ChunkId(chunk_id),
        avg_cost=cost,
        frequency=frequency,
        content=content,
        notes=data[notes_at : notes_at + notes_size],
        owner=OwnerTag(owner),
        seen=tuple(map(ChunkId, struct.unpack_from(f"<{num_seen}q", data, _FIELDS.size))),
        is_used=is_used,
        is_in_document=is_in_document,
        bits=bits,
    )
    return Header(record, fingerprint, payload_size, checksum)


def inspect(data: bytes, file_size: int, key: NodeKey, fingerprint: bytes) -> Header | Defect:
    """Verify all but the payload: that it is a whole record of this node and model.

    Args:
        data: the whole header, or all of a shorter file.
        file_size: in bytes.
        key: of the expected node.
        fingerprint: of the expected model.
    """
    header = decode_header(data)
    if isinstance(header, Defect):
        return header
    if header.record.key != key:
        return Defect.IDENTITY
    if header.fingerprint != fingerprint:
        return Defect.MODEL
    if file_size != header.file_size:
        return Defect.SIZE
    return header


def is_intact(payload: Buffer, checksum: bytes) -> bool:
    """Whether a payload matches its checksum."""
    return checksum_of(payload) == checksum
