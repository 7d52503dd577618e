"""Order of engines by hash, which survives their loss and adding, and the bound on an engine's load."""

import hashlib
import math
from collections.abc import Iterable, Sequence

from stillroom.cluster.engine_belief import EngineBelief


def by_hash(name: bytes, engines: Iterable[EngineBelief]) -> list[EngineBelief]:
    """Return the engines in the order of preference of a name, best first.

    Highest random weight (Thaler and Ravishankar 1998): losing an engine moves only the names that preferred it, and
    an added engine takes its share from all others.
    """
    return sorted(engines, key=lambda one: (weight(name, one.engine_id), one.engine_id), reverse=True)


def weight(name: bytes, engine_id: str) -> int:
    """Return the weight of an engine for a name: uniform in 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(engine_id.encode(), key=name[:64], digest_size=8).digest())


def min_hash(contents: Sequence[bytes]) -> bytes:
    """Return the member of a set with the least hash (Broder 1997).

    Two sets have the same one with the probability of their Jaccard similarity, whatever the order of their members.
    """
    return min(contents, key=lambda content: hashlib.blake2b(content, digest_size=8).digest())


def within_bound(engines: Sequence[EngineBelief], load_factor: float) -> list[EngineBelief]:
    """Return the engines that may take one more request, in the given order; at least one.

    With m requests outstanding on n engines, an engine holds at most ceil(load_factor (m + 1) / n) (consistent hashing
    with bounded loads; Mirrokni, Thorup and Zadimoghaddam 2018).

    Args:
        load_factor: at least 1; infinite: no bound.
    """
    assert engines and load_factor >= 1.0
    if math.isinf(load_factor):
        return list(engines)
    most = max_outstanding(engines, load_factor)
    return [one for one in engines if one.num_outstanding < most]


def max_outstanding(engines: Sequence[EngineBelief], load_factor: float) -> int:
    """Return the most requests that an engine may hold when one more is placed."""
    return math.ceil(load_factor * (sum(one.num_outstanding for one in engines) + 1) / len(engines))
