"""Approximate dense index: inverted lists of product-quantised residuals (Jegou, Douze and Schmid 2011).

Exact like `flat` until there are enough vectors to train on. Then a query is compared with the codes in the `nprobe`
nearest lists, and the best are scored again with their full vectors (`refine`). The quantizers are trained again
whenever the corpus has quadrupled. The same additions and removals in the same order, with the same settings and seed,
give the same lists and codes, however they are batched and with any number of threads.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig
from stillroom.errors import ConfigError
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom.retrieval.filters.allowed import AllowedIds, FilterMemo
from stillroom.retrieval.filters.allowed_lists import AllowedLists
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.lazy_faiss import faiss
from stillroom.retrieval.ranking import Ranking, first_arrays, ranked_arrays
from stillroom.retrieval.tiers.faiss_lists import entries_of
from stillroom.retrieval.tiers.host_scan import scan
from stillroom.retrieval.vector_index import VectorIndex, one_thread, stages

_POINTS_PER_CENTROID = 39
"""Fewest training vectors per centroid; with fewer, faiss warns of bad quantizers."""

_GROWTH_TO_RETRAIN = 4
"""Rebuilding at 4x growth costs a third more in total than training once at the end."""

_PQ_TRAINING = {"niter": 10, "max_points_per_centroid": 64}
"""faiss' default of 25 rounds over 256 points per centroid takes a minute instead of seconds, for the same recall."""

_SUBVECTOR = 8
"""Default dimensions per subquantizer: 32 times smaller than float32 at 8 bits."""


class IvfPqIndex(VectorIndex):
    """A `VectorIndex` on faiss' IndexIVFPQ."""

    def __init__(self, dimension: int, config: IndexConfig) -> None:
        """Empty.

        Raises:
            ConfigError: the dimension is no multiple of the number of subquantizers.
        """
        self._dimension = dimension
        self._config = config
        self._num_subquantizers = config.num_subquantizers or _divisor(dimension, dimension // _SUBVECTOR)
        if dimension % self._num_subquantizers:
            raise ConfigError(
                f"index.num_subquantizers = {config.num_subquantizers} does not divide the {dimension} dimensions of "
                f"the embedder; {_divisor(dimension, config.num_subquantizers)} does"
            )
        self._exact = FlatIndex(dimension)
        """Every vector, until training and, with `refine`, after it."""
        self._lists: Any = None
        """The IndexIVFPQ; None while untrained."""
        self._allowed_lists: FilterMemo[AllowedLists] = FilterMemo()
        self._num_trained = 0
        """Vectors at the last training."""

    def __len__(self) -> int:
        return len(self._exact) if self._lists is None else int(self._lists.ntotal)

    @property
    def is_trained(self) -> bool:
        """Whether searches are approximate."""
        return self._lists is not None

    @property
    def nlist(self) -> int:
        """Inverted lists; 0 while untrained."""
        return int(self._lists.nlist) if self._lists is not None else 0

    def add(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        start = 0
        while start < len(ids):  # add up to the next training, so that batches do not matter
            stop = min(len(ids), start + self._num_to_train() - len(self)) if self._may_train() else len(ids)
            self._put(ids[start:stop], np.ascontiguousarray(vectors[start:stop], dtype=np.float32))
            start = stop
            if self._may_train() and len(self) >= self._num_to_train():
                self._train()

    def remove(self, ids: Sequence[int]) -> None:
        if not len(ids):
            return
        self._allowed_lists.clear()
        self._exact.remove(ids)
        if self._lists is not None:
            self._lists.remove_ids(np.asarray(ids, dtype=np.int64))

    def search_staged(
        self,
        query: NDArray[np.float32],
        k: int,
        num_stages: int,
        effort: int | None = None,
        allowed: AllowedIds | None = None,
    ) -> Iterator[Ranking]:
        """See `VectorIndex`; `effort` is `nprobe`. A stage scans some of the probed lists, nearest first, and scores
        the best so far again with their full vectors."""
        if self._lists is None:
            yield from self._exact.search_staged(query, k, num_stages, None, allowed)
            return
        num_fetched = max(k, k * self._config.refine)
        nprobe = min(effort or self._config.nprobe, self.nlist)
        allowed_lists = (
            None if allowed is None else self._allowed_lists.get(allowed, lambda: self._find_allowed_lists(allowed))
        )
        if allowed_lists is not None and self._config.refine and allowed_lists.is_comparing_always_cheaper(nprobe):
            yield from self._exact.search_staged(query, k, num_stages, None, allowed)
            return
        with one_thread():
            found_at = self._lists.quantizer.search(
                query.reshape(1, -1), nprobe if allowed_lists is None else self.nlist
            )
        nearness, lists = found_at[0][0], found_at[1][0]
        if allowed_lists is not None:
            lists, nearness = allowed_lists.probes(lists, nearness, nprobe, num_fetched)
            if self._config.refine and allowed_lists.is_comparing_cheaper(lists):
                yield from self._exact.search_staged(query, k, num_stages, None, allowed)
                return
        ids, scores = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        for stage in stages(len(lists), num_stages):
            part = slice(stage.start, stage.stop)
            selector = None if allowed_lists is None else allowed_lists.selector
            more_ids, more_scores = scan(self._lists, query, num_fetched, lists[part], nearness[part], selector)
            ids, scores = first_arrays(np.append(ids, more_ids), np.append(scores, more_scores), num_fetched)
            yield self._ranking(query, k, ids, scores)

    @property
    def parts(self) -> tuple[Any, FlatIndex]:
        """The IndexIVFPQ (None while untrained) and the index of full vectors, for `tiered_index`."""
        return self._lists, self._exact

    # Tuning (see `tuning.TunableIndex`)

    @property
    def structure(self) -> int:
        """Changes with each training, after which an `nprobe` is another share of the lists."""
        return self._num_trained

    def effort_range(self) -> tuple[int, int]:
        """Return the least and the greatest useful `nprobe`; (1, 1) while untrained."""
        return 1, max(1, self.nlist)

    def exact(self, queries: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """See `TunableIndex`. Raises ConfigError: `refine` is 0, so there are no full vectors."""
        self._check_refine()
        return self._exact.exact(queries, k)

    def sample(self, num: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """See `TunableIndex`. Raises ConfigError: `refine` is 0, so there are no full vectors."""
        self._check_refine()
        return self._exact.sample(num, rng)

    def _check_refine(self) -> None:
        if self._lists is not None and not self._config.refine:
            raise ConfigError("an ivf_pq index with index.refine = 0 cannot be tuned; set index.refine to 1 or more")

    # Storage

    def in_order(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32] | None]]:
        """See `VectorIndex`. Leaves out entries that have only a code or only a full vector."""
        if self._lists is None:
            yield from self._exact.in_order()
            return
        entries = self._lists.invlists
        listed = np.concatenate([entries_of(entries, number)[0] for number in range(self.nlist)])
        if not self._config.refine:
            yield listed, None
            return
        for ids, vectors in self._exact.in_order():
            assert vectors is not None
            is_listed = np.isin(ids, listed)
            yield ids[is_listed], vectors[is_listed]

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        lists = faiss.serialize_index(self._lists) if self._lists is not None else np.empty(0, dtype=np.uint8)
        return {"ivf_pq": lists, "num_trained": np.array(self._num_trained), **self._exact.to_arrays()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if "ivf_pq" not in arrays:
            raise ValueError("not an IVF-PQ index")
        lists = faiss.deserialize_index(arrays["ivf_pq"]) if len(arrays["ivf_pq"]) else None
        exact = FlatIndex(self._dimension)
        exact.restore(arrays)
        if lists is not None:
            has_vectors = len(exact) == lists.ntotal or not self._config.refine
            if lists.d != self._dimension or not has_vectors:
                raise ValueError("the IVF-PQ index does not fit the knowledge base")
        self._lists, self._exact, self._num_trained = lists, exact, int(arrays["num_trained"])
        self._allowed_lists.clear()

    # Inside

    def _may_train(self) -> bool:
        return self._lists is None or self._config.refine > 0

    def _num_to_train(self) -> int:
        return num_to_train(self._config, self._num_trained)

    def _find_allowed_lists(self, allowed: AllowedIds) -> AllowedLists:
        ids = [entries_of(self._lists.invlists, number)[0] for number in range(self.nlist)]
        counts = np.array([allowed.has(own).sum() for own in ids], dtype=np.int64)
        return AllowedLists(counts, np.array([len(own) for own in ids]), faiss.IDSelectorBatch(allowed.ids))

    def _put(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self._allowed_lists.clear()
        if self._lists is None or self._config.refine:
            self._exact.add(ids, vectors)
        if self._lists is not None:
            run_in_short_lived_thread(lambda: self._lists.add_with_ids(vectors, ids))

    def _ranking(
        self, query: NDArray[np.float32], k: int, ids: NDArray[np.int64], scores: NDArray[np.float32]
    ) -> Ranking:
        """Return the k best of the candidates, by their full vectors if those are kept."""
        if self._config.refine:
            scores = self._exact.vectors(ids) @ query
        return ranked_arrays(ids, scores)[:k]

    def _train(self) -> None:
        """Train new quantizers on all vectors and fill the lists."""
        ids = self._exact.ids()
        self._lists = trained_lists(ids, self._exact.vectors(ids), self._num_subquantizers, self._config)
        self._num_trained = len(ids)
        if not self._config.refine:
            self._exact = FlatIndex(self._dimension)


def num_to_train(config: IndexConfig, num_trained: int) -> int:
    """Return the number of vectors of the next training; `num_trained` is that of the last, 0 if there was none."""
    return _GROWTH_TO_RETRAIN * num_trained or _POINTS_PER_CENTROID * 2**config.nbits


def trained_lists(
    ids: NDArray[np.int64], vectors: NDArray[np.float32], num_subquantizers: int, config: IndexConfig
) -> Any:
    """Return an IndexIVFPQ trained on vectors [n, d] that holds them under ids [n]."""
    num_vectors, dimension = vectors.shape
    nlist = min(config.nlist or round(4 * num_vectors**0.5), num_vectors // _POINTS_PER_CENTROID)
    lists = faiss.IndexIVFPQ(
        faiss.IndexFlatIP(dimension),
        dimension,
        max(1, nlist),
        num_subquantizers,
        config.nbits,
        faiss.METRIC_INNER_PRODUCT,
    )
    # faiss takes 31 bits
    lists.cp.seed = lists.pq.cp.seed = config.seed % 2**31
    for name, value in _PQ_TRAINING.items():
        setattr(lists.pq.cp, name, value)
    with one_thread():
        lists.train(vectors)
        lists.add_with_ids(vectors, ids)
    return lists


def _divisor(dimension: int, limit: int) -> int:
    """Return the largest divisor of `dimension` up to `limit`, at least 1."""
    return next(number for number in range(max(1, min(limit, dimension)), 0, -1) if dimension % number == 0)
