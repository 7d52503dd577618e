"""Dense index in pgvector, in a real server: results of a flat index, filters, removals by other machines."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.core.ids import ChunkId, DocumentId
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.index import pgvector_index
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.index.pgvector_index import PgvectorIndex
from stillroom.retrieval.ranking import Ranking
from stillroom.retrieval.store.postgresql import embedding_table
from stillroom.retrieval.store.postgresql.postgres_corpus import PostgresCorpus
from tests.retrieval.index.test_qdrant_index import D, document, unit, wide
from tests.retrieval.store.postgresql.shared_machines import execute
from tests.retrieval.store.test_any_corpus import open_postgres

pytestmark = pytest.mark.postgres

numbers = itertools.count()


class TwoMachines:
    """Machines that share a knowledge base; `writer` commits, and `reader` hears of it when it is refreshed."""

    def __init__(self, folder: Path, url: str) -> None:
        name = f"kb{next(numbers)}"
        self.writer, self.reader = (
            open_postgres(folder / f"{name}-{machine}", url, name, pgvector=D) for machine in ("one", "other")
        )
        self.vectors: dict[int, NDArray[np.float32]] = {}
        """What the last commit left: the oracle."""
        self.names: dict[str, list[int]] = {}

    def put(self, name: str, ids: list[int], vectors: NDArray[np.float32]) -> None:
        self.remove(name, is_committed=False)
        made = document(name, ids, vectors)
        title = f"version {next(numbers)}"  # chunks of the same id and heading keep their vectors
        chunks = tuple(dataclasses.replace(chunk, title=title) for chunk in made.chunks)
        self.writer.commit([dataclasses.replace(made, chunks=chunks)])
        self.names[name] = ids
        self.vectors |= dict(zip(ids, vectors, strict=True))

    def remove(self, name: str, *, is_committed: bool = True) -> None:
        for chunk_id in self.names.pop(name, []):
            del self.vectors[chunk_id]
        if is_committed:
            self.writer.commit(removed=[DocumentId(name)])

    def index(self, corpus: PostgresCorpus, *, exact: bool = False, ef_search: int = 64) -> PgvectorIndex:
        assert corpus.embedding_table is not None
        return PgvectorIndex(corpus.embedding_table, corpus, D, ef_search, exact=exact)

    def flat(self) -> FlatIndex:
        index = FlatIndex(D)
        if self.vectors:
            index.add(np.array(list(self.vectors)), np.stack(list(self.vectors.values())))
        return index

    def check(self, ks: tuple[int, ...] = (1, 7, 1500), allowed: AllowedIds | None = None, seed: int = 9) -> None:
        """Assert that exact searches of both machines give the ids, order and scores of a flat index."""
        self.reader.refresh()
        flat = self.flat()
        for corpus, query, k in itertools.product((self.writer, self.reader), unit(np.random.default_rng(seed), 3), ks):
            index = self.index(corpus, exact=True)
            assert len(index) == len(flat)
            _assert_same(index.search(query, k, None, allowed), flat.search(query, k, None, allowed))

    def close(self) -> None:
        self.writer.close()
        self.reader.close()


def _assert_same(found: Ranking, expected: Ranking) -> None:
    assert [chunk_id for chunk_id, _ in found] == [chunk_id for chunk_id, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-6)


@pytest.fixture
def with_graph(database: str) -> str:
    """URL of a database that uses the graph for few rows, too."""
    name = database.partition("?")[0].rpartition("/")[2]
    execute(database, f"ALTER DATABASE {name} SET enable_seqscan = off")
    return database


@pytest.fixture
def world(tmp_path: Path, with_graph: str) -> Iterator[TwoMachines]:
    one = TwoMachines(tmp_path, with_graph)
    yield one
    one.close()


def test_exact_search_finds_what_a_flat_index_finds(world: TwoMachines) -> None:
    rng = np.random.default_rng(0)
    ids = wide(rng, 300)
    world.put("a", ids[:200], unit(rng, 200))
    world.put("b", ids[200:], unit(rng, 100))
    world.check()
    world.put("a", ids[:50], unit(rng, 50))  # most are gone, the rest have other vectors
    world.check()
    world.remove("b")
    world.check()


def test_equal_scores_come_in_the_order_of_chunk_id(world: TwoMachines) -> None:
    rng = np.random.default_rng(1)
    world.put("a", wide(rng, 120), np.repeat(unit(rng, 4), 30, axis=0))
    world.check(ks=(1, 4, 29, 31, 64))
    query = unit(rng, 1)[0]
    _assert_same(world.index(world.writer).search(query, 5), world.flat().search(query, 5))


def test_graph_finds_nearly_all_and_is_used(world: TwoMachines) -> None:
    rng = np.random.default_rng(2)
    world.put("a", wide(rng, 500), unit(rng, 500))
    index, flat, queries = world.index(world.writer, ef_search=100), world.flat(), unit(rng, 20)
    found = [{chunk_id for chunk_id, _ in index.search(query, 10)} for query in queries]
    true = [{chunk_id for chunk_id, _ in flat.search(query, 10)} for query in queries]
    assert np.mean([len(one & other) / 10 for one, other in zip(found, true, strict=True)]) > 0.95
    plan = _plan(world.writer, queries[0])
    assert f"Index Scan using embeddings_{world.writer._row.kb}_hnsw" in plan
    assert list(index.search_staged(queries[0], 10, 4)) == [index.search(queries[0], 10)], "one stage"


def _plan(corpus: PostgresCorpus, query: NDArray[np.float32]) -> str:
    """Return the plan of the statement that `nearest` runs."""
    table = corpus._embeddings
    assert table is not None
    statements: list[str] = []
    read = table._database.read

    def noting(statement, parameters, settings=None):  # type: ignore[no-untyped-def]
        statements.append("\n".join(str(row[0]) for row in read(f"EXPLAIN {statement}", parameters, settings)))
        return read(statement, parameters, settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table._database, "read", noting)
        table.nearest(query, 11, 64)
    return statements[-1]


@pytest.mark.parametrize("iterates", [True, False])
def test_removed_chunks_never_come_back_and_leave_no_gap(
    world: TwoMachines, monkeypatch: pytest.MonkeyPatch, iterates: bool
) -> None:
    if not iterates:  # as before pgvector 0.8: rows without a vacuum take the places of candidates
        monkeypatch.setattr(embedding_table, "_FIRST_WITH_ITERATIVE_SCANS", (99,))
    rng = np.random.default_rng(3)
    center = unit(rng, 1)[0]
    near = center + 0.1 * unit(rng, 250)
    near /= np.linalg.norm(near, axis=1, keepdims=True)
    ids = wide(rng, 400)
    world.put("near", ids[:250], near.astype(np.float32))
    world.put("far", ids[250:], unit(rng, 150))
    world.reader.refresh()
    world.remove("near")
    for corpus in (world.writer, world.reader):  # the reader has not heard of the removal
        found = world.index(corpus).search(center, 10)
        assert len(found) == 10
        assert not {chunk_id for chunk_id, _ in found} & set(ids[:250])


def test_chunks_that_a_machine_does_not_know_yet_take_no_place(world: TwoMachines) -> None:
    rng = np.random.default_rng(4)
    old = wide(rng, 30)
    world.put("old", old, unit(rng, 30))
    world.reader.refresh()
    query = unit(rng, 1)[0]
    world.put("new", wide(rng, 100), np.repeat(query[None], 100, axis=0))
    assert {chunk_id for chunk_id, _ in world.index(world.reader).search(query, 20)} < set(old)
    assert len(world.index(world.reader).search(query, 20)) == 20
    world.check()


@pytest.mark.parametrize("share", [0.7, 0.2, 0.03])
def test_filters_allow_only_their_chunks(world: TwoMachines, share: float) -> None:
    rng = np.random.default_rng(5)
    ids = wide(rng, 400)
    world.put("a", ids, unit(rng, 400))
    allowed = AllowedIds(np.sort(rng.choice(ids, int(share * len(ids)), replace=False)))
    world.check((1, 10, 1500), allowed)
    queries, flat, index = unit(rng, 10), world.flat(), world.index(world.writer)
    hits = 0
    for query in queries:
        found = [chunk_id for chunk_id, _ in index.search(query, 10, None, allowed)]
        assert len(found) == 10 and allowed.has(found).all()
        hits += len(set(found) & {chunk_id for chunk_id, _ in flat.search(query, 10, None, allowed)})
    assert hits > 90
    nothing = AllowedIds(np.empty(0, dtype=np.int64))
    assert index.search(queries[0], 10, None, nothing) == []


def test_more_than_2000_dimensions_have_a_graph_of_half_precision(tmp_path: Path, with_graph: str) -> None:
    rng = np.random.default_rng(6)
    vectors = rng.standard_normal((60, 2001)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    corpus = open_postgres(tmp_path, with_graph, "wide", pgvector=2001)
    corpus.commit([document("a", list(range(60)), vectors)])
    assert corpus.embedding_table is not None
    index = PgvectorIndex(corpus.embedding_table, corpus, 2001, 64, exact=False)
    assert index.search(vectors[7], 3)[0][0] == 7
    found = corpus.embedding_table.nearest(vectors[7], 3, 64)
    assert found.ids[0] == 7 and (found.vectors[0] == vectors[7]).all(), "whole vectors come back"
    corpus.close()


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_searches_are_right_after_any_history(tmp_path: Path, with_graph: str, data: st.DataObject) -> None:
    world = TwoMachines(tmp_path, with_graph)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    try:
        for _ in range(data.draw(st.integers(1, 8))):
            name = data.draw(st.sampled_from("abc"))
            match data.draw(st.sampled_from(["put", "remove", "refresh", "rebuild", "search"])):
                case "put":
                    num, base = data.draw(st.integers(1, 8)), "abc".index(name) * 100
                    world.put(name, [base + place for place in range(num)], unit(rng, num))
                case "remove":
                    world.remove(name)
                case "refresh":
                    world.reader.refresh()
                case "rebuild":
                    assert world.writer.embedding_table is not None
                    world.writer.embedding_table.rebuild_index()
                case "search":
                    found = world.index(world.reader).search(unit(rng, 1)[0], 5)
                    assert {chunk_id for chunk_id, _ in found} <= {ChunkId(one) for one in world.vectors}
        world.check(ks=(1, 4, 100))
        ids, vectors = (
            (np.concatenate(one) for one in zip(*world.index(world.writer).in_order(), strict=True))
            if (world.vectors)
            else (np.empty(0), np.empty(0))
        )
        assert {int(one): vector.tobytes() for one, vector in zip(ids, vectors, strict=True)} == {
            one: vector.tobytes() for one, vector in world.vectors.items()
        }
    finally:
        world.close()


def test_rounding_of_the_server_is_below_the_tolerance(world: TwoMachines) -> None:
    rng = np.random.default_rng(7)
    world.put("a", wide(rng, 200), unit(rng, 200))
    query = unit(rng, 1)[0]
    table = world.writer._embeddings
    assert table is not None
    rows = table._database.read(
        f"SELECT chunk_id, -(embedding <#> %s) FROM {table._table} ORDER BY chunk_id",
        (embedding_table._text(query),),
    )
    exact = dict(world.flat().search(query, 200))
    assert max(abs(score - exact[chunk_id]) for chunk_id, score in rows) < pgvector_index._ROUNDING
