"""Scans of the lists in RAM and on disk for a batch of queries: the interface, and its implementation by faiss.

`batch_scan` implements it by compiled kernels, with the same results.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stillroom.retrieval.lazy_faiss import faiss
from stillroom.retrieval.ranking import with_ties
from stillroom.retrieval.tiers.partition import Lists, Nearness, Partition
from stillroom.retrieval.vector_index import one_thread

Vectors = NDArray[np.float32]
Scored = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Ids [n] and scores [n], best first, ties by id."""

_NOTHING = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)


def scan(lists: Any, query: Vectors, num: int, probed: Lists, nearness: Nearness, allowed: Any = None) -> Scored:
    """Return the best `num` entries of an IVF index for a query [d], and others that score as the last of them.

    Args:
        probed: lists [p] to scan; -1 is no list.
        nearness: scores [p] of their centres.
        allowed: a selector of faiss; None allows every id.
    """
    probed, nearness = np.ascontiguousarray(probed), np.ascontiguousarray(nearness)
    query = np.ascontiguousarray(query)
    parameters = faiss.SearchParametersIVF(nprobe=max(1, len(probed)), sel=allowed)
    pointer = faiss.swig_ptr

    def fetch(n: int) -> Scored:
        ids, scores = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.float32)
        chosen, result = (pointer(probed), pointer(nearness)), (pointer(scores), pointer(ids))
        with one_thread():
            lists.search_preassigned_c(1, pointer(query), n, *chosen, *result, False, parameters)
        return ids[ids >= 0], scores[ids >= 0]

    return with_ties(fetch, num) if (probed >= 0).any() else _NOTHING


class HostScan(Protocol):
    """A batch of queries in several shards. Each shard is scanned by one thread."""

    def steps(self, shard: int) -> Sequence[tuple[int, Lists]]:
        """Return the queries that probe lists of a shard, in the order in which they are completed, each with the lists
        that are read for it. Precedes `scan`."""
        ...

    def scan(self, shard: int, step: int) -> Any:
        """Complete the query of a step, in the order of `steps`; return its part for `merged`."""
        ...

    def merged(self, number: int, parts: Sequence[Any]) -> Scored:
        """Return the best entries of a query, and others that score as the last, from its parts of all shards."""
        ...


class FaissScan:
    """A `HostScan` by faiss, query after query."""

    def __init__(  # noqa: PLR0913  a batch and its lists
        self,
        indexes: Mapping[int, Any],
        partition: Partition,
        queries: Vectors,
        num: int,
        probed: Lists,
        nearness: Nearness,
        allowed: Any = None,
    ) -> None:
        """
        Args:
            indexes: index over the lists of each shard.
            queries, probed, nearness: [q, d], [q, p] and [q, p].
            allowed: as of the function `scan`.
        """
        self._indexes, self._partition, self._queries, self._num = indexes, partition, queries, num
        self._probed, self._nearness, self._allowed = probed, nearness, allowed
        self._steps: dict[int, list[tuple[int, Lists, Nearness]]] = {}

    def steps(self, shard: int) -> Sequence[tuple[int, Lists]]:
        mine, near = self._partition.probes(shard, self._probed, self._nearness)
        num_lists = (mine >= 0).sum(axis=1)
        asked = np.flatnonzero(num_lists)
        order = asked[np.argsort(num_lists[asked], kind="stable")].tolist()
        self._steps[shard] = [(at, mine[at, : num_lists[at]], near[at, : num_lists[at]]) for at in order]
        return [(number, lists) for number, lists, _ in self._steps[shard]]

    def scan(self, shard: int, step: int) -> Scored:
        number, lists, near = self._steps[shard][step]
        return scan(self._indexes[shard], self._queries[number], self._num, lists, near, self._allowed)

    def merged(self, number: int, parts: Sequence[Scored]) -> Scored:
        ids, scores = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return ids, scores
