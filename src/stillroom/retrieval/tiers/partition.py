"""Mapping of inverted lists to shards, and choice of the hottest lists (VectorLiteRAG 4.1, 4.2)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Lists = NDArray[np.int64]
Nearness = NDArray[np.float32]


@dataclass(frozen=True)
class Partition:
    """The mapping table: the shard of each list."""

    shard_of: NDArray[np.int64]
    """Shard of each list, [nlist]."""
    num_shards: int

    def __post_init__(self) -> None:
        assert self.num_shards > 0
        assert len(self.shard_of) == 0 or 0 <= self.shard_of.min() <= self.shard_of.max() < self.num_shards

    def of(self, shard: int) -> Lists:
        """Return the lists of a shard, ascending."""
        return np.flatnonzero(self.shard_of == shard)

    def num_in(self, lists_QP: Lists) -> NDArray[np.int64]:
        """Count the probed lists [q, p] per query and shard: [q, shards]. -1 is no list."""
        found = np.zeros((len(lists_QP), self.num_shards), dtype=np.int64)
        rows, columns = np.nonzero(lists_QP >= 0)
        np.add.at(found, (rows, self.shard_of[lists_QP[rows, columns]]), 1)
        return found

    def probes(self, shard: int, lists_QP: Lists, nearness_QP: Nearness) -> tuple[Lists, Nearness]:
        """Return lists and nearness [q, w] that a shard scans: of lists [q, p] those that it holds, in order.

        w is the largest number per query; shorter rows are padded with -1 on the right.
        """
        is_here = (lists_QP >= 0) & (self.shard_of[lists_QP] == shard)
        width = int(is_here.sum(axis=1).max(initial=0))
        order = np.argsort(~is_here, axis=1, kind="stable")[:, :width]
        lists = np.where(np.take_along_axis(is_here, order, axis=1), np.take_along_axis(lists_QP, order, axis=1), -1)
        return lists, np.take_along_axis(nearness_QP, order, axis=1)


def hottest_first(num_accesses: NDArray[np.float64]) -> Lists:
    """Return all lists, hottest first.

    Both the time to scan a list and the memory to keep it grow with its size. So the gain per byte depends on accesses
    alone.
    """
    return np.argsort(-num_accesses, kind="stable")


def hottest(num_accesses: NDArray[np.float64], hit_rate: float) -> Lists:
    """Return the fewest lists with at least this share of all accesses, hottest first (the inverse CDF of 4.1).

    Args:
        num_accesses: of each list, [nlist].
        hit_rate: from 0 to 1.
    """
    order = hottest_first(num_accesses)
    total = num_accesses.sum()
    if total == 0 or hit_rate <= 0:
        return order[:0]
    shares = np.cumsum(num_accesses[order]) / total
    return order[: int(np.searchsorted(shares, hit_rate - 1e-12)) + 1]


def best_lists(counts: NDArray[np.float64], list_bytes: NDArray[np.int64], num_bytes: int) -> Lists:
    """Return the lists to keep within `num_bytes`: from the hottest on, each that still fits."""
    order = hottest_first(counts)
    order = order[list_bytes[order] <= num_bytes]
    num_whole = int(np.searchsorted(np.cumsum(list_bytes[order]), num_bytes, side="right"))
    chosen = order[:num_whole].tolist()
    left = num_bytes - int(list_bytes[order[:num_whole]].sum())
    for number, size in zip(order[num_whole:].tolist(), list_bytes[order[num_whole:]].tolist(), strict=True):
        if size <= left:
            chosen.append(number)
            left -= size
    return np.array(chosen, dtype=np.int64)
