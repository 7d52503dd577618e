"""Scan of a batch of queries in which each list is read and turned once (VectorLiteRAG 2.2).

`ops/cpu_code_scan` scans a list for all queries of the batch that probe it and leaves candidates; faiss scores these.
So ids and scores are those of faiss' own scan, to the last bit. Queries with the fewest lists are completed first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import local
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.ops.cpu_code_scan import (
    HAS_BYTE_TABLES,
    LEAST,
    MAX_SUBQUANTIZERS,
    centre_products,
    copy_codes,
    keep_best,
    scan_lists,
)
from stillroom.retrieval.lazy_faiss import faiss
from stillroom.retrieval.tiers.host_scan import Scored
from stillroom.retrieval.tiers.list_file import ListPlaces
from stillroom.retrieval.tiers.partition import Lists, Nearness, Partition
from stillroom.retrieval.vector_index import one_thread

Ints = NDArray[np.int64]
Vectors = NDArray[np.float32]

_ROOM = 1024
_MOST_STEPS = 2.0**24
_FLOAT_ERROR = 2.0**-24
_NO_BITS = np.empty(0, dtype=np.uint8)


@dataclass(frozen=True)
class Candidates:
    """Codes that may be among a query's best."""

    totals: NDArray[np.int32]
    """Scores in steps of the query's table, rounded, [k]."""
    codes: Ints
    """Address of each code, [k]."""
    rows: Ints
    """Address of each row, [k]."""
    nearness: Nearness
    """Of the list of each, [k]."""


class CodeScanner:
    """Tables and scores of an IndexIVFPQ; make it once per index. Thread-safe."""

    def __init__(self, shell: Any) -> None:
        """Precondition: `can_scan(shell)`."""
        num_subquantizers, width = int(shell.pq.M), int(shell.pq.dsub)
        centroids = faiss.vector_to_array(shell.pq.centroids).reshape(num_subquantizers, -1, width)
        self._centroids = np.ascontiguousarray(centroids.transpose(0, 2, 1))
        self._quantizer = faiss.downcast_index(shell.quantizer)
        self._centres = faiss.rev_swig_ptr(self._quantizer.get_xb(), shell.nlist * shell.d).reshape(-1, shell.d)
        self._longest = float(np.sqrt(np.einsum("nd,nd->n", self._centres, self._centres).max(initial=0.0)))
        self._shell = shell
        self._own = local()

    def probe(self, queries: Vectors, nprobe: int) -> tuple[Nearness, Lists]:
        """Return nearness [q, p] and numbers [q, p] of the lists nearest to queries [q, d], as the quantizer does.

        Products of the batch choose lists that may be among the nearest; faiss scores them again.
        """
        num_lists = len(self._centres)
        if nprobe >= num_lists:
            return self._probe_each(queries, nprobe)
        products = np.empty((len(queries), num_lists), dtype=np.float32)
        centre_products(queries, self._centres, products)
        lengths = np.sqrt(np.einsum("qd,qd->q", queries, queries))
        # both sums err by at most d * 2^-24 times the product of the lengths
        slack = (4 * queries.shape[1] * _FLOAT_ERROR * self._longest) * lengths
        limits = np.partition(products, num_lists - nprobe, axis=1)[:, num_lists - nprobe] - slack
        rows, near = np.nonzero(products >= limits[:, None])
        counts = np.bincount(rows, minlength=len(queries))
        lists = np.full((len(queries), int(counts.max(initial=nprobe))), -1, dtype=np.int64)
        lists[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = near
        scores = np.full(lists.shape, -np.inf, dtype=np.float32)
        pointer = faiss.swig_ptr
        with one_thread():
            self._quantizer.compute_distance_subset(
                len(queries), pointer(queries), lists.shape[1], pointer(scores), pointer(lists)
            )
        scores[lists < 0] = -np.inf
        order = np.argsort(-scores, axis=1, kind="stable")[:, : nprobe + 1]
        nearness, lists = np.take_along_axis(scores, order, axis=1), np.take_along_axis(lists, order, axis=1)
        is_unclear = (counts < nprobe) | (nearness[:, 1:] == nearness[:, :-1]).any(axis=1)
        nearness, lists = np.ascontiguousarray(nearness[:, :nprobe]), np.ascontiguousarray(lists[:, :nprobe])
        if is_unclear.any():  # faiss orders ties, and what is not finite
            nearness[is_unclear], lists[is_unclear] = self._probe_each(queries[is_unclear], nprobe)
        return nearness, lists

    def _probe_each(self, queries: Vectors, nprobe: int) -> tuple[Nearness, Lists]:
        with one_thread():
            found = [self._quantizer.search(query[None], nprobe) for query in queries]
        return np.concatenate([one[0] for one in found]), np.concatenate([one[1] for one in found])

    def tables(self, queries: Vectors) -> tuple[NDArray[np.uint8], Vectors]:
        """Return tables of bytes [q, m, 256] of queries [q, d], and the step of each query [q].

        An entry is the least of its row, plus the query's step times the byte, within half a step.
        """
        parts = queries.reshape(len(queries), len(self._centroids), -1).transpose(1, 0, 2)
        products = np.ascontiguousarray(np.matmul(parts, self._centroids).transpose(1, 0, 2))
        least = products.min(axis=2, keepdims=True)
        products -= least
        steps = products.max(axis=(1, 2)) / np.float32(255)
        with np.errstate(divide="ignore", invalid="ignore"):
            products *= (1 / steps)[:, None, None]
            products += 0.5
            return products.astype(np.uint8), steps

    def scored(self, query: Vectors, num: int, parts: Sequence[Candidates]) -> Scored:
        """Return rows and scores of the best `num` candidates of a query [d], and of all that score as the last."""
        totals = np.concatenate([one.totals for one in parts])
        addresses, rows_at = (np.concatenate([getattr(one, name) for one in parts]) for name in ("codes", "rows"))
        nearness = np.concatenate([one.nearness for one in parts])
        if num < len(totals):
            slack = len(self._centroids) + 2
            is_near = totals >= np.partition(totals, len(totals) - num)[len(totals) - num] - slack
            addresses, rows_at, nearness = addresses[is_near], rows_at[is_near], nearness[is_near]
        codes, rows = np.empty((len(addresses), len(self._centroids)), np.uint8), np.empty(len(addresses), np.int64)
        copy_codes(addresses, rows_at, codes, rows)
        scores = nearness + self._sums(query, codes)
        if num < len(scores):
            is_best = scores >= np.partition(scores, len(scores) - num)[len(scores) - num]
            rows, scores = rows[is_best], scores[is_best]
        return rows, scores

    def _sums(self, query: Vectors, codes: NDArray[np.uint8]) -> Vectors:
        """Return the sum of the table's entries of each of codes [k, m], as faiss computes it, [k]."""
        count, pointer = len(codes), faiss.swig_ptr
        sums, numbers = np.empty(count, dtype=np.float32), np.zeros(count, dtype=np.int64)
        if not count:
            return sums
        if not hasattr(self._own, "index"):
            self._own.index = _index_at_origin(self._shell)
        index, entries = self._own.index
        places, query = np.arange(count, dtype=np.int64), np.ascontiguousarray(query)
        first, nearness = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32)
        entries.resize(0, 0)
        entries.add_entries(0, count, pointer(places), pointer(codes))
        chosen, result = (pointer(first), pointer(nearness)), (pointer(sums), pointer(numbers))
        with one_thread():
            index.search_preassigned_c(1, pointer(query), count, *chosen, *result, False)
        found = np.empty(count, dtype=np.float32)
        found[numbers] = sums
        return found


def _index_at_origin(shell: Any) -> tuple[Any, Any]:
    """Return an index with one list, whose centre is the origin, and the list: scores lack only the nearness."""
    origin = faiss.IndexFlatIP(shell.d)
    origin.add(np.zeros((1, shell.d), dtype=np.float32))
    index = faiss.IndexIVFPQ(origin, shell.d, 1, shell.pq.M, shell.pq.nbits, faiss.METRIC_INNER_PRODUCT)
    entries = faiss.ArrayInvertedLists(1, shell.code_size)
    index.pq, index.is_trained = shell.pq, True
    index.replace_invlists(entries, False)
    index.referenced_objects = [origin, entries]  # faiss stores pointers
    return index, entries


def can_scan(shell: Any) -> bool:
    """Whether the kernel can scan an index' codes on this processor, and is faster than faiss."""
    return (
        HAS_BYTE_TABLES
        and shell.pq.nbits == 8
        and shell.pq.M <= MAX_SUBQUANTIZERS
        and shell.metric_type == faiss.METRIC_INNER_PRODUCT
        and shell.by_residual
        and isinstance(faiss.downcast_index(shell.quantizer), faiss.IndexFlat)
    )


class BatchScan:
    """A `HostScan` by compiled kernels: a list is scanned once, for all queries that probe it."""

    def __init__(  # noqa: PLR0913  a batch and its lists
        self,
        scanner: CodeScanner,
        places: Mapping[int, ListPlaces],
        partition: Partition,
        queries: Vectors,
        num: int,
        probed: Lists,
        nearness: Nearness,
        allowed: Any = None,
    ) -> None:
        """
        Args:
            places: lists of each shard.
            queries: [q, d].
            probed, nearness: lists [q, p] and nearness [q, p] of each query; -1 is no list.
            allowed: an IDSelectorBitmap of faiss; None allows every row.
        """
        self.queries, self.num = np.ascontiguousarray(queries), num
        self.probed, self.nearness, self.partition = probed, nearness, partition
        self.bits = _NO_BITS if allowed is None else faiss.rev_swig_ptr(allowed.bitmap, allowed.n)
        self.tables, steps = scanner.tables(self.queries)
        with np.errstate(divide="ignore", invalid="ignore"):
            offsets = np.rint(nearness / steps[:, None])
        self.is_scannable = bool((np.abs(offsets) < _MOST_STEPS).all())
        """False: a query is not finite, or its table has equal entries; faiss must scan."""
        self.offsets = offsets.astype(np.int32) if self.is_scannable else np.empty(0, dtype=np.int32)
        self._scanner, self._places = scanner, places
        self._shards: dict[int, _ShardScan] = {}

    def steps(self, shard: int) -> Sequence[tuple[int, Lists]]:
        self._shards[shard] = _ShardScan(self, shard, self._places[shard])
        return self._shards[shard].steps()

    def scan(self, shard: int, step: int) -> Candidates:
        return self._shards[shard].scan(step)

    def merged(self, number: int, parts: Sequence[Candidates]) -> Scored:
        return self._scanner.scored(self.queries[number], self.num, parts)


class _ShardScan:
    """The lists of a batch in one shard, in the order in which they are scanned."""

    def __init__(self, batch: BatchScan, shard: int, places: ListPlaces) -> None:
        self._batch, self._places = batch, places
        probed = batch.probed
        is_here = batch.partition.shard_of == shard
        is_mine = (probed >= 0) & is_here[probed]
        num_lists = is_mine.sum(axis=1)
        asked = np.flatnonzero(num_lists)
        self._order: list[int] = asked[np.argsort(num_lists[asked], kind="stable")].tolist()
        turn = np.zeros(len(probed), dtype=np.int64)
        turn[self._order] = np.arange(len(self._order))
        queries, columns = np.nonzero(is_mine)
        lists = probed[queries, columns]
        first = np.full(len(is_here), len(probed))
        np.minimum.at(first, lists, turn[queries])  # a list is scanned for the first query that needs it
        order = np.lexsort((lists, first[lists]))
        self._queries, self._lists = queries[order], lists[order]
        self._offsets = batch.offsets[queries, columns][order]
        self._nearness = np.ascontiguousarray(batch.nearness[queries, columns][order])
        self._starts = np.flatnonzero(np.diff(self._lists, prepend=-1))
        self._ends = np.searchsorted(first[self._lists[self._starts]], np.arange(len(self._order)), side="right")
        room = _ROOM + 2 * batch.num
        num_queries = len(probed)
        self._candidates = (
            np.full(num_queries, LEAST, dtype=np.int32),
            np.zeros(num_queries, dtype=np.int64),
            np.empty((num_queries, room), dtype=np.int32),
            np.empty((num_queries, room, 2), dtype=np.int64),
        )

    def steps(self) -> list[tuple[int, Lists]]:
        """Return each query with the lists that are scanned for it, and not for a query before it."""
        begins = [0, *self._ends.tolist()]
        return [
            (number, self._lists[self._starts[begins[step] : begins[step + 1]]])
            for step, number in enumerate(self._order)
        ]

    def scan(self, step: int) -> Candidates:
        """Scan the lists of a step, for all queries that probe them; return the candidates of the step's query."""
        begin, end = (int(self._ends[step - 1]) if step else 0), int(self._ends[step])
        if begin < end:
            self._scan(begin, end)
        number = self._order[step]
        _, counts, totals, found = self._candidates
        count = int(counts[number])
        if self._batch.num < count:
            slack = self._batch.tables.shape[1] + 2
            count, _ = keep_best(totals[number], found[number], count, self._batch.num, slack)
        pairs, at = found[number, :count, 0], found[number, :count, 1]
        lists = self._lists[pairs]
        return Candidates(
            totals[number, :count],
            self._places.codes[lists] + at * self._batch.tables.shape[1],
            self._places.rows[lists] + at * 8,
            self._nearness[pairs],
        )

    def _scan(self, begin: int, end: int) -> None:
        starts = self._starts[begin:end]
        stop = self._starts[end] if end < len(self._starts) else len(self._lists)
        numbers, places = self._lists[starts], self._places
        lists = places.codes[numbers], places.rows[numbers], places.sizes[numbers], np.append(starts, stop)
        at = np.array([0, int(starts[0]), 0], dtype=np.int64)
        pairs = self._queries, self._offsets
        while not scan_lists(lists, pairs, self._batch.tables, self._batch.bits, self._candidates, at, self._batch.num):
            limits, counts, totals, found = self._candidates
            self._candidates = limits, counts, _doubled(totals), _doubled(found)


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array with twice the room in its second dimension."""
    return np.concatenate([array, np.empty_like(array)], axis=1)
