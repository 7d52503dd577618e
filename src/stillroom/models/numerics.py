"""The version of the decoder's arithmetic, which is part of the key of kept KV."""

import hashlib

NUMERICS_VERSION = 1
"""Raise this when a kernel or a formula changes any KV value or logit by more than rounding, such as a fix of RoPE,
attention, norms or routing. KV kept by older versions is then never used. tests/models/test_numerics.py fails when
numbers change and this does not; `python -m tests.models.test_numerics` writes the numbers of a new version."""


def kv_fingerprint(model: bytes, version: int = NUMERICS_VERSION) -> bytes:
    """Return 32 bytes that identify KV: a hash of the model's fingerprint and the version of the arithmetic."""
    return hashlib.sha256(b"stillroom-kv\0%d\0" % version + model).digest()
