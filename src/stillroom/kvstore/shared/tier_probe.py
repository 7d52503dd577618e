"""Measures a shared tier with a record of its own, which is removed again. No torch."""

import os

from stillroom.core.clock import Clock
from stillroom.core.kv import NodeKey
from stillroom.kvstore.shared.records import SharedRecords, TierFullError

_NUM_BYTES = 512 * 1024
_REPEAT = 3


def probe(records: SharedRecords, clock: Clock, timeout_seconds: float) -> tuple[float, int, float]:
    """Write a record and read it back; the best of a few replies counts, as other work can only make them slower.

    A tier that is full is measured without a record.

    Returns:
        Seconds of a reply without bytes, bytes of a large one, and its seconds; no bytes if the tier is full.

    Raises:
        OSError: the tier fails, or returns other bytes.
    """
    key, sent = NodeKey(os.urandom(32)), os.urandom(_NUM_BYTES)
    try:
        records.write(key, [sent], None, ())
    except TierFullError:
        return _latency(records, key, clock), 0, 0.0
    try:
        latency, best = _latency(records, key, clock), float("inf")
        for _ in range(_REPEAT):
            began = clock.monotonic()
            received = records.read(key, _NUM_BYTES)
            if received is None or bytes(received) != sent:
                raise OSError("it does not return what was written")
            best = min(best, clock.monotonic() - began)
            if best > timeout_seconds / 4:
                break
        return latency, _NUM_BYTES, best
    finally:
        records.remove(key)


def _latency(records: SharedRecords, key: NodeKey, clock: Clock) -> float:
    best = float("inf")
    for _ in range(_REPEAT):
        began = clock.monotonic()
        records.num_present([key])
        best = min(best, clock.monotonic() - began)
    return best
