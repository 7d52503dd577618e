"""The dense index of a knowledge base with lists on disk: settings, files, other processes, damage, restarts."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig
from stillroom.core.ids import DocumentId
from stillroom.retrieval.index.indexes import Indexes
from stillroom.retrieval.index.tiered_index import TieredIvfPqIndex
from stillroom.retrieval.ranking import Ranking
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from stillroom.retrieval.tiers.hot_lists import ListFigures
from stillroom.retrieval.vector_index import SearchedIndex
from tests.retrieval.index.dense_documents import RAM, TIERED, D, document, run_now, vectors

Open = Callable[..., Indexes]


@pytest.fixture
def corpus(tmp_path: Path) -> Iterator[SqliteCorpus]:
    with contextlib.closing(SqliteCorpus(tmp_path / "corpus.sqlite3")) as found:
        found.commit([document("first", 400, 1)])
        yield found


@pytest.fixture
def opened(tmp_path: Path, corpus: SqliteCorpus) -> Open:
    def open_(config: IndexConfig = TIERED, corpus_: SqliteCorpus = corpus, folder: Path = tmp_path) -> Indexes:
        return Indexes(folder, corpus_, config, D, run_now)

    return open_


@pytest.fixture
def oracle(tmp_path: Path, corpus: SqliteCorpus) -> Callable[[], list[Ranking]]:
    """Return a function that searches an index in RAM; call it after every change of the corpus."""
    folder = tmp_path / "oracle"
    folder.mkdir()
    indexes = Indexes(folder, corpus, RAM, D)
    return lambda: found(indexes)


def has_figures(indexes: Indexes) -> bool:
    return indexes.list_figures is not None


def figures_of(indexes: Indexes) -> ListFigures:
    assert indexes.list_figures is not None
    return indexes.list_figures


def found(indexes: Indexes) -> list[Ranking]:
    return [indexes.search_dense(query, 20) for query in vectors(10, 5)]


def found_in_batches(indexes: Indexes) -> list[Ranking]:
    """`found` by threads that all arrive while the index is busy."""
    with ThreadPoolExecutor(10) as pool, indexes._lock:
        asking = [pool.submit(indexes.search_dense, query, 20) for query in vectors(10, 5)]
        while indexes._batcher.num_waiting < 10:
            threading.Event().wait(0.001)
    return [one.result() for one in asking]


def test_lists_in_a_file_give_the_results_of_ram(
    opened: Open, oracle: Callable[[], list[Ranking]], corpus: SqliteCorpus, tmp_path: Path
) -> None:
    indexes = opened()
    expected = oracle()
    assert found(indexes) == expected and indexes.needs_write()
    indexes.write()
    assert not indexes.needs_write() and (tmp_path / "dense.lists").exists() and not (tmp_path / "dense.npz").exists()
    assert found(indexes) == expected == found(opened())
    corpus.commit([document("second", 30, 2)])
    expected = oracle()
    assert found(indexes) == expected == found(opened()), "with chunks added since the file was written"
    corpus.commit(removed=[DocumentId("first")])
    corpus.commit([document("third", 60, 3)])
    expected = oracle()
    assert found(indexes) == expected
    indexes.write()
    assert found(indexes) == expected == found(opened())
    figures = figures_of(indexes)
    assert figures.list_bytes == 90 * 9 and figures.ram_bytes == figures.list_bytes


def test_last_stage_equals_the_plain_search(opened: Open) -> None:
    indexes = opened()
    indexes.write()
    for query in vectors(10, 6):
        lists = list(indexes.search_dense_staged(query, 10, 2))
        assert len(lists) == 2 and lists[-1] == indexes.search_dense(query, 10)


def test_batched_searches_find_what_single_searches_find(
    opened: Open, oracle: Callable[[], list[Ranking]], corpus: SqliteCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []
    search_batch = TieredIvfPqIndex.search_batch

    def counted(index: TieredIvfPqIndex, queries: NDArray[np.float32], *rest: Any) -> None:
        batches.append(len(queries))
        search_batch(index, queries, *rest)

    monkeypatch.setattr(TieredIvfPqIndex, "search_batch", counted)
    indexes = opened()
    indexes.write()
    assert found_in_batches(indexes) == oracle()
    corpus.commit([document("second", 30, 2)], removed=[DocumentId("nothing")])
    assert found_in_batches(indexes) == oracle(), "with chunks added since the file was written"
    assert batches == [10, 10]


def test_the_setting_can_be_changed_at_any_time(
    opened: Open, oracle: Callable[[], list[Ranking]], corpus: SqliteCorpus, tmp_path: Path
) -> None:
    opened(RAM).write()
    assert (tmp_path / "dense.npz").exists()
    indexes = opened(TIERED)
    assert found(indexes) == oracle() and indexes.needs_write(), "from dense.npz, until the next write"
    indexes.write()
    assert not (tmp_path / "dense.npz").exists()
    corpus.commit([document("second", 30, 2)])
    expected = oracle()
    back = opened(RAM)
    assert found(back) == expected and not has_figures(back)
    back.write()
    assert (tmp_path / "dense.npz").exists() and not (tmp_path / "dense.lists").exists()
    assert found(back) == found(opened(TIERED)) == found(indexes) == expected
    opened(TIERED).write()
    unchanged = opened(RAM)
    assert not unchanged.needs_write(), "a file of lists serves RAM too"


def test_untrained_index_is_stored_in_one_file(tmp_path: Path) -> None:
    corpus = SqliteCorpus(tmp_path / "small.sqlite3")
    corpus.commit([document("small", 20, 1)])
    indexes = Indexes(tmp_path, corpus, TIERED, D, run_now)
    indexes.write()
    assert (tmp_path / "dense.npz").exists() and not indexes.needs_write() and not has_figures(indexes)
    corpus.commit([document("more", 100, 2)])
    assert len(found(indexes)[0]) == 20 and has_figures(indexes)
    indexes.write()
    assert (tmp_path / "dense.lists").exists() and not (tmp_path / "dense.npz").exists()
    corpus.close()


@pytest.mark.parametrize("damage", ["missing", "truncated", "garbage", "foreign", "of the future"])
def test_a_useless_file_is_rebuilt_from_the_corpus(
    opened: Open, oracle: Callable[[], list[Ranking]], corpus: SqliteCorpus, tmp_path: Path, damage: str
) -> None:
    opened().write()
    path = tmp_path / "dense.lists"
    if damage == "missing":
        path.unlink()
    elif damage in ("truncated", "garbage"):
        path.write_bytes(path.read_bytes()[:5000] if damage == "truncated" else b"garbage" * 999)
    else:
        folder = tmp_path / "other"
        folder.mkdir()
        other = corpus if damage == "of the future" else SqliteCorpus(folder / "corpus.sqlite3")
        if damage == "foreign":
            other.commit([document("other", 400, 8)])
        indexes = Indexes(folder, other, TIERED, D, run_now)
        if damage == "of the future":
            dense = indexes.current()[0]
            dense.snapshot().write(path, corpus.corpus_id, corpus.generation + 1)  # type: ignore[attr-defined]
        else:
            indexes.write()
            (folder / "dense.lists").rename(path)
            other.close()
    again = opened()
    assert found(again) == oracle() and again.needs_write()
    again.write()
    assert not opened().needs_write()


def test_damage_found_by_a_search_is_repaired(
    opened: Open, oracle: Callable[[], list[Ranking]], tmp_path: Path
) -> None:
    opened().write()
    path = tmp_path / "dense.lists"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2  # among the vectors
    content[middle - 5000 : middle + 4000] = bytes(9000)
    path.write_bytes(content)

    def found_in_stages(indexes: Indexes) -> list[Ranking]:
        return [list(indexes.search_dense_staged(query, 20, 2))[-1] for query in vectors(10, 5)]

    for search in (found, found_in_stages, found_in_batches):
        indexes = opened()
        assert not indexes.needs_write(), "the damaged part was not read yet"
        assert search(indexes) == oracle()
        assert indexes.needs_write()
    indexes.write()
    assert found(opened()) == oracle()


def test_damage_found_by_a_write_is_repaired(
    opened: Open, oracle: Callable[[], list[Ranking]], corpus: SqliteCorpus, tmp_path: Path
) -> None:
    opened().write()
    path = tmp_path / "dense.lists"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)
    corpus.commit([document("second", 30, 2)])
    opened().write()
    assert not opened().needs_write()
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    assert found(opened()) == found(Indexes(fresh, corpus, RAM, D)), "as rebuilt from the corpus"


def test_reader_switches_to_the_file_of_a_writer(
    opened: Open, oracle: Callable[[], list[Ranking]], corpus: SqliteCorpus
) -> None:
    writer, reader = opened(), opened()
    writer.write()
    assert found(reader) == oracle()
    corpus.commit([document("second", 30, 2)])
    assert found(reader) == oracle()
    dense = reader.current()[0]
    assert dense._rows.recent_entries() and dense._rows._recent.ntotal == 30  # type: ignore[attr-defined]
    writer.write()
    assert found(reader) == oracle()
    assert dense._rows._recent.ntotal == 0, "it is in the file now"  # type: ignore[attr-defined]


def test_between_stages_a_writer_may_replace_the_file(opened: Open, corpus: SqliteCorpus) -> None:
    indexes, other = opened(), opened()
    indexes.write()
    query = vectors(1, 5)[0]
    lists = indexes.search_dense_staged(query, 10, 2)
    next(lists)
    corpus.commit([document("second", 30, 2)])
    other.write()
    assert list(lists)[-1] == other.search_dense(query, 10)


def test_between_stages_a_writer_may_renumber_the_rows(opened: Open, corpus: SqliteCorpus) -> None:
    corpus.commit([document("second", 30, 2)])
    corpus.commit([document("third", 60, 3)])
    writer, reader = opened(), opened()
    writer.write()
    corpus.commit(removed=[DocumentId("second")])
    query = vectors(1, 5)[0]
    expected = reader.search_dense(query, 10)
    lists = reader.search_dense_staged(query, 10, 2)
    next(lists)
    writer.write()
    assert reader.search_dense(query, 10) == expected, "from the new file at the same generation"
    assert list(lists)[-1] == expected


def test_accesses_of_lists_survive_a_restart(opened: Open, tmp_path: Path) -> None:
    indexes = opened()
    indexes.write()
    found(indexes)
    dense = indexes.current()[0]
    heat = dense.heat[1]  # type: ignore[attr-defined]
    assert heat.sum() > 0
    indexes.close()
    indexes.close()
    again = opened().current()[0]
    np.testing.assert_allclose(again.heat[1], heat)  # type: ignore[attr-defined]
    (tmp_path / "list_heat.npz").write_bytes(b"garbage")
    assert opened().current()[0].heat[1].sum() == 0  # type: ignore[attr-defined]


def test_a_goal_is_reached_with_lists_on_disk(opened: Open) -> None:
    goal = [opened(dataclasses.replace(config, refine=20, ann_recall=0.9)) for config in (TIERED, RAM)]
    assert found(goal[0]) == found(goal[1])
    figures = figures_of(goal[0])
    assert 0 < figures.num_probes <= 10 * figures.num_lists, "only user searches count"


def test_lists_enter_ram_in_the_background(tmp_path: Path, corpus: SqliteCorpus) -> None:
    jobs: list[Callable[[], None]] = []
    indexes = Indexes(tmp_path, corpus, TIERED, D, jobs.append)
    indexes.write()
    before = found(indexes)
    figures = figures_of(indexes)
    assert figures.ram_bytes == 0
    for job in jobs:
        job()
    figures = figures_of(indexes)
    assert 0 < figures.ram_bytes <= 1000
    assert found(indexes) == before


def test_nothing_enters_ram_after_closing(tmp_path: Path, corpus: SqliteCorpus) -> None:
    jobs: list[Callable[[], None]] = []
    indexes = Indexes(tmp_path, corpus, TIERED, D, jobs.append)
    found(indexes)
    indexes.close()
    for job in jobs:
        job()
    figures = figures_of(indexes)
    assert figures.ram_bytes == 0


def test_threads_search_while_lists_move_and_documents_come_and_go(tmp_path: Path, corpus: SqliteCorpus) -> None:
    indexes = Indexes(tmp_path, corpus, dataclasses.replace(TIERED, hot_bytes=2000), D)
    indexes.write()
    queries = vectors(300, 7)

    def ask(number: int) -> int:
        total = 0
        for at, query in enumerate(queries[number::3]):
            total += len(indexes.search_dense(query, 5))
            if at % 10 == 0:
                total += len(list(indexes.search_dense_staged(query, 5, 2))[-1])
        return total

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, number) for number in range(3)]
        for step in range(6):
            corpus.commit([document(f"more {step}", 20, step)])
            indexes.write()
            corpus.commit(removed=[DocumentId(f"more {step - 1}")])
        assert all(one.result() == 5 * 110 for one in asking)
    indexes.close()
    assert found(indexes) == found(Indexes(tmp_path, corpus, RAM, D))


def test_sparse_search_does_not_wait_for_a_dense_search(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    indexes = opened()
    indexes.write()
    store = indexes._dense
    began, go_on, current = threading.Event(), threading.Event(), store.current

    def slow() -> SearchedIndex:
        began.set()
        assert go_on.wait(30)
        return current()

    monkeypatch.setattr(store, "current", slow)
    with ThreadPoolExecutor(1) as pool:
        dense = pool.submit(indexes.search_dense, vectors(1, 5)[0], 5)
        assert began.wait(30)
        assert len(indexes.search_sparse("first 7", 3)) == 3 and not dense.done()
        go_on.set()
        assert len(dense.result(30)) == 5


@pytest.mark.parametrize("share", [0.15, 0.5, 0.8])
@pytest.mark.parametrize("search", [found, found_in_batches])
def test_lists_overwritten_in_place_are_not_searched(
    opened: Open,
    oracle: Callable[[], list[Ranking]],
    tmp_path: Path,
    share: float,
    search: Callable[[Indexes], list[Ranking]],
) -> None:
    opened().write()
    indexes = opened(dataclasses.replace(TIERED, hot_bytes=1))
    assert found(indexes) == (expected := oracle()), "everything that these questions need was read and verified"
    path = tmp_path / "dense.lists"
    before = path.stat().st_mtime_ns
    with path.open("r+b") as stream:
        stream.seek(int(share * path.stat().st_size))
        stream.write(b"\x7f" * (path.stat().st_size // 10))
    os.utime(path, ns=(before + 1, before + 1))  # the clock of some file systems is coarse

    assert search(indexes) == expected
