"""Lists of an IVF-PQ index on a device: a shard of a tiered index (VectorLiteRAG 4.1, 4.2).

The codes are tensors, by subquantizer, one list after the other. A batch of queries takes one product for the look-up
tables and one scan (`ops.pq_scan`), whatever lists they probe; only results leave the device. The same code runs on a
CPU for tests, where faiss' scan is faster.

Scores equal faiss' up to rounding: the same float32 numbers are added in another order, so two codes whose exact scores
differ by less than about 1e-6 may be ordered differently. Equal codes of a list score equal.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from stillroom.errors import ConfigError
from stillroom.ops import pq_scan
from stillroom.retrieval.lazy_faiss import faiss
from stillroom.retrieval.ranking import first_arrays
from stillroom.retrieval.tiers.faiss_lists import Vectors, entries_of
from stillroom.retrieval.tiers.host_scan import Scored
from stillroom.retrieval.tiers.list_file import Entries
from stillroom.retrieval.tiers.partition import Lists, Nearness

_SCORED_AT_ONCE = 2**24
"""Scores per launch: 64 MiB, and a few times as much for temporaries."""


class DeviceShard:
    """Thread-safe."""

    def __init__(
        self, lists: Any, held: Lists, device: str | torch.device, entries: Callable[[int], Entries] | None = None
    ) -> None:
        """Copy the codes of the lists `held` to the device.

        Args:
            lists: a trained IndexIVFPQ by inner product.
            entries: number -> ids and codes of a list; None takes those of `lists`.

        Raises:
            ConfigError: codes are not one byte per subquantizer.
        """
        quantizer = lists.pq
        if quantizer.nbits != 8:
            raise ConfigError(
                f"index.nbits={quantizer.nbits} does not work on a device; build the index with index.nbits = 8"
            )
        assert lists.metric_type == faiss.METRIC_INNER_PRODUCT
        self.device = torch.device(device)
        self._is_residual = bool(lists.by_residual)
        centroids = faiss.vector_to_array(quantizer.centroids).reshape(quantizer.M, pq_scan.CENTROIDS, quantizer.dsub)
        self._centroids_MCS = torch.from_numpy(centroids).to(self.device)
        sizes = np.zeros(lists.nlist, dtype=np.int64)
        parts = [(entries or partial(entries_of, lists.invlists))(number) for number in held.tolist()]
        sizes[held] = [len(ids) for ids, _ in parts]
        starts = np.zeros(lists.nlist, dtype=np.int64)
        starts[held] = np.cumsum(sizes[held]) - sizes[held]
        self._sizes = sizes
        self._ids = np.concatenate([np.empty(0, dtype=np.int64), *(ids for ids, _ in parts)])
        """[N], on the host: only ids of results are needed."""
        codes = np.concatenate([np.empty((0, quantizer.M), dtype=np.uint8), *(codes for _, codes in parts)])
        self._codes_MN = torch.from_numpy(np.ascontiguousarray(codes.T)).to(self.device)
        self._last_mask: tuple[Any, torch.Tensor] = (None, torch.empty(0, dtype=torch.bool))
        self._sizes_L, self._starts_L = (torch.from_numpy(array).to(self.device) for array in (sizes, starts))

    def __len__(self) -> int:
        """Number of codes."""
        return len(self._ids)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        tensors = (self._codes_MN, self._centroids_MCS, self._sizes_L, self._starts_L)
        return sum(tensor.nbytes for tensor in tensors)

    def scan_batch(
        self, queries: Vectors, num: int, probed: Lists, nearness: Nearness, allowed: Any = None
    ) -> list[Scored]:
        """Return the best `num` for each of queries [q, d], and those that equal the last of them.

        Args:
            probed: lists [q, p]; -1 is no list, and a list that the shard does not hold is empty.
            nearness: [q, p], of the query and the centre of each list.
            allowed: an IDSelectorBitmap of faiss; None allows every id.
        """
        is_allowed_N = None if allowed is None else self._mask(allowed)
        num_rows = np.where(probed >= 0, self._sizes[probed], 0).sum(axis=1)
        found: list[Scored] = []
        for part in launches(num_rows):
            found += self._scanned(queries[part], num, probed[part], nearness[part], is_allowed_N)
        return found

    def _mask(self, allowed: Any) -> torch.Tensor:
        """Return which codes a bitmap allows, [N]; the last mask is cached."""
        known, is_allowed_N = self._last_mask
        if known is not allowed:
            bits = np.unpackbits(faiss.rev_swig_ptr(allowed.bitmap, allowed.n), bitorder="little")
            is_allowed_N = torch.from_numpy(bits[self._ids].astype(bool)).to(self.device)
            self._last_mask = allowed, is_allowed_N
        return is_allowed_N

    def _scanned(
        self, queries: Vectors, num: int, probed: Lists, nearness: Nearness, is_allowed_N: torch.Tensor | None
    ) -> list[Scored]:
        num_rows = int(np.where(probed >= 0, self._sizes[probed], 0).sum(axis=1).max())
        if num_rows == 0 or num < 1:
            return [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)) for _ in queries]
        queries_QD, lists_QP, nearness_QP = (
            torch.tensor(np.ascontiguousarray(array), device=self.device)  # a question's vector may be read-only
            for array in (queries, probed, nearness)
        )
        rows_QW, place_QW = pq_scan.rows_of(lists_QP, self._starts_L, self._sizes_L, num_rows)
        if is_allowed_N is not None:
            rows_QW = torch.where((rows_QW >= 0) & is_allowed_N[rows_QW.clamp(min=0)], rows_QW, -1)
        if not self._is_residual:
            nearness_QP = torch.zeros_like(nearness_QP)
        tables_MQC = pq_scan.tables(queries_QD, self._centroids_MCS)
        scores_QW = pq_scan.scan(tables_MQC, self._codes_MN, rows_QW, nearness_QP.gather(1, place_QW))
        query_R, at_R = pq_scan.best(scores_QW, num)
        owners, rows, scores = (
            array.cpu().numpy() for array in (query_R, rows_QW[query_R, at_R], scores_QW[query_R, at_R])
        )
        bounds = np.searchsorted(owners, np.arange(len(queries) + 1))
        parts = [slice(*pair) for pair in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
        return [first_arrays(self._ids[rows[part]], scores[part], part.stop - part.start) for part in parts]


def launches(num_rows: Lists) -> Iterator[slice]:
    """Split a batch into launches that keep the scores in memory below a limit.

    Args:
        num_rows: codes to scan per query, [q].
    """
    start = 0
    while start < len(num_rows):
        stop = start + 1
        while stop < len(num_rows) and num_rows[start : stop + 1].max() * (stop + 1 - start) <= _SCORED_AT_ONCE:
            stop += 1
        yield slice(start, stop)
        start = stop
