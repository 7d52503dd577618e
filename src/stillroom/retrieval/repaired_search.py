"""Searches the active vectors of a knowledge base, and repairs what a search finds behind or damaged."""

from collections.abc import Iterator

from stillroom.config.settings import SearchMode
from stillroom.core.document import SearchResult
from stillroom.retrieval.embedded_corpus import ActiveCorpus
from stillroom.retrieval.hybrid import Candidates
from stillroom.retrieval.index.bm25 import DamagedPostingsError
from stillroom.retrieval.repairing import Repairs
from stillroom.retrieval.store.vector_sets import VectorsReplacedError


class RepairedSearch:
    """Thread-safe."""

    def __init__(self, active: ActiveCorpus, repairs: Repairs) -> None:
        self._active, self._repairs = active, repairs

    def search_staged(
        self, query: str, mode: SearchMode | None, top_k: int | None, num_stages: int, where: str
    ) -> Iterator[SearchResult]:
        """See `KnowledgeBase.search_staged`."""
        needs_vectors = (mode or self._active.config.search.mode) != "sparse"
        self._repairs.before_search(needs_vectors=needs_vectors)
        may_repair = True
        while True:
            try:
                with self._active.in_use() as current:
                    if needs_vectors:
                        current.checked_embedder()
                    yield from current.search.search_staged(query, mode, top_k, num_stages, where)
                return
            except DamagedPostingsError:
                if not may_repair:
                    raise
                may_repair = False
                self._repairs.repair_words()
            except VectorsReplacedError:
                pass
            num_stages = 1

    def candidates(self, query: str, num_candidates: int) -> Candidates:
        """See `KnowledgeBase.candidates`."""
        self._active.current().checked_embedder()
        try:
            return self._active.current().search.candidates(query, num_candidates)
        except DamagedPostingsError:
            self._repairs.repair_words()
            return self._active.current().search.candidates(query, num_candidates)
