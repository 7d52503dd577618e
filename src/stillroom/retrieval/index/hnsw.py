"""Approximate dense index: a hierarchical navigable small world graph (Malkov and Yashunin 2018; llmds 3.2).

Removed vectors stay in the graph for navigation and are never returned; when more than a fifth are removed the graph is
rebuilt. The same vectors in the same order with the same settings and seed give the same graph.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom.retrieval.filters.allowed import AllowedIds, FilterMemo
from stillroom.retrieval.lazy_faiss import faiss
from stillroom.retrieval.ranking import Ranking, best_of, ranked_arrays, sorted_arrays
from stillroom.retrieval.vector_index import VectorIndex, exact_scores, stages

if TYPE_CHECKING:  # it imports numba, which a plain search does not need
    from stillroom.retrieval.index.graph_walk import WalkableGraph

_MAX_DEAD_SHARE = 0.2

_MAX_EF_SEARCH = 4096
"""Beyond it an exact search is hardly slower."""

_BLOCK = 4096
"""Vectors per batch of `in_order`."""


COMPARED_PER_CANDIDATE = 10
"""Vectors compared in the time that a graph walk takes for one candidate; measured, see docs/filters.md."""


@dataclass
class _Chosen:
    """The chunks in the graph that a filter allows."""

    rows: NDArray[np.int64]
    """Ascending."""
    bits: NDArray[np.uint8]
    """Memory that the selector points to."""
    selector: Any
    walkable: "WalkableGraph | None" = None


class HnswIndex(VectorIndex):
    """A `VectorIndex` on faiss' IndexHNSWFlat, which cannot remove: chunk ids are mapped to graph positions here."""

    def __init__(self, dimension: int, config: IndexConfig) -> None:
        self._dimension = dimension
        self._config = config
        self._start_empty()

    def _start_empty(self) -> None:
        self._graph: Any = faiss.IndexHNSWFlat(self._dimension, self._config.m, faiss.METRIC_INNER_PRODUCT)
        self._graph.hnsw.efConstruction = self._config.ef_construction
        self._graph.hnsw.rng = faiss.RandomGenerator(self._config.seed)
        self._ids = np.empty(0, dtype=np.int64)
        """Chunk id by position in the graph."""
        self._positions: dict[int, int] = {}
        """Graph position of each chunk."""
        self._dead: NDArray[np.int64] | None = None
        """Positions of removed chunks, ascending; None until computed."""
        self._walkable: WalkableGraph | None = None
        self._chosen_by: FilterMemo[_Chosen] = FilterMemo()

    def __len__(self) -> int:
        return len(self._positions)

    def add(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        # seeded by position, so that levels are the same after a reload
        self._graph.hnsw.rng = faiss.RandomGenerator(self._config.seed + len(self._ids))
        self._forget()
        self._positions.update(zip(ids.tolist(), range(len(self._ids), len(self._ids) + len(ids)), strict=True))
        self._ids = np.concatenate([self._ids, ids])
        rows = np.ascontiguousarray(vectors, dtype=np.float32)
        run_in_short_lived_thread(lambda: self._graph.add(rows))

    def remove(self, ids: Sequence[int]) -> None:
        for chunk_id in ids:
            self._positions.pop(int(chunk_id), None)
        self._forget()
        if self._num_dead > _MAX_DEAD_SHARE * len(self._ids):
            self._rebuild()

    def search(
        self, query: NDArray[np.float32], k: int, effort: int | None = None, allowed: AllowedIds | None = None
    ) -> Ranking:
        """See `VectorIndex`. `effort` is `ef_search`."""
        if allowed is not None:
            return self._search_allowed(query, k, effort, self._chosen(allowed))
        dead = self._dead_positions()
        # the names keep the selectors alive: faiss stores pointers
        selector = faiss.IDSelectorBatch(dead) if len(dead) else None
        alive = faiss.IDSelectorNot(selector) if selector is not None else None
        return self._walk(query, min(k, len(self)), max(effort or self._config.ef_search, k), alive)

    def _walk(self, query: NDArray[np.float32], k: int, ef_search: int, selector: Any) -> Ranking:
        """Return the k best of a faiss search among the selected positions; None selects all."""
        if k == 0:
            return []
        parameters = faiss.SearchParametersHNSW(efSearch=max(ef_search, k), sel=selector)
        scores, positions = self._graph.search(query.reshape(1, -1), k, params=parameters)
        num_found = k if positions[0, -1] >= 0 else int((positions[0] >= 0).sum())
        return sorted_arrays(self._ids[positions[0, :num_found]], scores[0, :num_found])

    # Some chunks only

    def _chosen(self, allowed: AllowedIds) -> "_Chosen":
        return self._chosen_by.get(allowed, lambda: self._choose(allowed))

    def _choose(self, allowed: AllowedIds) -> "_Chosen":
        is_chosen = allowed.has(self._ids)
        is_chosen[self._dead_positions()] = False
        bits = np.packbits(is_chosen, bitorder="little")
        return _Chosen(np.flatnonzero(is_chosen), bits, faiss.IDSelectorBitmap(len(bits), faiss.swig_ptr(bits)))

    def _search_allowed(self, query: NDArray[np.float32], k: int, effort: int | None, chosen: "_Chosen") -> Ranking:
        k = min(k, len(chosen.rows))
        ef_search = self._ef_for_allowed(k, effort, chosen)
        if ef_search is not None:
            found = self._walk(query, k, ef_search, chosen.selector)
            if len(found) == k:
                return found
        return best_of(self._ids[chosen.rows], exact_scores(self._graph.storage, query, chosen.rows), k)

    def _ef_for_allowed(self, k: int, effort: int | None, chosen: "_Chosen") -> int | None:
        """Return the `ef_search` with which a walk meets as many allowed chunks as an unfiltered walk meets chunks, or
        None where comparing all allowed chunks is cheaper."""
        if k == 0:
            return None
        ef_search = -(-max(effort or self._config.ef_search, k) * len(self._ids) // len(chosen.rows))
        return ef_search if ef_search * COMPARED_PER_CANDIDATE < len(chosen.rows) else None

    def search_staged(
        self,
        query: NDArray[np.float32],
        k: int,
        num_stages: int,
        effort: int | None = None,
        allowed: AllowedIds | None = None,
    ) -> Iterator[Ranking]:
        """See `VectorIndex`. A stage is a part of the walk through the graph, which takes about `ef_search` steps; see
        `graph_walk` for when the last ranking can differ from that of `search`."""
        chosen = None if allowed is None else self._chosen(allowed)
        k = min(k, len(self) if chosen is None else len(chosen.rows))
        found_at = (
            max(effort or self._config.ef_search, k) if chosen is None else self._ef_for_allowed(k, effort, chosen)
        )
        if k == 0 or num_stages <= 1 or found_at is None:
            yield self.search(query, k, effort, allowed)
            return
        from stillroom.retrieval.index.graph_walk import GraphWalk

        ef_search = found_at
        graph = self.walkable_graph()
        walk = GraphWalk(graph if chosen is None else self._walkable_among(chosen), query, k, ef_search)
        for stage in stages(ef_search, num_stages):
            if self._walkable is not graph:  # the index has changed, so the graph's memory may be freed
                yield self.search(query, k, effort, allowed)
                return
            is_done = walk.advance(len(stage) if stage.stop < ef_search else len(self._ids))
            rows, scores = walk.best()
            yield ranked_arrays(self._ids[rows], scores)
            if is_done:
                return

    def walkable_graph(self) -> "WalkableGraph":
        """Return the graph for a `GraphWalk`; rows are positions. Valid until the index changes."""
        from stillroom.retrieval.index.graph_walk import WalkableGraph

        if self._walkable is None:
            self._walkable = WalkableGraph(self._graph, self._dead_positions())
        return self._walkable

    def _walkable_among(self, chosen: "_Chosen") -> "WalkableGraph":
        from stillroom.retrieval.index.graph_walk import WalkableGraph

        if chosen.walkable is None:
            hidden = np.setdiff1d(np.arange(len(self._ids), dtype=np.int64), chosen.rows, assume_unique=True)
            chosen.walkable = WalkableGraph(self._graph, hidden)
        return chosen.walkable

    # Tuning (see `tuning.TunableIndex`)

    @property
    def structure(self) -> int:
        """Constant: an `ef_search` means the same on every graph."""
        return 0

    def effort_range(self) -> tuple[int, int]:
        return 10, max(10, min(len(self._ids), _MAX_EF_SEARCH))

    def exact(self, queries: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        dead = self._dead_positions()
        selector = faiss.IDSelectorBatch(dead)
        parameters = faiss.SearchParameters(sel=faiss.IDSelectorNot(selector)) if len(dead) else None
        positions = run_in_short_lived_thread(lambda: self._graph.storage.search(queries, k, params=parameters))[1]
        ids: NDArray[np.int64] = np.append(self._ids, -1)[positions]  # position -1 reads the appended -1
        return ids

    def sample(self, num: int, rng: np.random.Generator) -> NDArray[np.float32]:
        alive = self._alive_positions()
        chosen = np.sort(rng.choice(alive, min(num, len(alive)), replace=False))
        vectors: NDArray[np.float32] = self._graph.reconstruct_batch(chosen)
        return vectors

    # Storage

    def in_order(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32] | None]]:
        alive = self._alive_positions()
        for start in range(0, len(alive), _BLOCK):
            positions = alive[start : start + _BLOCK]
            yield self._ids[positions], self._graph.reconstruct_batch(positions)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        return {"hnsw": faiss.serialize_index(self._graph), "ids": self._ids, "dead": self._dead_positions()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if "hnsw" not in arrays:
            raise ValueError("not an HNSW index")
        graph = faiss.deserialize_index(arrays["hnsw"])
        if graph.d != self._dimension or graph.ntotal != len(arrays["ids"]):
            raise ValueError("the HNSW index does not fit the knowledge base")
        self._graph, self._ids = graph, arrays["ids"]
        self._forget()
        dead = set(arrays["dead"].tolist())
        self._positions = {int(chunk_id): at for at, chunk_id in enumerate(self._ids.tolist()) if at not in dead}

    def _forget(self) -> None:
        """Drop values derived from an earlier state."""
        self._dead = self._walkable = None
        self._chosen_by.clear()

    @property
    def _num_dead(self) -> int:
        return len(self._ids) - len(self._positions)

    def _dead_positions(self) -> NDArray[np.int64]:
        if self._dead is None:
            self._dead = np.setdiff1d(np.arange(len(self._ids), dtype=np.int64), self._alive_positions())
        return self._dead

    def _alive_positions(self) -> NDArray[np.int64]:
        return np.sort(np.fromiter(self._positions.values(), dtype=np.int64, count=len(self._positions)))

    def _rebuild(self) -> None:
        """Build a new graph of the remaining vectors, in their old order."""
        alive = self._alive_positions()
        ids = self._ids[alive]
        vectors = self._graph.reconstruct_batch(alive) if len(alive) else None
        self._start_empty()
        if vectors is not None:
            self.add(ids, vectors)
