"""Cache of search results: a repeated question skips retrieval.

An entry is valid for one generation of the corpus: any change of a document ends it, because the document may be cited
or may now rank higher. Entries share a token budget (llmds 3.1). Thread-safe.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import QueryCacheConfig, SearchMode
from stillroom.core.document import SearchResult
from stillroom.core.token_cache import TokenCache
from stillroom.rag.document_demand import DocumentDemand

_MAX_CHARS = 8192
"""Longest question, with its filter, that is cached; longer ones are seldom repeated."""
_CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class _QuestionKey:
    """A question and the options that its result depends on, besides the corpus."""

    text: str
    mode: SearchMode
    top_k: int
    where: str

    @property
    def num_chars(self) -> int:
        return len(self.text) + len(self.where)


@dataclass(frozen=True, slots=True)
class _CachedResult:
    result: SearchResult
    generation: Hashable
    vector: NDArray[np.float32] | None
    """Embedding [d] of the question; None unless near-identical questions are recognised."""


class SearchedCorpus(Protocol):
    """The part of `KnowledgeBase` that is cached. Thread-safe."""

    @property
    def generation(self) -> Hashable:
        """Differs after every change of what a question may find."""
        ...

    def embed_question(self, question: str) -> NDArray[np.float32]:
        """Embedding [d] of length 1."""
        ...

    def search_staged(
        self, query: str, *, mode: SearchMode, top_k: int, num_stages: int, where: str
    ) -> Iterator[SearchResult]:
        """At most `num_stages` results, of which the last is final."""
        ...


class QueryCache:
    """Searches a corpus, or returns the result of the same question from the cache."""

    def __init__(self, corpus: SearchedCorpus, config: QueryCacheConfig) -> None:
        self._corpus = corpus
        self._config = config
        self._lock = Lock()
        self._entries: TokenCache[_QuestionKey, _CachedResult] = TokenCache(config.max_tokens)
        self._current_generation: Hashable = None
        self.num_hits = 0
        """Since the cache was created."""
        self.demand = DocumentDemand()
        """How often searches returned each document, from the cache or not."""

    def search(self, query: str, mode: SearchMode, top_k: int, where: str = "") -> SearchResult:
        """The final result, from the cache where possible. Raises as the corpus's search."""
        return list(self.search_staged(query, mode, top_k, 1, where))[-1]

    def search_staged(
        self, query: str, mode: SearchMode, top_k: int, num_stages: int, where: str = ""
    ) -> Iterator[SearchResult]:
        """The results of a staged search; only the final one if it is in the cache. The final result is cached and
        counted unless the caller stops iterating before it. Raises as the corpus's search."""
        result: SearchResult | None = None
        for result in self._search_staged(query, mode, top_k, num_stages, where):
            yield result
        if result is not None:
            self.demand.add(scored.chunk.document_id for scored in result.results)

    def _search_staged(
        self, query: str, mode: SearchMode, top_k: int, num_stages: int, where: str
    ) -> Iterator[SearchResult]:
        question = _QuestionKey(" ".join(query.split()), mode, top_k, where.strip())
        if self._config.max_tokens == 0 or question.num_chars > _MAX_CHARS:
            yield from self._corpus.search_staged(query, mode=mode, top_k=top_k, num_stages=num_stages, where=where)
            return
        generation = self._corpus.generation
        self._drop_other_generations(generation)
        vector = self._corpus.embed_question(query) if self._compares_vectors(mode) else None
        if vector is not None and self._corpus.generation != generation:  # another model may have embedded it
            yield from self._corpus.search_staged(query, mode=mode, top_k=top_k, num_stages=num_stages, where=where)
            return
        found = self._find(question, generation, vector)
        if found is not None:
            yield SearchResult(found.results, num_reranked=found.num_reranked)  # without the seconds of the search
            return
        for result in self._corpus.search_staged(query, mode=mode, top_k=top_k, num_stages=num_stages, where=where):
            yield result
        self._put(question, result, generation, vector)

    def _find(
        self, question: _QuestionKey, generation: Hashable, vector: NDArray[np.float32] | None
    ) -> SearchResult | None:
        with self._lock:
            entry = self._entries.get(question)
            if entry is not None and entry.generation != generation:
                self._entries.discard(question)
                entry = None
            if entry is None and vector is not None:
                entry = self._find_similar(question, generation, vector)
            self.num_hits += entry is not None
        return None if entry is None else entry.result

    def _find_similar(
        self, question: _QuestionKey, generation: Hashable, vector: NDArray[np.float32]
    ) -> _CachedResult | None:
        """The entry of the most similar question of the same kind, if it is similar enough."""
        best, best_similarity = None, self._config.similarity
        for other in self._entries:
            if (other.mode, other.top_k, other.where) == (question.mode, question.top_k, question.where):
                entry = self._entries.peek(other)
                if entry.generation == generation and entry.vector is not None:
                    similarity = float(entry.vector @ vector)
                    if similarity >= best_similarity:
                        best, best_similarity = other, similarity
        return None if best is None else self._entries.get(best)

    def _compares_vectors(self, mode: SearchMode) -> bool:
        """A sparse search embeds nothing, so it has no vector to compare."""
        return self._config.similarity < 1.0 and mode != "sparse"

    def _put(
        self, question: _QuestionKey, result: SearchResult, generation: Hashable, vector: NDArray[np.float32] | None
    ) -> None:
        """Cache a result unless its generation has passed. `generation` was read before the search, so a change in
        between can only end the entry too early."""
        num_tokens = 1 + question.num_chars // _CHARS_PER_TOKEN
        num_tokens += sum(chunk.num_tokens for scored in result.results for chunk in (scored.chunk, *scored.copies))
        with self._lock:
            if generation == self._current_generation:
                self._entries.put(question, _CachedResult(result, generation, vector), num_tokens)

    def drop_stale(self) -> None:
        """Drop results of an older generation: they hold the text of documents that may have been deleted."""
        self._drop_other_generations(self._corpus.generation)

    def _drop_other_generations(self, generation: Hashable) -> None:
        with self._lock:
            if generation == self._current_generation:
                return
            self._current_generation = generation
            for question in list(self._entries):
                if self._entries.peek(question).generation != generation:
                    self._entries.discard(question)
