"""The query cache over a search that counts its calls and a corpus that changes when told to."""

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
    """A text that can be referred to weakly."""


class World:
    """A corpus whose every search result names the generation it was made from."""

    def __init__(self) -> None:
        self.generation = 1
        self.searches: list[str] = []

    def search_staged(
        self, query: str, *, mode: SearchMode, top_k: int, num_stages: int, where: str
    ) -> Iterator[SearchResult]:
        self.searches.append(query)
        said = WeakText(f"{query} {mode} {top_k}{where} at {self.generation}")
        chunk = Chunk(ChunkId(1), DocumentId("d"), 0, said, num_tokens=10)
        yield from [SearchResult(())] * (num_stages - 1)
        yield SearchResult((ScoredChunk(chunk, 1.0),), 0.5, 0.5)

    def embed_question(self, question: str) -> NDArray[np.float32]:
        return np.array(VECTORS.get(question, (0.0, -1.0)), dtype=np.float32)


@pytest.fixture
def world() -> World:
    return World()


def make(world: World, **settings: float) -> QueryCache:
    config = QueryCacheConfig(**settings)  # type: ignore[arg-type]
    return QueryCache(world, config)


def text(result: SearchResult) -> str:
    return result.results[0].chunk.text


def test_a_repeated_question_is_not_searched_again(world: World) -> None:
    cache = make(world)
    first = cache.search("big cat", "hybrid", 5)
    again = cache.search("  big \n cat ", "hybrid", 5)
    assert first.results == again.results and again.search_seconds == again.embed_seconds == 0.0
    assert world.searches == ["big cat"]
    assert cache.stats.num_hits == 1


def test_of_a_search_in_stages_the_last_result_is_kept(world: World) -> None:
    cache = make(world)
    next(cache.search_staged("big cat", "hybrid", 5, 3))
    first = list(cache.search_staged("big cat", "hybrid", 5, 3))
    assert [len(result.results) for result in first] == [0, 0, 1]
    assert world.searches == ["big cat"] * 2, "one that was left early keeps nothing"
    assert [result.results for result in cache.search_staged("big cat", "hybrid", 5, 3)] == [first[-1].results]
    assert cache.search("big cat", "hybrid", 5).results == first[-1].results and len(world.searches) == 2
    off = make(world, max_tokens=0)
    assert len(list(off.search_staged("big cat", "hybrid", 5, 3))) == 3


def test_mode_and_depth_are_part_of_the_question(world: World) -> None:
    cache = make(world)
    assert text(cache.search("big cat", "hybrid", 5)) != text(cache.search("big cat", "dense", 5))
    assert text(cache.search("big cat", "dense", 4)).startswith("big cat dense 4")


def test_any_change_of_the_corpus_ends_an_entry(world: World) -> None:
    cache = make(world)
    cache.search("big cat", "hybrid", 5)
    world.generation = 2
    assert text(cache.search("big cat", "hybrid", 5)).endswith("at 2")


def test_results_do_not_outlive_a_change_of_the_corpus(world: World) -> None:
    cache = make(world)
    kept = [weakref.ref(cache.search(query, "hybrid", 5).results[0].chunk.text) for query in ("big cat", "tax law")]
    assert all(text() is not None for text in kept)
    world.generation = 2
    cache.drop_stale()
    gc.collect()
    assert [text() for text in kept] == [None, None]


def test_a_filter_is_part_of_the_question(world: World) -> None:
    cache = make(world, similarity=0.9)
    assert text(cache.search("big cat", "hybrid", 5)) == "big cat hybrid 5 at 1"
    assert text(cache.search("big cat", "hybrid", 5, " a=1")) == "big cat hybrid 5 a=1 at 1"
    assert text(cache.search("large cat", "hybrid", 5, " a=2")) == "large cat hybrid 5 a=2 at 1"
    cache.search("big cat", "hybrid", 5, "a=1 ")
    assert world.searches == ["big cat", "big cat", "large cat"]


def test_a_change_during_the_search_is_not_missed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(world)
    inner = world.search_staged

    def search_while_adding(query: str, **options: Any) -> Iterator[SearchResult]:
        yield from inner(query, **options)
        world.generation += 1

    monkeypatch.setattr(world, "search_staged", search_while_adding)
    cache.search("big cat", "hybrid", 5)
    assert cache.search("big cat", "hybrid", 5).results[0].chunk.text.endswith("at 2")


def test_the_token_budget_holds_and_zero_switches_it_off(world: World) -> None:
    small = make(world, max_tokens=25)  # an entry costs 11, and a token for each four letters asked
    for name in "abc":
        small.search(name, "hybrid", 5)
    small.search("a", "hybrid", 5)
    assert world.searches == ["a", "b", "c", "a"], "a was evicted for c"
    small.search("b" * 60, "hybrid", 5)
    small.search("b" * 60, "hybrid", 5)
    assert world.searches[4:] == ["b" * 60] * 2, "it costs 26"
    off = make(world, max_tokens=0)
    off.search("x", "hybrid", 5)
    off.search("x", "hybrid", 5)
    assert world.searches[-2:] == ["x", "x"]


def test_long_questions_are_not_cached(world: World) -> None:
    cache = make(world)
    for query, where in (("word " * 2000, ""), ("word", "a = 1 or " * 1000)):
        for _ in range(2):
            cache.search(query, "hybrid", 5, where)
    assert len(world.searches) == 4


def test_near_identical_questions_share_a_result_only_when_asked_to(world: World) -> None:
    exact = make(world)
    exact.search("big cat", "hybrid", 5)
    assert text(exact.search("large cat", "hybrid", 5)).startswith("large cat")
    near = make(world, similarity=0.95)
    near.search("big cat", "hybrid", 5)
    assert text(near.search("large cat", "hybrid", 5)).startswith("big cat")
    assert text(near.search("tax law", "hybrid", 5)).startswith("tax law")
    assert text(near.search("large cat", "dense", 5)).startswith("large cat"), "another mode is another question"
    world.generation = 2
    assert text(near.search("large cat", "hybrid", 5)).startswith("large cat"), "the similar entry is stale"


def test_what_was_found_before_the_words_had_followed_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = write_knowledge(tmp_path / "docs")
    with Stillroom.open(tmp_path / "kb") as stillroom:
        stillroom.add(docs)
        write = stillroom._kb._indexes._write_sparse
        during: list[int] = []

        def search_and_write() -> None:
            during.append(len(stillroom.search("Wunwick bells", mode="sparse", top_k=9).results))
            write()

        monkeypatch.setattr(stillroom._kb._indexes, "_write_sparse", search_and_write)
        (docs / "bells.txt").write_text("The bells rang .\n", encoding="utf-8")
        stillroom.add(docs)
        found = stillroom.search("Wunwick bells", mode="sparse", top_k=9).results
        assert during[-1] == 1 and [one.chunk.text for one in found if "bells" in one.chunk.text]
