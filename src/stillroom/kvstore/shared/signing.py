"""Signs records of a tier that others can write to: a keyed BLAKE2b over the record's name and bytes. No torch.

The checksum in a record finds accidents; anyone can compute it. With a key, a record that was not made by a process
that has the key, or was made for another name, does not verify.
"""

import hashlib
import hmac
from collections.abc import Sequence

from stillroom.core.kv import NodeKey
from stillroom.kvstore.record import Buffer

SIGNATURE_SIZE = 32
"""Bytes behind a signed record."""


class Signer:
    def __init__(self, key: str, fingerprint: bytes) -> None:
        """
        Args:
            key: the secret of all processes that share the tier.
            fingerprint: of the model; part of a record's name.
        """
        self._key = hashlib.blake2b(key.encode(), person=b"stillroom-tier").digest()
        self._fingerprint = fingerprint

    @property
    def group(self) -> str:
        """Name of the processes that have this key; it does not reveal the key."""
        return hashlib.blake2b(b"group", key=self._key, digest_size=8).hexdigest()

    def sign(self, key: NodeKey, parts: Sequence[Buffer]) -> bytes:
        """Return the signature of a record under its key: 32 bytes."""
        mac = hashlib.blake2b(self._fingerprint + key, key=self._key, digest_size=SIGNATURE_SIZE)
        for part in parts:
            mac.update(part)
        return mac.digest()

    def is_signed(self, key: NodeKey, record: Buffer, signature: Buffer) -> bool:
        """Whether a signature is that of this record under this key."""
        return hmac.compare_digest(self.sign(key, [record]), bytes(signature))
