"""Hybrid search: embed the question, search both indexes, fuse, fetch the text; and the chunks that a filter allows."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import SearchConfig, SearchMode
from stillroom.core.clock import Clock
from stillroom.core.document import ScoredChunk, SearchResult
from stillroom.core.ids import ChunkId
from stillroom.errors import FilterError, UsageError
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.filters.language import Filter, fields_of, parse_filter
from stillroom.retrieval.filters.sql import BUILT_IN, condition_of
from stillroom.retrieval.fusion import convex, minmax, rrf
from stillroom.retrieval.index.indexes import Indexes
from stillroom.retrieval.ranking import Ranking
from stillroom.retrieval.reranker import Reranker, by_score, is_settled
from stillroom.retrieval.selection import is_bare, select
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.vector_index import NUM_STAGES

_Sides = Mapping[str, Mapping[ChunkId, float]]
"""Scores by side: `dense`, `sparse`."""

_MODES = ("hybrid", "dense", "sparse")

MAX_KEPT = 8_000_000
"""Most ids in the cache of filters: 64 MB."""
_MAX_FIELDS = 1000
"""Most field names read; with more, unknown fields are not reported."""
_MAX_SHOWN, _MAX_NAME = 10, 100


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates of one question from both indexes, before fusion."""

    dense: Ranking
    sparse: Ranking
    cosines: dict[ChunkId, float]
    """Cosine of every candidate of either side."""
    bm25: dict[ChunkId, float]
    """BM25 score of the same candidates."""
    num_query_tokens: int


class _EmbeddedQuestion:
    """A question, embedded when its vector is first needed."""

    def __init__(self, text: str, embedder: Embedder, clock: Clock) -> None:
        self.text = text
        self.embed_seconds = 0.0
        self._embedder = embedder
        self._clock = clock

    @cached_property
    def vector(self) -> NDArray[np.float32]:
        """[d], of length 1."""
        began = self._clock.monotonic()
        vector = self._embedder.embed_query(self.text)
        self.embed_seconds = self._clock.monotonic() - began
        return vector


class FilteredChunks:
    """Finds the chunks that a filter allows: once per filter and generation of the corpus. Thread-safe."""

    def __init__(self, corpus: Corpus) -> None:
        self.hides_folders = False
        """Whether filters must not reveal folders of this machine; see `condition_of`. Set before the first use."""
        self._corpus = corpus
        self._lock = Lock()
        self._kept: OrderedDict[str, tuple[int, AllowedIds, str]] = OrderedDict()
        """Generation, chunks and error message by filter, least recently used first."""

    def allowed(self, where: str) -> AllowedIds:
        """Return the chunks that a filter allows now.

        Raises:
            FilterError: the filter is malformed, or allows nothing and names a field that no document has.
        """
        allowed, message = self._found(where, parse_filter(where))
        if message:
            raise FilterError(message)
        return allowed

    def _found(self, where: str, parsed: Filter) -> tuple[AllowedIds, str]:
        generation = self._corpus.generation
        with self._lock:
            kept = self._kept.get(where)
            if kept is not None and kept[0] == generation:
                self._kept.move_to_end(where)
                return kept[1:]
        generation, ids = self._corpus.matching(condition_of(parsed, hides_folders=self.hides_folders))
        found, message = AllowedIds(ids), "" if len(ids) else self._unknown_fields_message(parsed)
        with self._lock:
            self._kept[where] = (generation, found, message)
            self._kept.move_to_end(where)
            while len(self._kept) > 1 and sum(1000 + len(one) for _, one, _ in self._kept.values()) > MAX_KEPT:
                self._kept.popitem(last=False)
        return found, message

    def _unknown_fields_message(self, parsed: Filter) -> str:
        """Return an error message that names unknown fields and similar known ones; empty if there are none."""
        known = [*BUILT_IN, *self._corpus.field_names(_MAX_FIELDS)]
        unknown = sorted(fields_of(parsed) - set(known))
        if not unknown or len(known) >= _MAX_FIELDS or not self._corpus.num_chunks:
            return ""
        near = dict.fromkeys(one for name in unknown for one in get_close_matches(name, known, n=3))
        hint = f"did you mean {' or '.join(near)}?" if near else f"known fields are {', '.join(known[:_MAX_SHOWN])}"
        what = "has the field" if len(unknown) == 1 else "has any of the fields"
        shown = ", ".join(repr(name[:_MAX_NAME]) for name in unknown[:_MAX_SHOWN])
        return f"the filter allows no document, and none {what} {shown}; {hint}"


class HybridSearch:
    """Searches one knowledge base. Thread-safe."""

    def __init__(
        self,
        corpus: Corpus,
        indexes: Indexes,
        embedder: Embedder,
        config: SearchConfig,
        clock: Clock,
        reranker: Reranker | None = None,
    ) -> None:
        self._corpus = corpus
        self._indexes = indexes
        self._embedder = embedder
        self._reranker = reranker
        self._config = config
        self._clock = clock
        self._filters = FilteredChunks(corpus)

    def search(
        self, query: str, mode: SearchMode | None = None, top_k: int | None = None, where: str = ""
    ) -> SearchResult:
        """Return the best chunks, best first. None takes the configuration's default.

        Args:
            where: a filter (see `filters.language`); blank allows every chunk.

        Raises:
            UsageError: the query is blank, the mode unknown, top_k less than 1, or the filter malformed.
        """
        return next(self.search_staged(query, mode, top_k, 1, where))

    def hide_folders(self) -> None:
        """Let no filter reveal folders of this machine from now on."""
        self._filters.hides_folders = True

    def allowed(self, where: str) -> AllowedIds:
        """See `FilteredChunks.allowed`."""
        return self._filters.allowed(where)

    def search_staged(
        self,
        query: str,
        mode: SearchMode | None = None,
        top_k: int | None = None,
        num_stages: int = NUM_STAGES,
        where: str = "",
    ) -> Iterator[SearchResult]:
        """Yield a result after each stage of `search`; the last is that of `search`.

        The BM25 result comes before the question is embedded, then each stage of the dense side is fused with it. With
        a reranker, the last fused list is provisional too, and the reranked one final. Each result has the cost of the
        search so far. Raises as `search`, with the first result.

        Args:
            num_stages: most results; 1 yields the last only.
        """
        mode = mode or self._config.mode
        top_k = self._config.top_k if top_k is None else top_k
        _check(query, mode, top_k)
        began = self._clock.monotonic()
        allowed = self._filters.allowed(where) if where.strip() else None
        if self._corpus.num_chunks == 0 or (allowed is not None and not len(allowed)):
            yield SearchResult(())
            return
        question = _EmbeddedQuestion(query, self._embedder, self._clock)
        num_reranked = 0 if self._reranker is None else self._config.rerank_candidates
        num = max(self._config.num_candidates, top_k, num_reranked)
        num_lists = num_stages if self._reranker is None else max(1, num_stages - 1)
        lists = self._lists(question, mode, num, num_lists, allowed)
        seconds = self._clock.monotonic() - began
        result, last = SearchResult(()), None
        while True:
            began = self._clock.monotonic()
            found = next(lists, None)
            if found is None:
                break
            last = found
            results = self._fetch(*found, top_k)
            seconds += self._clock.monotonic() - began
            result = SearchResult(results, question.embed_seconds, seconds - question.embed_seconds)
            if self._reranker is None or num_stages > 1:
                yield result
        if self._reranker is not None and last is not None:
            yield self._reranked(self._reranker, query, last, result, top_k)

    def candidates(self, query: str, num_candidates: int) -> Candidates:
        """Return the input of fusion rules, so that rules can be compared."""
        vector = self._embedder.embed_query(query)
        dense = self._indexes.search_dense(vector, num_candidates)
        sparse = self._indexes.search_sparse(query, num_candidates)
        cosines, bm25 = self._indexes.complete(vector, query, dense, sparse)
        return Candidates(dense, sparse, cosines, bm25, self._embedder.count_tokens(query))

    def _lists(
        self,
        question: _EmbeddedQuestion,
        mode: SearchMode,
        num_candidates: int,
        num_stages: int,
        allowed: AllowedIds | None,
    ) -> Iterator[tuple[Ranking, _Sides]]:
        """Yield the ranking after each stage, with the scores of both sides."""
        sparse = self._indexes.search_sparse(question.text, num_candidates, allowed) if mode != "dense" else []
        if mode == "sparse" or (sparse and num_stages > 1):
            yield sparse, {"sparse": dict(sparse)}
            num_stages -= 1
        if mode != "sparse":
            for dense in self._indexes.search_dense_staged(question.vector, num_candidates, num_stages, allowed):
                yield (dense, {"dense": dict(dense)}) if mode == "dense" else self._fused(question, dense, sparse)

    def _fused(self, question: _EmbeddedQuestion, dense: Ranking, sparse: Ranking) -> tuple[Ranking, _Sides]:
        sides = {"dense": dict(dense), "sparse": dict(sparse)}
        if self._config.fusion == "minmax":
            return minmax(dense, sparse, self._embedder.count_tokens(question.text)), sides
        if self._config.fusion == "rrf":
            return rrf((dense, sparse), self._config.rank_constant), sides
        cosines, bm25 = self._indexes.complete(question.vector, question.text, dense, sparse)
        return convex(cosines, bm25), {"dense": cosines, "sparse": bm25}

    def _reranked(
        self, reranker: Reranker, query: str, found: tuple[Ranking, _Sides], fused: SearchResult, top_k: int
    ) -> SearchResult:
        """Order the first candidates by the reranker's score; those that it did not read follow in fused order.

        Args:
            found: the fused ranking and its scores.
            fused: the result of the search without the reranker.
        """
        reranker.load()  # not counted, as in the budget
        began = self._clock.monotonic()
        config = self._config
        candidates = self._fetch(*found, max(config.rerank_candidates, top_k))
        scores = reranker.score(
            query,
            [scored.chunk.indexed_text for scored in candidates if not is_bare(scored.chunk)],
            config.rerank_budget_s,
            lambda scores: is_settled(scores, top_k, config.rerank_patience),
        )
        read = [
            replace(candidates[at], score=scores[at], scores={**candidates[at].scores, "reranker": scores[at]})
            for at in by_score(scores)
        ]
        results = (*read, *candidates[len(scores) :])[:top_k]
        seconds = self._clock.monotonic() - began
        return replace(fused, results=results, rerank_seconds=seconds, num_reranked=len(scores))

    def _fetch(self, fused: Ranking, sides: _Sides, num: int) -> tuple[ScoredChunk, ...]:
        """Return the first chunks that still exist (another process may have removed some since the search), as
        `selection.select` orders them."""
        return tuple(
            ScoredChunk(
                one.chunk,
                one.score,
                {name: side[one.chunk.chunk_id] for name, side in sides.items() if one.chunk.chunk_id in side},
                tuple(one.copies),
            )
            for one in select(fused, self._corpus.chunks, num)
        )


def _check(query: str, mode: str, top_k: int) -> None:
    if not query.strip():
        raise UsageError("the query is empty; enter a question")
    if mode not in _MODES:
        raise UsageError(f"unknown search mode {mode!r}; use one of {', '.join(_MODES)}")
    if top_k < 1:
        raise UsageError(f"top_k={top_k} is too small; use 1 or more")
