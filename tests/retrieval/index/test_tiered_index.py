"""Tiered index against the index in RAM: same ids and scores after any history; files; drift."""

import dataclasses
import errno
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig
from stillroom.errors import ConfigError, CorruptKnowledgeBaseError
from stillroom.retrieval.index.ivf_pq import IvfPqIndex
from stillroom.retrieval.index.tiered_index import TieredIvfPqIndex
from stillroom.retrieval.ranking import Ranking
from stillroom.retrieval.tiers.hot_lists import DriftRules, ListFigures
from stillroom.retrieval.tiers.list_file import ListFile
from tests.retrieval.index.dense_documents import run_now

Vectors = NDArray[np.float32]
D = 16
CONFIG = IndexConfig(kind="ivf_pq", nbits=2, num_subquantizers=4, nprobe=3, refine=3, seed=3, hot_bytes=2000)
"""Trains on 39 * 4 = 156 vectors and again at 624."""


def clustered(count: int, seed: int) -> Vectors:
    """Draw unit vectors, some duplicated, so that there are ties."""
    rng = np.random.default_rng(seed)
    vectors = np.random.default_rng(99).standard_normal((12, D))[rng.integers(12, size=count)]
    vectors = vectors + 0.5 * rng.standard_normal((count, D))
    vectors[count // 2 : count // 2 + count // 8] = vectors[: count // 8]
    unit: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return unit


def tiered(folder: Path, config: IndexConfig = CONFIG, rules: DriftRules | None = None) -> TieredIvfPqIndex:
    return TieredIvfPqIndex(D, config, folder, run_now, rules)


def both(folder: Path, count: int, config: IndexConfig = CONFIG) -> tuple[IvfPqIndex, TieredIvfPqIndex]:
    vectors, ids = clustered(count, 1), np.random.default_rng(0).permutation(10 * count)[:count]
    indexes = IvfPqIndex(D, config), tiered(folder, config)
    for index in indexes:
        index.add(ids, vectors)
    return indexes


def assert_same(one: Any, other: Any, queries: Vectors, k: int = 10, effort: int | None = None) -> None:
    assert len(one) == len(other) and one.nlist == other.nlist and one.structure == other.structure
    for query in queries:
        assert other.search(query, k, effort) == one.search(query, k, effort)
    if isinstance(other, TieredIvfPqIndex):
        found: dict[int, Ranking] = {}
        other.search_batch(queries, k, found.__setitem__, effort)
        assert found == {number: one.search(query, k, effort) for number, query in enumerate(queries)}


def figures_of(index: TieredIvfPqIndex) -> ListFigures:
    assert index.figures is not None
    return index.figures


def write_and_use(index: TieredIvfPqIndex, path: Path) -> None:
    index.snapshot().write(path, "a corpus", 1)
    index.use_file(ListFile(path))


# One step of a history: the action and its seed

STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "add again", "exchange", "write", "reopen"]), st.integers(0, 999)),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(start=st.integers(150, 700), steps=STEPS, refine=st.sampled_from([0, 1, 3]), k=st.integers(1, 40))
def test_any_history_finds_what_the_index_in_ram_finds(
    tmp_path_factory: pytest.TempPathFactory, start: int, steps: list[tuple[str, int]], refine: int, k: int
) -> None:
    folder = tmp_path_factory.mktemp("tiers")
    config = dataclasses.replace(CONFIG, refine=refine)
    rules = DriftRules(window=5, half_life=10, num_lists=2, margin=0.0)
    ram, disk = IvfPqIndex(D, config), tiered(folder, config, rules)
    present: list[int] = []
    gone: list[int] = []

    def add(ids: NDArray[np.int64], seed: int) -> None:
        vectors = clustered(len(ids), seed)
        ram.add(ids, vectors)
        disk.add(ids, vectors)
        present.extend(ids.tolist())

    add(np.random.default_rng(start).permutation(100_000)[:start], 7)
    for number, (what, seed) in enumerate(steps):
        rng = np.random.default_rng(seed)
        if what == "add":
            add(200_000 + 1000 * number + np.arange(rng.integers(1, 200)), seed)
        elif what == "add again" and gone:
            again = np.array(sorted(set(gone) - set(present)))[: int(rng.integers(1, 30))]
            add(again, seed)
        elif what == "remove" and present:
            doomed = rng.choice(present, size=min(len(present), int(rng.integers(1, 120))), replace=False).tolist()
            ram.remove([*doomed, 12])
            disk.remove([*doomed, 12])
            present = [one for one in present if one not in {*doomed, 12}]
            gone += doomed
        elif disk.is_trained and what == "exchange":
            tiers = disk._rows.tiers
            tiers.exchange(rng.integers(disk.nlist, size=3), rng.integers(disk.nlist, size=2))
        elif disk.is_trained:
            write_and_use(disk, folder / "dense.lists")
            if what == "reopen":
                disk = tiered(folder, config, rules)
                disk.use_file(ListFile(folder / "dense.lists"))
        queries = clustered(3, seed + 1)
        assert_same(ram, disk, queries, k)
        lists = list(disk.search_staged(queries[0], k, 3, disk.nlist or None))
        assert lists[-1] == ram.search(queries[0], k, ram.nlist or None)
        assert lists == list(ram.search_staged(queries[0], k, 3, ram.nlist or None))
    if disk.is_trained:
        assert disk._rows.tiers.ram_bytes == disk._rows.tiers.list_bytes()[disk._rows.tiers.is_in_ram].sum()


def test_full_vectors_and_cold_lists_are_not_in_ram(tmp_path: Path) -> None:
    _, index = both(tmp_path, 500)
    figures = figures_of(index)
    assert 0 < figures.ram_bytes <= 2000 < figures.list_bytes == 500 * 9  # a byte of codes and 8 of the row
    assert 0 < figures.num_lists_in_ram < figures.num_lists == index.nlist
    assert not list(tmp_path.iterdir()), "files are unnamed"


def test_the_exact_answers_and_the_sample_for_tuning_are_the_same(tmp_path: Path) -> None:
    ram, disk = both(tmp_path, 700)
    doomed = [chunk_id for chunk_id, _ in ram.search(clustered(1, 11)[0], 20)]
    ram.remove(doomed)
    disk.remove(doomed)
    queries = clustered(20, 5)
    np.testing.assert_array_equal(disk.exact(queries, 5), ram.exact(queries, 5))
    one, other = (index.sample(50, np.random.default_rng(1)) for index in (ram, disk))
    np.testing.assert_array_equal(other, one)
    assert disk.effort_range() == ram.effort_range()
    approximate = both(tmp_path, 300, dataclasses.replace(CONFIG, refine=0))[1]
    with pytest.raises(ConfigError, match=r"index\.refine"):
        approximate.exact(queries, 5)


@pytest.mark.parametrize("refine", [0, 3])
def test_conversion_between_ram_and_file_and_back(tmp_path: Path, refine: int) -> None:
    config = dataclasses.replace(CONFIG, refine=refine)
    ram, disk = both(tmp_path, 400, config)
    moved, back = tiered(tmp_path, config), IvfPqIndex(D, config)
    moved.restore(ram.to_arrays())
    disk.remove([1, 2, 3])
    ram.remove([1, 2, 3])
    moved.remove([1, 2, 3])
    back.restore(disk.to_arrays())
    for index in (moved, back):
        assert_same(ram, index, clustered(10, 4))
        more = clustered(300, 6)
        index.add(np.arange(10_000, 10_300), more)
    ram.add(np.arange(10_000, 10_300), clustered(300, 6))
    assert_same(ram, moved, clustered(10, 4))
    assert_same(ram, back, clustered(10, 4))


def test_snapshot_is_not_affected_by_later_changes(tmp_path: Path) -> None:
    ram, disk = both(tmp_path, 400)
    doomed = [chunk_id for chunk_id, _ in ram.search(clustered(1, 3)[0], 5)]
    disk.remove(doomed)
    ram.remove(doomed)
    disk.add(np.arange(9000, 9020), clustered(20, 8))
    ram.add(np.arange(9000, 9020), clustered(20, 8))
    snapshot = disk.snapshot()
    disk.add(np.arange(9100, 9150), clustered(50, 9))
    disk.remove(range(9000, 9010))
    snapshot.write(tmp_path / "dense.lists", "a corpus", 7)
    other = tiered(tmp_path)
    other.use_file(ListFile(tmp_path / "dense.lists"))
    assert_same(ram, other, clustered(20, 5))


def test_replaced_file_stays_readable_while_it_is_mapped(tmp_path: Path) -> None:
    ram, index = both(tmp_path, 400)
    path = tmp_path / "dense.lists"
    write_and_use(index, path)
    reader = tiered(tmp_path)
    reader.use_file(ListFile(path))
    index.remove(range(4000))
    index.snapshot().write(path, "a corpus", 2)
    assert_same(ram, reader, clustered(20, 5))
    path.unlink()
    assert_same(ram, reader, clustered(20, 6))


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    _, index = both(tmp_path, 300)
    path = tmp_path / "dense.lists"
    index.snapshot().write(path, "a corpus", 1)
    content = path.read_bytes()
    for damaged in (b"", b"x", content[:-1], content[1:], content[: len(content) // 2], content[:100] + content[101:]):
        path.write_bytes(damaged)
        with pytest.raises(CorruptKnowledgeBaseError, match="damaged"):
            ListFile(path)
    with pytest.raises(FileNotFoundError):
        ListFile(tmp_path / "nothing")


@settings(max_examples=25, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_served(tmp_path_factory: pytest.TempPathFactory, place: float, bit: int) -> None:
    """A flipped bit is refused on opening or on first use, or is in padding."""
    folder = tmp_path_factory.mktemp("flipped")
    ram, index = both(folder, 200)
    path = folder / "dense.lists"
    index.snapshot().write(path, "a corpus", 1)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    damaged = tiered(folder)
    query = clustered(1, 2)[0]
    try:
        damaged.use_file(ListFile(path))
        found = damaged.search(query, 200, damaged.nlist)
    except (CorruptKnowledgeBaseError, ValueError):
        return
    assert found == ram.search(query, 200, ram.nlist)


def test_an_unfitting_file_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, refine=0)
    _, index = both(tmp_path, 300, config)
    path = tmp_path / "dense.lists"
    index.snapshot().write(path, "a corpus", 1)
    with pytest.raises(ValueError, match="does not fit"):
        tiered(tmp_path).use_file(ListFile(path))  # wants full vectors
    with pytest.raises(ValueError, match="does not fit"):
        TieredIvfPqIndex(8, config, tmp_path, run_now).use_file(ListFile(path))


def test_index_works_in_a_read_only_folder(tmp_path: Path) -> None:
    ram, index = both(tmp_path / "missing", 300)
    index.add(np.arange(9000, 9100), clustered(100, 8))
    ram.add(np.arange(9000, 9100), clustered(100, 8))
    assert_same(ram, index, clustered(10, 5))


def test_full_disk_does_not_shift_rows_of_vectors(tmp_path: Path) -> None:
    ram, index = both(tmp_path, 300)
    for one in (ram, index):
        one.add(np.arange(9000, 9020), clustered(20, 8))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * D * 30, hard))  # no file may grow beyond: half of a write is done
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                index.add(np.arange(9020, 9040), clustered(20, 9))
            assert len(index) == 320
            assert_same(ram, index, clustered(20, 5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for one in (ram, index):
        one.add(np.arange(9020, 9060), clustered(40, 9))
    assert_same(ram, index, clustered(20, 5))
    write_and_use(index, tmp_path / "dense.lists")
    assert_same(ram, index, clustered(20, 5))


def test_full_disk_is_replaced_by_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ram, index = both(tmp_path, 300)
    pwrite, full = os.pwrite, set[int]()

    def failing(descriptor: int, content: bytes, at: int) -> int:
        if descriptor in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, content, at)

    monkeypatch.setattr(os, "pwrite", failing)
    for start in (9000, 9020):
        for one in (ram, index):
            one.add(np.arange(start, start + 20), clustered(20, start))
        assert_same(ram, index, clustered(20, 5))
        assert index._rows._spill is not None
        full.add(index._rows._spill._descriptor)
    assert len(full) == 2, "two files, one after the other"


# Drift


def test_lists_in_ram_follow_the_traffic(tmp_path: Path) -> None:
    rules = DriftRules(window=20, half_life=40, margin=0.02, num_lists=1)
    index = tiered(tmp_path, dataclasses.replace(CONFIG, nlist=12, nprobe=2, hot_bytes=2000), rules)
    index.add(np.arange(700), clustered(700, 1))
    rates = []
    for topic in (3, 8):
        centre = clustered(700, 1)[topic]
        for _ in range(10):
            for query in centre + 0.05 * np.random.default_rng(topic).standard_normal((20, D)).astype(np.float32):
                index.search(query, 5)
            figures = figures_of(index)
            assert figures.ram_bytes <= 2000
            rates.append(figures.hit_rate)
    assert rates[9] > 0.9 and rates[19] > 0.9
    figures = figures_of(index)
    assert figures.num_probes == 2 * 400 and figures.num_exchanged > 0
    assert 0 < figures.num_hits < figures.num_probes


def test_searches_of_the_tuner_are_not_counted(tmp_path: Path) -> None:
    _, index = both(tmp_path, 300)
    with index.uncounted():
        index.search(clustered(1, 2)[0], 5)
    assert figures_of(index).num_probes == 0
    index.search(clustered(1, 2)[0], 5)
    assert figures_of(index).num_probes == 3


def test_accesses_survive_a_new_file_and_a_new_training(tmp_path: Path) -> None:
    _, index = both(tmp_path, 500)
    for query in clustered(50, 3):
        index.search(query, 5)
    assert index.heat is not None
    before = index.heat[1]
    write_and_use(index, tmp_path / "dense.lists")
    np.testing.assert_allclose(index.heat[1], before)
    index.add(np.arange(9000, 9200), clustered(200, 4))  # trains
    assert index.structure == 624 and len(index.heat[1]) == index.nlist
    assert 0 < index.heat[1].sum() <= before.sum() + 1e-9
