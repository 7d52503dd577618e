"""Search results of questions that were asked before: a repeated question skips retrieval.

An entry is good for exactly the corpus it was made from: any change of a document ends it, one that it cites or one
that might have outranked it. Entries are kept under a token budget (llmds 3.1); a Count-Min Sketch (llmds 2.4) knows
the hot questions, and those are searched again in the background as soon as the corpus has changed, before anybody asks
(llmds Hypothesis 2). Thread-safe.
"""

import logging
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import QueryCacheConfig, SearchMode
from stillroom.core.count_min import CountMinSketch
from stillroom.core.document import SearchResult
from stillroom.core.token_cache import TokenCache
from stillroom.errors import StillroomError

logger = logging.getLogger(__name__)

_HALVE_EVERY = 10_000
"""Questions after which the sketch forgets half: what was hot last week need not be kept warm."""

_MAX_CHARS = 8192
"""Of a question with its filter; a longer one is searched each time. Who asks that much seldom asks it again."""
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

    def as_bytes(self) -> bytes:
        return f"{self.mode}\0{self.top_k}\0{self.where}\0{self.text}".encode()


@dataclass(frozen=True, slots=True)
class _CachedResult:
    result: SearchResult
    generation: Hashable
    vector: NDArray[np.float32] | None
    """Embedding [d] of the question; None unless near-identical questions are recognised."""


@dataclass(frozen=True, slots=True)
class QueryCacheStats:
    """Since the cache was made."""

    num_hits: int
    num_refreshed: int
    """Hot questions searched again in the background."""


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
        self._sketch = CountMinSketch(halve_every=_HALVE_EVERY)
        self._hot: dict[_QuestionKey, None] = {}
        """Questions seen at least `hot_after` times, oldest first; at most `max_hot`."""
        self._hot_generation: Hashable = None
        self._num_hits = self._num_refreshed = 0
        self._worker: ThreadPoolExecutor | None = None

    @property
    def stats(self) -> QueryCacheStats:
        return QueryCacheStats(self._num_hits, self._num_refreshed)

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
        self._follow(generation, question)
        vector = self._embed(query) if self._needs_vector(mode) else None
        found = self._find(question, generation, vector)
        if found is not None:
            self._count(question)
            yield SearchResult(found.results)  # it cost nothing this time
            return
        for result in self._search(query, mode, top_k, num_stages, where):
            yield result
        self._keep(question, result, generation, vector)
        self._count(question)

    def close(self) -> None:
        """Wait for a refresh that is under way. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(wait=True, cancel_futures=True)

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
            if generation == self._hot_generation:
                self._entries.put(question, _CachedResult(result, generation, vector), num_tokens)

    # Hot questions

    def refresh_hot(self) -> None:
        """Have the hot questions searched again in the background if the corpus has changed. The next question would
        start it too; who has just changed a document need not wait for one."""
        self._follow(self._generation())

    def _follow(self, generation: Hashable, asked: _QuestionKey | None = None) -> None:
        """If this generation is new, have the hot questions searched again, but for the one that is asked right now."""
        with self._lock:
            stale = [question for question in self._take_stale(generation) if question != asked]
        self._start_refresh(stale, generation)

    def _count(self, question: _QuestionKey) -> None:
        """It was asked once more, and has an answer."""
        with self._lock:
            if self._sketch.add(question.as_bytes()) >= self._config.hot_after:
                self._hot.pop(question, None)
                self._hot[question] = None
                if len(self._hot) > self._config.max_hot:
                    self._hot.pop(next(iter(self._hot)))

    def _take_stale(self, generation: Hashable) -> list[_QuestionKey]:
        """The hot questions if this generation is new to them, once; under the lock. Results of another generation are
        dropped: they hold the text of documents that may be gone."""
        if generation == self._hot_generation:
            return []
        for question in [one for one in self._entries if self._entries.peek(one).generation != generation]:
            self._entries.discard(question)
        is_first = self._hot_generation is None
        self._hot_generation = generation
        return [] if is_first else list(self._hot)

    def _start_refresh(self, stale: list[_QuestionKey], generation: Hashable) -> None:
        if stale:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stillroom-query-cache")
            self._worker.submit(self._refresh, stale, generation)

    def _refresh(self, stale: list[_QuestionKey], generation: Hashable) -> None:
        for question in reversed(stale):  # the most recently asked first
            if self._generation() != generation:
                return  # changed again: another refresh is coming
            with self._lock:
                entry = self._entries.peek(question) if question in self._entries else None
            if entry is not None and entry.generation == generation:
                continue
            try:
                vector = self._embed(question.text) if self._needs_vector(question.mode) else None
                *_, result = self._search(question.text, question.mode, question.top_k, 1, question.where)
                self._keep(question, result, generation, vector)
                self._num_refreshed += 1
            except StillroomError as error:  # of this question alone, perhaps; who asks it again makes it hot again
                logger.warning("a hot question is let go of: %s", error)
                with self._lock:
                    self._hot.pop(question, None)
            except Exception:  # nobody waits for this; whoever asks will see the error
                logger.exception("could not refresh a hot question")
                return
