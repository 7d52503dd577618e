"""Cache of search results: a repeated question skips retrieval.

An entry is valid for one generation of the corpus: any change of a document ends it, because the document may be cited
or may now rank higher. Entries share a token budget (llmds 3.1). Thread-safe.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import QueryCacheConfig, SearchMode
from stillroom.core.document import SearchResult
from stillroom.core.token_cache import TokenCache

_MAX_CHARS = 8192
"""Longest question with its filter that is kept; longer ones are seldom repeated and are searched each time."""
_CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class _QuestionKey:
    """What a result depends on, besides the corpus."""

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


@dataclass(frozen=True, slots=True)
class QueryCacheStats:
    """Counts since the cache was made."""

    num_hits: int


StagedSearch = Callable[[str, SearchMode, int, int, str], Iterator[SearchResult]]
"""(question, mode, top_k, num_stages, filter) -> at most so many results, of which the last is the answer."""


class QueryCache:
    """Wraps a search. The wrapped functions must be thread-safe."""

    def __init__(
        self,
        search: StagedSearch,
        generation: Callable[[], Hashable],
        embed: Callable[[str], NDArray[np.float32]],
        config: QueryCacheConfig,
    ) -> None:
        """
        Args:
            search: in stages; in one where nobody sees the provisional results.
            generation: of what is searched; another one after every change of what a question may find.
            embed: question -> vector [d] of length 1.
        """
        self._search = search
        self._generation = generation
        self._embed = embed
        self._config = config
        self._lock = Lock()
        self._entries: TokenCache[_QuestionKey, _CachedResult] = TokenCache(config.max_tokens)
        self._current_generation: Hashable = None
        self._num_hits = 0

    @property
    def stats(self) -> QueryCacheStats:
        return QueryCacheStats(self._num_hits)

    def search(self, query: str, mode: SearchMode, top_k: int, where: str = "") -> SearchResult:
        """The wrapped search's result, from the cache where that is allowed. Raises what the wrapped search raises."""
        return list(self.search_staged(query, mode, top_k, 1, where))[-1]

    def search_staged(
        self, query: str, mode: SearchMode, top_k: int, num_stages: int, where: str = ""
    ) -> Iterator[SearchResult]:
        """The wrapped search's results; only the last one where it is in the cache. It is kept if the search is not
        left before its end."""
        question = _QuestionKey(" ".join(query.split()), mode, top_k, where.strip())
        if self._config.max_tokens == 0 or question.num_chars > _MAX_CHARS:
            yield from self._search(query, mode, top_k, num_stages, where)
            return
        generation = self._generation()
        self._follow(generation)
        vector = self._embed(query) if self._needs_vector(mode) else None
        found = self._find(question, generation, vector)
        if found is not None:
            yield SearchResult(found.results)  # it cost nothing this time
            return
        for result in self._search(query, mode, top_k, num_stages, where):
            yield result
        self._keep(question, result, generation, vector)

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
            self._num_hits += entry is not None
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

    def _needs_vector(self, mode: SearchMode) -> bool:
        """Searching by words alone embeds nothing, and so finds nothing similar."""
        return self._config.similarity < 1.0 and mode != "sparse"

    def _keep(
        self, question: _QuestionKey, result: SearchResult, generation: Hashable, vector: NDArray[np.float32] | None
    ) -> None:
        """`generation` was read before the search, so a change in between can only end the entry too early. A result of
        a generation that has passed meanwhile is not kept."""
        num_tokens = 1 + question.num_chars // _CHARS_PER_TOKEN
        num_tokens += sum(scored.chunk.num_tokens for scored in result.results)
        with self._lock:
            if generation == self._current_generation:
                self._entries.put(question, _CachedResult(result, generation, vector), num_tokens)

    def drop_stale(self) -> None:
        """Drop results of an older generation: they hold the text of documents that may have been deleted."""
        self._follow(self._generation())

    def _follow(self, generation: Hashable) -> None:
        with self._lock:
            if generation == self._current_generation:
                return
            self._current_generation = generation
            for question in list(self._entries):
                if self._entries.peek(question).generation != generation:
                    self._entries.discard(question)
