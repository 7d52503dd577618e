"""The query cache, on a corpus that counts searches and changes its generation on demand."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stillroom.config.settings import QueryCacheConfig, SearchMode
from stillroom.core.document import Chunk, ScoredChunk, SearchResult
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.rag.query_cache import QueryCache
from stillroom.rag.stillroom import Stillroom
from tests.server.knowledge import write_knowledge

VECTORS = {"big cat": (1.0, 0.0), "large cat": (0.96, 0.28), "tax law": (0.0, 1.0)}


class WeakText(str):
    """A text that supports weak references."""


class CountingCorpus:
    """A corpus whose search results name the generation that they are from."""

    def __init__(self) -> None:
        self.generation = 1
        self.searches: list[str] = []

    def search_staged(
        self, query: str, *, mode: SearchMode, top_k: int, num_stages: int, where: str
    ) -> Iterator[SearchResult]:
        self.searches.append(query)
        found_text = WeakText(f"{query} {mode} {top_k}{where} at {self.generation}")
        chunk = Chunk(ChunkId(1), DocumentId("d"), 0, found_text, num_tokens=10)
        yield from [SearchResult(())] * (num_stages - 1)
        yield SearchResult((ScoredChunk(chunk, 1.0),), 0.5, 0.5)

    def embed_question(self, question: str) -> NDArray[np.float32]:
        return np.array(VECTORS.get(question, (0.0, -1.0)), dtype=np.float32)


@pytest.fixture
def corpus() -> CountingCorpus:
    return CountingCorpus()


def make(corpus: CountingCorpus, **settings: float) -> QueryCache:
    config = QueryCacheConfig(**settings)  # type: ignore[arg-type]
    return QueryCache(corpus, config)


def text(result: SearchResult) -> str:
    return result.results[0].chunk.text


def test_repeated_question_is_not_searched_again(corpus: CountingCorpus) -> None:
    cache = make(corpus)
    first = cache.search("big cat", "hybrid", 5)
    again = cache.search("  big \n cat ", "hybrid", 5)
    assert first.results == again.results and again.search_seconds == again.embed_seconds == 0.0
    assert corpus.searches == ["big cat"]
    assert cache.num_hits == 1


def test_final_result_of_a_staged_search_is_cached(corpus: CountingCorpus) -> None:
    cache = make(corpus)
    next(cache.search_staged("big cat", "hybrid", 5, 3))
    first = list(cache.search_staged("big cat", "hybrid", 5, 3))
    assert [len(result.results) for result in first] == [0, 0, 1]
    assert corpus.searches == ["big cat"] * 2, "a search that is not read to its end caches nothing"
    assert [result.results for result in cache.search_staged("big cat", "hybrid", 5, 3)] == [first[-1].results]
    assert cache.search("big cat", "hybrid", 5).results == first[-1].results and len(corpus.searches) == 2
    off = make(corpus, max_tokens=0)
    assert len(list(off.search_staged("big cat", "hybrid", 5, 3))) == 3


def test_mode_and_top_k_are_part_of_the_key(corpus: CountingCorpus) -> None:
    cache = make(corpus)
    assert text(cache.search("big cat", "hybrid", 5)) != text(cache.search("big cat", "dense", 5))
    assert text(cache.search("big cat", "dense", 4)).startswith("big cat dense 4")


def test_any_change_of_the_corpus_invalidates_an_entry(corpus: CountingCorpus) -> None:
    cache = make(corpus)
    cache.search("big cat", "hybrid", 5)
    corpus.generation = 2
    assert text(cache.search("big cat", "hybrid", 5)).endswith("at 2")


def test_results_do_not_outlive_a_change_of_the_corpus(corpus: CountingCorpus) -> None:
    cache = make(corpus)
    kept = [weakref.ref(cache.search(query, "hybrid", 5).results[0].chunk.text) for query in ("big cat", "tax law")]
    assert all(text() is not None for text in kept)
    corpus.generation = 2
    cache.drop_stale()
    gc.collect()
    assert [text() for text in kept] == [None, None]


def test_filter_is_part_of_the_key(corpus: CountingCorpus) -> None:
    cache = make(corpus, similarity=0.9)
    assert text(cache.search("big cat", "hybrid", 5)) == "big cat hybrid 5 at 1"
    assert text(cache.search("big cat", "hybrid", 5, " a=1")) == "big cat hybrid 5 a=1 at 1"
    assert text(cache.search("large cat", "hybrid", 5, " a=2")) == "large cat hybrid 5 a=2 at 1"
    cache.search("big cat", "hybrid", 5, "a=1 ")
    assert corpus.searches == ["big cat", "big cat", "large cat"]


def test_change_during_the_search_invalidates_its_result(
    corpus: CountingCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make(corpus)
    inner = corpus.search_staged

    def search_while_adding(query: str, **options: Any) -> Iterator[SearchResult]:
        yield from inner(query, **options)
        corpus.generation += 1

    monkeypatch.setattr(corpus, "search_staged", search_while_adding)
    cache.search("big cat", "hybrid", 5)
    assert cache.search("big cat", "hybrid", 5).results[0].chunk.text.endswith("at 2")


def test_token_budget_holds_and_zero_disables_the_cache(corpus: CountingCorpus) -> None:
    small = make(corpus, max_tokens=25)  # an entry costs 11, and a token for each four letters of the question
    for name in "abc":
        small.search(name, "hybrid", 5)
    small.search("a", "hybrid", 5)
    assert corpus.searches == ["a", "b", "c", "a"], "a was evicted for c"
    small.search("b" * 60, "hybrid", 5)
    small.search("b" * 60, "hybrid", 5)
    assert corpus.searches[4:] == ["b" * 60] * 2, "it costs 26"
    off = make(corpus, max_tokens=0)
    off.search("x", "hybrid", 5)
    off.search("x", "hybrid", 5)
    assert corpus.searches[-2:] == ["x", "x"]


def test_long_questions_are_not_cached(corpus: CountingCorpus) -> None:
    cache = make(corpus)
    for query, where in (("word " * 2000, ""), ("word", "a = 1 or " * 1000)):
        for _ in range(2):
            cache.search(query, "hybrid", 5, where)
    assert len(corpus.searches) == 4


def test_similar_questions_share_a_result_only_if_configured(corpus: CountingCorpus) -> None:
    exact = make(corpus)
    exact.search("big cat", "hybrid", 5)
    assert text(exact.search("large cat", "hybrid", 5)).startswith("large cat")
    near = make(corpus, similarity=0.95)
    near.search("big cat", "hybrid", 5)
    assert text(near.search("large cat", "hybrid", 5)).startswith("big cat")
    assert text(near.search("tax law", "hybrid", 5)).startswith("tax law")
    assert text(near.search("large cat", "dense", 5)).startswith("large cat"), "another mode is another question"
    corpus.generation = 2
    assert text(near.search("large cat", "hybrid", 5)).startswith("large cat"), "the similar entry is stale"


def test_result_found_before_the_postings_were_updated_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = write_knowledge(tmp_path / "docs")
    with Stillroom.open(tmp_path / "kb") as stillroom:
        stillroom.add(docs)
        write = stillroom._kb.indexes._write_sparse
        during: list[int] = []

        def search_and_write() -> None:
            during.append(len(stillroom.search("Wunwick bells", mode="sparse", top_k=9).results))
            write()

        monkeypatch.setattr(stillroom._kb.indexes, "_write_sparse", search_and_write)
        (docs / "bells.txt").write_text("The bells rang .\n", encoding="utf-8")
        stillroom.add(docs)
        found = stillroom.search("Wunwick bells", mode="sparse", top_k=9).results
        assert during[-1] == 1 and [one.chunk.text for one in found if "bells" in one.chunk.text]
