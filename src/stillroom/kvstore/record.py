"""The bytes of one stored node: header, payload, checksum. Format, not files; no torch.

Invariant: a file whose every byte is as `encode` made it, and only such a file, passes `inspect` and `is_intact`. The
checksums guard against accidents (torn writes, bad disks, mixed-up files), not against somebody who forges records.
Design: docs/kv-records.md
"""

import struct
from dataclasses import dataclass
from enum import StrEnum

import xxhash

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NOTES_SIZE, NodeKey, NodeRecord, OwnerTag

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes; a memoryview has format "B"."""

MAGIC = b"STILLKV\0"
VERSION = 4
FINGERPRINT_SIZE = 32

# With NOTES_SIZE the payload begins at 4,096.
# magic, version, header size, key, parent, content, fingerprint, first position, tokens, chunk id or -1, avg cost,
# frequency, payload size, owner, length of the notes, notes; the checksum of these follows
_FIELDS = struct.Struct(f"<8sII32s32s32s32sIIqddQ8sI{NOTES_SIZE}s")
_VERSION = struct.Struct("<II")
_CHECKSUM_SIZE = 16
HEADER_SIZE = _FIELDS.size + _CHECKSUM_SIZE
TRAILER_SIZE = _CHECKSUM_SIZE
_NO_CHUNK = -1


class Defect(StrEnum):
    """Why a record does not verify."""

    MAGIC = "magic"
    """It is no record."""
    VERSION = "version"
    """Another version of the format."""
    IDENTITY = "identity"
    """The record of another node."""
    MODEL = "model"
    """KV of another model."""
    SIZE = "size"
    """Shorter or longer than it says, or than was asked for."""
    CHECKSUM = "checksum"
    """Some bytes are not those that were written."""
    UNREADABLE = "unreadable"
    """The disk did not give its bytes."""


@dataclass(frozen=True, slots=True)
class Header:
    """What is known of a record before its payload is read."""

    record: NodeRecord
    fingerprint: bytes
    """32 bytes that name the model, its weights and the type of its KV."""
    payload_size: int
    """Bytes."""


def encode(record: NodeRecord, fingerprint: bytes, payload: Buffer) -> tuple[bytes, bytes]:
    """What goes before and after the payload in a file: `HEADER_SIZE` and `TRAILER_SIZE` bytes."""
    assert len(record.key) == len(record.parent) == len(fingerprint) == FINGERPRINT_SIZE, record
    assert len(record.notes) <= NOTES_SIZE, record
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        HEADER_SIZE,
        record.key,
        record.parent,
        record.content,
        fingerprint,
        record.first_position,
        record.num_tokens,
        _NO_CHUNK if record.chunk_id is None else record.chunk_id,
        record.avg_cost,
        record.frequency,
        len(payload),
        record.owner,
        len(record.notes),
        record.notes,
    )
    header = fields + xxhash.xxh3_128_digest(fields)
    return header, _checksum(header, payload)


def decode_header(data: bytes) -> Header | Defect:
    """The header at the beginning of a record, or what is wrong with it."""
    if data[: len(MAGIC)] != MAGIC:
        return Defect.MAGIC
    if len(data) < HEADER_SIZE:
        return Defect.SIZE
    fields = data[: _FIELDS.size]
    if _VERSION.unpack_from(fields, len(MAGIC)) != (VERSION, HEADER_SIZE):
        return Defect.VERSION
    _, _, _, key, parent, content, fingerprint, *numbers, notes = _FIELDS.unpack(fields)
    first, num_tokens, chunk_id, cost, frequency, payload_size, owner, notes_size = numbers
    if xxhash.xxh3_128_digest(fields) != data[_FIELDS.size : HEADER_SIZE]:
        return Defect.CHECKSUM
    record = NodeRecord(
        key=NodeKey(key),
        parent=NodeKey(parent),
        first_position=first,
        num_tokens=num_tokens,
        chunk_id=None if chunk_id == _NO_CHUNK else ChunkId(chunk_id),
        avg_cost=cost,
        frequency=frequency,
        content=content,
        notes=notes[:notes_size],
        owner=OwnerTag(owner),
    )
    return Header(record, fingerprint, payload_size)


def inspect(data: bytes, file_size: int, key: NodeKey, fingerprint: bytes) -> Header | Defect:
    """All that can be told without the payload: is this the node's record, our model's, and all there?

    Args:
        data: the first `HEADER_SIZE` bytes of the file, or all if it has fewer.
        file_size: in bytes.
        key: of the node whose record it should be.
        fingerprint: of the model whose KV it should be.
    """
    header = decode_header(data)
    if isinstance(header, Defect):
        return header
    if header.record.key != key:
        return Defect.IDENTITY
    if header.fingerprint != fingerprint:
        return Defect.MODEL
    if file_size != HEADER_SIZE + header.payload_size + TRAILER_SIZE:
        return Defect.SIZE
    return header


def is_intact(header: Buffer, payload: Buffer, trailer: Buffer) -> bool:
    """Header and payload are the bytes that were written."""
    return _checksum(header, payload) == trailer


def _checksum(header: Buffer, payload: Buffer) -> bytes:
    checksum = xxhash.xxh3_128(header)
    checksum.update(payload)
    return checksum.digest()
