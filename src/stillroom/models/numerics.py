"""The version of the decoder's arithmetic, which is part of the name of kept KV."""

import hashlib

NUMERICS_VERSION = 1
"""Bump this when a kernel or a formula changes any KV value or logit by more than rounding: a repair of RoPE,
attention, norms or routing, say. KV that was kept before the change is then never used again.
tests/models/test_numerics.py fails when numbers change and this does not; `python -m tests.models.test_numerics` writes
the numbers of a new version."""


def kv_fingerprint(model: bytes, version: int = NUMERICS_VERSION) -> bytes:
    """32 bytes that name KV: the model's fingerprint, and the arithmetic that computed it."""
    return hashlib.sha256(b"stillroom-kv\0%d\0" % version + model).digest()
