"""IVF-PQ index with a limit on the bytes of lists in RAM (VectorLiteRAG 4.1, 4.2).

After the same additions and removals it returns the ids and scores of `ivf_pq`. Before the first training it is an
`IvfPqIndex`. Then lists and full vectors are in a file (`list_file`), with the hottest lists in RAM (`hot_lists`).
Vectors added since the file was written have their codes in RAM and their full vectors in an unnamed file; removed ones
are masked. Writing merges all of it into a new file, list by list.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig
from stillroom.errors import ConfigError
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.index.ivf_pq import IvfPqIndex, num_to_train, trained_lists
from stillroom.retrieval.lazy_faiss import faiss
from stillroom.retrieval.ranking import Ranking, ranked_arrays
from stillroom.retrieval.tiers.faiss_lists import all_entries, without_entries
from stillroom.retrieval.tiers.hot_lists import Counts, DriftRules, HotLists, ListFigures, Spawn
from stillroom.retrieval.tiers.list_file import ListFile, Origin, blocks, write_list_file
from stillroom.retrieval.tiers.scratch_files import scratch_list_file
from stillroom.retrieval.tiers.tiered_rows import Snapshot, TieredRows
from stillroom.retrieval.vector_index import VectorIndex, one_thread, stages

if TYPE_CHECKING:  # it imports torch, which an index without devices does not need
    from stillroom.retrieval.tiers.device_lists import DeviceLists

_BATCH = 4096
"""Vectors per batch of `add`, so that few are in RAM before the first training."""


class TieredIvfPqIndex(VectorIndex):
    """A `VectorIndex`. Not thread-safe, except that jobs of `spawn` may run at any time."""

    def __init__(
        self,
        dimension: int,
        config: IndexConfig,
        folder: Path,
        spawn: Spawn,
        rules: DriftRules | None = None,
        on_window: Callable[[], None] = lambda: None,
    ) -> None:
        """Make an empty index.

        Args:
            folder: for unnamed files, on the disk of the slow tier.
            spawn: runs exchanges of lists.
            on_window: called when a window of queries has ended.

        Raises:
            ConfigError: the dimension is no multiple of the number of subquantizers, or a device does not exist.
        """
        self._dimension, self._config, self._folder = dimension, config, folder
        self._spawn, self._rules, self._on_window = spawn, rules or DriftRules(), on_window
        self._untrained: IvfPqIndex | None = IvfPqIndex(dimension, config)
        """The whole index until the first training, then None."""
        self._devices = _devices(config)
        self._on_devices: DeviceLists | None = None
        self._rows: TieredRows
        self._hot: HotLists
        self._num_trained = 0
        self._is_counting = True

    def __len__(self) -> int:
        return len(self._rows if self._untrained is None else self._untrained)

    @property
    def is_trained(self) -> bool:
        """Whether searches are approximate and lists in a file."""
        return self._untrained is None

    @property
    def nlist(self) -> int:
        """Inverted lists; 0 while untrained."""
        return 0 if self._untrained is not None else len(self._rows.file.sizes)

    def add(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        start = 0
        while start < len(ids):
            stop = min(len(ids), start + _BATCH)
            if self._untrained is None and self._config.refine:
                stop = min(stop, start + num_to_train(self._config, self._num_trained) - len(self))
            batch = np.ascontiguousarray(vectors[start:stop], dtype=np.float32)
            if self._untrained is not None:
                self._untrained.add(ids[start:stop], batch)
                if self._untrained.is_trained:
                    self._move_to_file(self._untrained)
            else:
                self._rows.add(ids[start:stop], batch)
                if self._config.refine and len(self) >= num_to_train(self._config, self._num_trained):
                    self._train()
            start = stop

    def remove(self, ids: Sequence[int]) -> None:
        if self._untrained is not None:
            self._untrained.remove(ids)
        elif len(ids):
            self._rows.remove(np.asarray(ids, dtype=np.int64))

    def search_staged(
        self,
        query: NDArray[np.float32],
        k: int,
        num_stages: int,
        effort: int | None = None,
        allowed: AllowedIds | None = None,
    ) -> Iterator[Ranking]:
        """See `IvfPqIndex.search_staged`.

        Raises:
            CorruptKnowledgeBaseError: a list or vector that the search needs is damaged in the file; at any stage.
        """
        if self._untrained is not None:
            yield from self._untrained.search_staged(query, k, num_stages, effort, allowed)
            return
        rows = self._rows
        num_fetched = max(k, k * self._config.refine)
        nprobe = min(effort or self._config.nprobe, self.nlist)
        allowed_rows = None if allowed is None else rows.allowed_rows(allowed)
        if allowed_rows is not None and self._config.refine and allowed_rows.lists.is_comparing_always_cheaper(nprobe):
            yield rows.best_exact(query, k, allowed_rows)
            return
        near, lists = rows.tiers.probe(query.reshape(1, -1), nprobe if allowed_rows is None else self.nlist)
        probed, nearness = lists[0], near[0]
        if allowed_rows is not None:
            probed, nearness = allowed_rows.lists.probes(probed, nearness, nprobe, num_fetched)
            if self._config.refine and allowed_rows.lists.is_comparing_cheaper(probed):
                yield rows.best_exact(query, k, allowed_rows)
                return
        if self._is_counting and self._hot.record(probed):
            self._on_window()
        rows.tiers.read_ahead(probed)  # the disk reads for later stages while the first are scanned
        found = ids = np.empty(0, dtype=np.int64)
        scores = np.empty(0, dtype=np.float32)
        for stage in stages(len(probed), num_stages):
            part = slice(stage.start, stage.stop)
            more, more_scores = rows.best(query, num_fetched, probed[part], nearness[part], allowed_rows)
            found, ids = np.append(found, more), np.append(ids, rows.ids_of(more))
            scores = np.append(scores, more_scores)
            order = np.lexsort((ids, -scores))[:num_fetched]
            found, ids, scores = found[order], ids[order], scores[order]
            yield self._ranking(rows, query, k, found, ids, scores)

    def search_batch(
        self,
        queries: NDArray[np.float32],
        k: int,
        on_found: Callable[[int, Ranking], None],
        effort: int | None = None,
    ) -> None:
        """Run `search` for queries [q, d], with all shards scanning in parallel.

        Args:
            on_found: called once per query, with its number and ranking, as soon as its last list is scanned.

        Raises:
            CorruptKnowledgeBaseError: a list or vector that a query needs is damaged in the file.
        """
        if self._untrained is not None:
            for number, query in enumerate(queries):
                on_found(number, self._untrained.search(query, k, effort))
            return
        rows, num_fetched = self._rows, max(k, k * self._config.refine)
        nearness, probed = rows.tiers.probe(queries, effort or self._config.nprobe)
        windows = [self._hot.record(lists) for lists in probed] if self._is_counting else []
        if any(windows):
            self._on_window()
        for number, (found, scores) in rows.best_of_batch(queries, num_fetched, probed, nearness):
            ids = rows.ids_of(found)
            order = np.lexsort((ids, -scores))[:num_fetched]
            on_found(number, self._ranking(rows, queries[number], k, found[order], ids[order], scores[order]))

    def _ranking(
        self,
        rows: TieredRows,
        query: NDArray[np.float32],
        k: int,
        found: NDArray[np.int64],
        ids: NDArray[np.int64],
        scores: NDArray[np.float32],
    ) -> Ranking:
        """Return the k best of rows `found` with their ids and approximate scores, by full vectors if those are kept.

        Args:
            rows: the rows that were searched; between two stages the index may have replaced its own.
        """
        exact = rows.vectors(found) @ query if self._config.refine else scores
        return ranked_arrays(ids, exact)[:k]

    # Tuning (see `tuning.TunableIndex`)

    @property
    def structure(self) -> int:
        """Changes with training."""
        return self._num_trained

    def effort_range(self) -> tuple[int, int]:
        return 1, max(1, self.nlist)

    def exact(self, queries: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """See `TunableIndex`; reads every full vector. Raises ConfigError: `refine` is 0, so there are none."""
        if self._untrained is not None:
            return self._untrained.exact(queries, k)
        self._check_refine()
        best = np.full((len(queries), k), -1, dtype=np.int64)
        scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
        for ids, vectors in self._rows.in_order():
            product = faiss.METRIC_INNER_PRODUCT
            more = run_in_short_lived_thread(partial(faiss.knn, queries, vectors, min(k, len(vectors)), product))
            scores = np.concatenate([scores, more[0]], axis=1)
            best = np.concatenate([best, ids[more[1]]], axis=1)
            order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
            best, scores = np.take_along_axis(best, order, axis=1), np.take_along_axis(scores, order, axis=1)
        return best

    def sample(self, num: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """See `TunableIndex`. Raises ConfigError: `refine` is 0, so there are no full vectors."""
        if self._untrained is not None:
            return self._untrained.sample(num, rng)
        self._check_refine()
        rows = self._rows.alive()
        ids = self._rows.ids_of(rows)
        chosen = np.sort(rng.choice(ids, min(num, len(ids)), replace=False))
        order = np.argsort(ids, kind="stable")
        return self._rows.vectors(rows[order[np.searchsorted(ids[order], chosen)]])

    def drop_pages(self) -> None:
        """See `TieredLists.drop_pages`. Precondition: lists are in a file that has a name."""
        self._rows.tiers.drop_pages()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count accesses of lists meanwhile: searches of the tuner are not user traffic."""
        was_counting, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = was_counting

    # Storage

    def in_order(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32] | None]]:
        """See `VectorIndex`. Reads every list and every vector of the file."""
        if self._untrained is not None:
            yield from self._untrained.in_order()
            return
        self._rows.check()
        if self._rows.file.has_vectors:
            yield from self._rows.in_order()
        else:
            yield self._rows.ids_of(self._rows.alive()), None

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of an `IvfPqIndex`; needs RAM for the whole index."""
        if self._untrained is not None:
            return self._untrained.to_arrays()
        lists, exact = self._rows.snapshot().whole(), FlatIndex(self._dimension)
        if self._config.refine:
            for ids, vectors in self._rows.in_order():
                exact.add(ids, vectors)
        serialized = faiss.serialize_index(lists)
        return {"ivf_pq": serialized, "num_trained": np.array(self._num_trained), **exact.to_arrays()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore from `IvfPqIndex.to_arrays`. Raises as `IvfPqIndex.restore`."""
        untrained = IvfPqIndex(self._dimension, self._config)
        untrained.restore(arrays)
        self._untrained = untrained
        if untrained.is_trained:
            self._move_to_file(untrained)

    def use_file(self, file: ListFile, counts: Counts | None = None) -> None:
        """Replace the content by that of a file. Jobs of `spawn` copy hot lists into RAM.

        Args:
            counts: earlier accesses of its lists; None if unknown.

        Raises:
            ValueError: the file belongs to another index.
        """
        if file.shell.d != self._dimension or (self._config.refine and not file.has_vectors):
            raise ValueError("the file does not fit the knowledge base")
        if counts is None and self._untrained is None and file.quantizers_crc() == self._rows.file.quantizers_crc():
            counts = self._hot.counts()
        self.close()
        self._rows = TieredRows(file, self._folder)
        tiers, config = self._rows.tiers, self._config
        if self._devices:
            from stillroom.retrieval.tiers.device_lists import DeviceLists

            self._on_devices = DeviceLists(tiers, self._devices, config.device_bytes)
        hot_bytes = config.hot_bytes or int(tiers.list_bytes().sum())
        self._hot = HotLists(tiers, hot_bytes, self._rules, self._spawn, counts, self._on_devices)
        self._num_trained = file.origin.num_trained
        self._untrained = None
        self._hot.start()

    def close(self) -> None:
        """Stop exchanging lists. Idempotent."""
        if self._untrained is None:
            self._hot.stop()

    def snapshot(self) -> Snapshot:
        """Return the present content for a new file; later changes do not affect it. Precondition: trained."""
        return self._rows.snapshot()

    @property
    def heat(self) -> tuple[int, Counts] | None:
        """Checksum of the quantizers, and accesses of their lists; None while untrained."""
        return (self._rows.file.quantizers_crc(), self._hot.counts()) if self._untrained is None else None

    @property
    def figures(self) -> ListFigures | None:
        if self._untrained is not None:
            return None
        return ListFigures.of(
            self._rows.tiers, self._hot, 0 if self._on_devices is None else self._on_devices.num_bytes
        )

    # Inside

    def _move_to_file(self, untrained: IvfPqIndex) -> None:
        """Move a freshly trained index from RAM into an unnamed file."""
        lists, exact = untrained.parts
        ids = exact.ids() if self._config.refine else np.concatenate([entry[0] for entry in all_entries(lists)])
        self._use_lists(
            lists, ids, lambda: map(exact.vectors, blocks(ids)) if self._config.refine else (), untrained.structure
        )

    def _train(self) -> None:
        """Train new quantizers. Meanwhile all codes are in RAM once more."""
        rows = self._rows
        ids, vectors = rows.whole_vectors()
        lists = trained_lists(ids, vectors, rows.file.shell.pq.M, self._config)
        with one_thread():  # a new list inherits the accesses of the nearest old list
            near = rows.tiers.quantizer.search(lists.quantizer.reconstruct_n(0, lists.nlist), 1)[1][:, 0]
        counts = self._hot.counts()[near] / np.bincount(near)[near]
        in_order = np.arange(len(ids))
        self._use_lists(lists, ids, lambda: (vectors[rows] for rows in blocks(in_order)), len(ids), counts)

    def _use_lists(
        self,
        lists: Any,
        ids: NDArray[np.int64],
        vectors: Callable[[], Iterable[NDArray[np.float32]]],
        num_trained: int,
        counts: Counts | None = None,
    ) -> None:
        """Write lists to an unnamed file and use it.

        Args:
            ids: [n], in the order of addition.
            vectors: returns the vectors of `ids` in blocks.
        """
        order = np.argsort(ids, kind="stable")
        origin, shell = Origin("", 0, num_trained), without_entries(lists)

        def write(path: Path) -> None:
            numbered = ((order[np.searchsorted(ids[order], own)], codes) for own, codes in all_entries(lists))
            write_list_file(path, origin, shell, numbered, ids, vectors())

        self.use_file(scratch_list_file(self._folder, write), counts)

    def _check_refine(self) -> None:
        if not self._config.refine:
            raise ConfigError("an ivf_pq index with index.refine = 0 cannot be tuned; set index.refine to 1 or more")


def _devices(config: IndexConfig) -> tuple[str, ...]:
    if not config.device_bytes:
        return ()
    from stillroom.retrieval.tiers.device_lists import parse_devices

    return parse_devices(config.devices)
