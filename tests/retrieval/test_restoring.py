"""Restoring a backup: indexes of undone commits are rebuilt, whatever the number of commits since."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stillroom.config.settings import IndexConfig, QdrantConfig
from stillroom.core.ids import DocumentId
from stillroom.retrieval.index.indexes import Indexes
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from tests.retrieval.index.dense_documents import TIERED, D, document, run_now

KINDS = {"flat": IndexConfig(kind="flat"), "tiered": TIERED, "qdrant": IndexConfig(kind="qdrant")}


class Place:
    """A corpus and its indexes, opened again for each step."""

    def __init__(self, folder: Path, config: IndexConfig) -> None:
        self._folder, self._config = folder, config
        self._corpus_path = folder / "corpus.sqlite3"
        self._num_chunks = 100 if config.has_tiers else 5

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[SqliteCorpus, Indexes]]:
        with contextlib.closing(SqliteCorpus(self._corpus_path)) as corpus:
            indexes = Indexes(self._folder, corpus, self._config, D, run_now, QdrantConfig(url="embedded"))
            with contextlib.closing(indexes):
                yield corpus, indexes

    def add(self, *names: str, is_killed: bool = False) -> None:
        """Commit each document, then stop as if killed before the indexes are written."""
        with self.opened() as (corpus, indexes):
            for number, name in enumerate(names):
                corpus.commit([document(name, self._num_chunks, number)])
            if not is_killed:
                indexes.write()

    def back_up(self, name: str) -> None:
        shutil.copy(self._corpus_path, self._folder / name)

    def restore(self, name: str) -> None:
        shutil.copy(self._folder / name, self._corpus_path)

    def check(self) -> None:
        """Check that the indexes match the corpus, before and after they are written."""
        with self.opened() as (corpus, indexes):
            expected = sorted(corpus.changes_since(0).added)
            for _ in range(2):
                dense, _sparse = indexes.current()
                assert np.sort(np.concatenate([ids for ids, _ in dense.in_order()])).tolist() == expected
                indexes.write()
                assert not indexes.needs_write()
            assert np.sort(indexes.current()[1].ids()).tolist() == expected


@pytest.fixture(params=KINDS)
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    return Place(tmp_path, KINDS[request.param])


@pytest.mark.parametrize("num_since", [1, 3])
def test_killed_add_after_restoring_keeps_no_index_of_undone_commits(place: Place, num_since: int) -> None:
    place.add("first")
    place.back_up("backup")
    place.add("second", "third")
    place.restore("backup")
    place.add(*[f"other {number}" for number in range(num_since)], is_killed=True)
    place.check()


def test_indexes_of_an_undone_history_are_rebuilt(place: Place) -> None:
    place.add("first")
    place.back_up("early")
    place.add("second", "third", "fourth")
    place.back_up("late")
    place.restore("early")
    place.add("other")
    place.restore("late")
    place.check()


def test_indexes_made_before_commit_ids_are_still_valid(place: Place, tmp_path: Path) -> None:
    with place.opened() as (corpus, indexes):
        corpus.commit([document("first", 5, 1)])
        with corpus.writing() as connection:
            connection.execute("DELETE FROM commits")
        indexes.write()
    with place.opened() as (corpus, indexes):
        assert (corpus.commit_id(0), corpus.commit_id(1), corpus.commit_id(2)) == ("", "", None)
        assert not indexes.needs_write()
        corpus.commit(removed=[DocumentId("first")])
        assert len(corpus.commit_id(2) or "") == 32
