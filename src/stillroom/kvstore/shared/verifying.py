"""Verifies a record of a shared tier: every byte of it, before any of them is used. No torch."""

from stillroom.core.kv import FULL_BITS, NodeKey
from stillroom.kvstore.record import Defect, Header, header_size, inspect, is_intact
from stillroom.kvstore.shared.signing import SIGNATURE_SIZE, Signer


def verified(
    data: bytearray, key: NodeKey, fingerprint: bytes, num_bytes: int, signer: Signer | None
) -> tuple[Header, memoryview] | Defect:
    """Return the header and the KV of a record, or why it is not used.

    Args:
        data: all that the tier holds under the key.
        num_bytes: of the KV that is expected.
        signer: None: records are not signed.
    """
    record = memoryview(data)
    if signer is not None:
        record, signature = record[:-SIGNATURE_SIZE], record[-SIGNATURE_SIZE:]
        if len(data) < SIGNATURE_SIZE or not signer.is_signed(key, record, signature):
            return Defect.SIGNATURE
    size = header_size(bytes(record[:16]))
    if isinstance(size, Defect):
        return size
    header = inspect(bytes(record[:size]), len(record), key, fingerprint)
    if isinstance(header, Defect):
        return header
    if header.payload_size != num_bytes or header.record.bits != FULL_BITS:
        return Defect.SIZE
    payload = record[size:]
    return (header, payload) if is_intact(payload, header.checksum) else Defect.CHECKSUM
