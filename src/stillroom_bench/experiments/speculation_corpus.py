"""The index that `stillroom bench pipeline speculation` searches: in RAM or on disk, with or without a filter."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from stillroom.config.settings import IndexConfig
from stillroom.core.clock import SystemClock
from stillroom.core.document import Chunk, ScoredChunk, SearchResult
from stillroom.core.ids import DocumentId, chunk_id_of
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.index.ivf_pq import IvfPqIndex
from stillroom.retrieval.index.tiered_index import TieredIvfPqIndex
from stillroom.retrieval.tiers.list_file import ListFile
from stillroom_bench.experiments.experiment_options import SpeculationOptions
from stillroom_bench.loads.workloads import choose_queries, clustered_vectors, load_real_data
from stillroom_bench.quality.search_arms import Vectors


class SearchedCorpus:
    """An index and the chunks of its rows; a generated vector stands for a chunk of a real document."""

    def __init__(
        self, datasets: Sequence[Path], work_dir: Path, options: SpeculationOptions, on_progress: Callable[[str], None]
    ) -> None:
        real = load_real_data(datasets, work_dir, on_progress)
        on_progress(f"making {options.size:,} vectors")
        vectors = clustered_vectors(real.documents, options.size, options.seed)
        on_progress("building the index")
        self.index, self._file = _built(vectors, work_dir, options)
        self._texts = real.texts
        self._queries = choose_queries(real, len(real.questions), options.seed)[1]
        self._options = options
        self.allowed: AllowedIds | None = None
        if options.allowed < 1:
            is_allowed = np.random.default_rng([options.seed, 3]).random(len(vectors)) < options.allowed
            self.allowed = AllowedIds(np.flatnonzero(is_allowed))

    def close(self) -> None:
        """Remove the index' file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def questions(self, num: int, seed: Sequence[int]) -> Vectors:
        """Draw questions by popularity, with repetition."""
        ranks = np.arange(1, len(self._queries) + 1, dtype=float) ** -self._options.zipf
        chosen = np.random.default_rng(list(seed)).choice(len(ranks), size=num, p=ranks / ranks.sum())
        return np.ascontiguousarray(self._queries[chosen])

    def forget_pages(self) -> None:
        """Drop the index' file from memory, so that the next search reads it from disk.

        Precondition: no search is running.
        """
        if isinstance(self.index, TieredIvfPqIndex):
            self.index.drop_pages()

    def search(self, query: Vectors, share: float, num_stages: int) -> Iterator[SearchResult]:
        """Search in stages as the knowledge base does, without embedding the question."""
        clock = SystemClock()
        began = clock.monotonic()
        nprobe = max(1, round(share * self.index.nlist))
        for found in self.index.search_staged(query, self._options.k, num_stages, nprobe, self.allowed):
            results = tuple(ScoredChunk(self._chunk(row), score, {"dense": score}) for row, score in found)
            yield SearchResult(results, 0.0, clock.monotonic() - began)

    def _chunk(self, row: int) -> Chunk:
        document_id = DocumentId(f"/bench/{row}")
        return Chunk(chunk_id_of(document_id, 0, ""), document_id, row, self._texts[row % len(self._texts)])


def _built(
    vectors: Vectors, work_dir: Path, options: SpeculationOptions
) -> tuple[IvfPqIndex | TieredIvfPqIndex, Path | None]:
    """Return the index, and its file if it is on disk."""
    ids, config = np.arange(len(vectors), dtype=np.int64), IndexConfig(kind="ivf_pq", nbits=options.nbits, refine=4)
    if not options.on_disk:
        index = IvfPqIndex(vectors.shape[1], config)
        index.add(ids, vectors)
        return index, None
    tiered = TieredIvfPqIndex(vectors.shape[1], replace(config, hot_bytes=1), work_dir, lambda job: job())
    tiered.add(ids, vectors)
    file = work_dir / f"speculation-{os.getpid()}.lists"
    tiered.snapshot().write(file, "", 0)
    tiered.use_file(ListFile(file))
    return tiered, file
