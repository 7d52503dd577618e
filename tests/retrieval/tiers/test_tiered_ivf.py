"""Lists divided among tiers: results do not depend on the division, and each query is released on its own."""

from pathlib import Path
from threading import Event
from typing import Any

import faiss as _faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.retrieval.ranking import first_arrays
from stillroom.retrieval.tiers.faiss_lists import accesses, all_entries, without_entries
from stillroom.retrieval.tiers.host_scan import Scored, scan
from stillroom.retrieval.tiers.list_file import ListFile, Origin, write_list_file
from stillroom.retrieval.tiers.partition import Partition, hottest
from stillroom.retrieval.tiers.tiered_ivf import DISK, RAM, TieredLists

faiss: Any = _faiss
NLIST, DIMENSION = 24, 16


def trained(num: int = 3000, seed: int = 0, nbits: int = 5) -> Any:
    """Train on clustered vectors with duplicates, so that there are ties; compiled kernels scan codes of 8 bits."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((40, DIMENSION))
    vectors = centres[rng.integers(40, size=num)] + 0.3 * rng.standard_normal((num, DIMENSION))
    vectors[num // 2 : num // 2 + 200] = vectors[:200]
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    index = faiss.IndexIVFPQ(faiss.IndexFlatIP(DIMENSION), DIMENSION, NLIST, 4, nbits, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add_with_ids(vectors, np.arange(num, dtype=np.int64)[::-1].copy())
    return index


@pytest.fixture(scope="module", params=[5, 8])
def index(request: pytest.FixtureRequest) -> Any:
    return trained(nbits=request.param)


@pytest.fixture(scope="module")
def queries() -> Any:
    rng = np.random.default_rng(1)
    found = rng.standard_normal((16, DIMENSION)).astype(np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def divided(index: Any, hot: Any, file: Path) -> TieredLists:
    ids = np.arange(index.ntotal, dtype=np.int64)
    write_list_file(file, Origin("a corpus", 1, index.ntotal), without_entries(index), all_entries(index), ids)
    return TieredLists(ListFile(file), np.array(hot, dtype=np.int64))


def undivided(index: Any, query: Any, num: int, nprobe: int) -> Scored:
    nearness, lists = index.quantizer.search(query.reshape(1, -1), nprobe)
    return first_arrays(*scan(index, query, num, lists[0], nearness[0]), num)


@settings(max_examples=40, deadline=None)
@given(
    shards=st.lists(st.integers(RAM, DISK), min_size=NLIST, max_size=NLIST),
    nprobe=st.integers(1, NLIST),
    num=st.integers(1, 60),
    batch_size=st.integers(1, 16),
)
def test_results_do_not_depend_on_the_division(  # noqa: PLR0913  what is drawn
    index: Any,
    queries: Any,
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[int],
    nprobe: int,
    num: int,
    batch_size: int,
) -> None:
    file = tmp_path_factory.mktemp("tiered") / "lists.ivf"
    tiered = divided(index, np.flatnonzero(np.array(shards) == RAM), file)
    found: dict[int, Scored] = {}
    tiered.search_batch(queries[:batch_size], num, nprobe, lambda number, scored: found.__setitem__(number, scored))
    tiered.close()
    assert sorted(found) == list(range(batch_size))
    for number, (ids, scores) in found.items():
        expected_ids, expected_scores = undivided(index, queries[number], num, nprobe)
        assert ids.tolist() == expected_ids.tolist()
        assert scores.tobytes() == expected_scores.tobytes()
        alone = tiered.search(queries[number], num, nprobe)
        assert alone[0].tolist() == expected_ids.tolist() and alone[1].tobytes() == expected_scores.tobytes()


@pytest.mark.parametrize("nbits", [5, 8])
def test_batch_returns_only_allowed_rows(queries: Any, tmp_path: Path, nbits: int) -> None:
    index = trained(nbits=nbits)
    bits = np.packbits(np.random.default_rng(2).random(index.ntotal) < 0.2, bitorder="little")
    allowed = faiss.IDSelectorBitmap(len(bits), faiss.swig_ptr(bits))
    tiered = divided(index, range(0, NLIST, 2), tmp_path / "lists.ivf")
    nearness, probed = tiered.probe(queries, 12)
    found: dict[int, Scored] = {}
    for one in tiered.start_batch(queries, 30, probed, nearness, lambda *scored: found.update([scored]), allowed):
        one.result()
    for number, query in enumerate(queries):
        ids, scores = first_arrays(*scan(index, query, 30, probed[number], nearness[number], allowed), 30)
        own = first_arrays(*found[number], 30)
        assert own[0].tolist() == ids.tolist() and own[1].tobytes() == scores.tobytes()
    tiered.close()


def test_more_equal_codes_than_a_batch_has_room_for(queries: Any, tmp_path: Path) -> None:
    index = trained(nbits=8)
    same = np.repeat(queries[:1], 3000, axis=0)
    index.add_with_ids(same, np.arange(3000, 6000, dtype=np.int64))
    tiered = divided(index, [0], tmp_path / "lists.ivf")
    found: dict[int, Scored] = {}
    tiered.search_batch(queries[:2], 5, NLIST, lambda number, scored: found.__setitem__(number, scored))
    for number in range(2):
        ids, scores = undivided(index, queries[number], 5, NLIST)
        assert found[number][0].tolist() == ids.tolist() and found[number][1].tobytes() == scores.tobytes()
    tiered.close()


@pytest.mark.parametrize("value", [0.0, 1e30])
def test_unusual_queries_are_searched_as_by_faiss(index: Any, queries: Any, tmp_path: Path, value: float) -> None:
    tiered = divided(index, [0, 1], tmp_path / "lists.ivf")
    asked = np.stack([queries[0], np.full(DIMENSION, value, dtype=np.float32)])
    found: dict[int, Scored] = {}
    tiered.search_batch(asked, 5, 3, lambda number, scored: found.__setitem__(number, scored))
    ids, scores = undivided(index, queries[0], 5, 3)
    assert found[0][0].tolist() == ids.tolist() and found[0][1].tobytes() == scores.tobytes()
    alone = tiered.search(asked[1], 5, 3)
    assert found[1][0].tolist() == alone[0].tolist()
    tiered.close()


@settings(max_examples=20, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.sets(st.integers(0, NLIST - 1)), st.sets(st.integers(0, NLIST - 1))), min_size=1, max_size=5
    )
)
def test_exchange_changes_no_result_and_accounts_for_bytes(
    index: Any, queries: Any, tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[set[int], set[int]]]
) -> None:
    tiered = divided(index, [0, 1, 2], tmp_path_factory.mktemp("tiered") / "lists.ivf")
    held = {0, 1, 2}
    for out, into in moves:
        tiered.exchange(out, into)
        held = (held - out) | into
        assert set(np.flatnonzero(tiered.is_in_ram).tolist()) == held
        assert tiered.ram_bytes == sum(index.invlists.list_size(number) * (index.code_size + 8) for number in held)
        for query in queries[:4]:
            ids, scores = undivided(index, query, 20, 10)
            found = tiered.search(query, 20, 10)
            assert found[0].tolist() == ids.tolist() and found[1].tobytes() == scores.tobytes()


def test_running_search_keeps_the_lists_that_it_began_with(index: Any, queries: Any, tmp_path: Path) -> None:
    """The lists leave RAM during the search."""
    tiered = divided(index, range(NLIST), tmp_path / "lists.ivf")
    ram = tiered._ram.index
    before = undivided(index, queries[0], 20, NLIST)
    tiered.exchange(range(NLIST), ())
    assert tiered.ram_bytes == 0
    nearness, probed = tiered.probe(queries[:1], NLIST)
    late = first_arrays(*scan(ram, queries[0], 20, probed[0], nearness[0]), 20)
    assert late[0].tolist() == before[0].tolist()


def test_dropped_pages_are_read_again(index: Any, queries: Any, tmp_path: Path) -> None:
    tiered = divided(index, [1], tmp_path / "lists.ivf")
    before = tiered.search(queries[0], 20, NLIST)
    tiered.drop_pages()
    again = tiered.search(queries[0], 20, NLIST)
    assert again[0].tolist() == before[0].tolist() and again[1].tobytes() == before[1].tobytes()


class GatedShard:
    """A shard that waits for permission to answer."""

    def __init__(self, shard: Any) -> None:
        self._shard = shard
        self.may_answer = Event()

    def search_preassigned_c(self, *arguments: Any) -> None:
        assert self.may_answer.wait(10)
        self._shard.search_preassigned_c(*arguments)


def test_a_query_without_slow_lists_does_not_wait_for_the_others(index: Any, queries: Any, tmp_path: Path) -> None:
    nprobe = 4
    probed = index.quantizer.search(queries, nprobe)[1]
    tiered = divided(index, probed[3], tmp_path / "lists.ivf")
    gate = GatedShard(tiered._disk)
    tiered._disk = gate
    released: list[int] = []

    def on_found(number: int, _: Scored) -> None:
        released.append(number)
        if number == 3:
            gate.may_answer.set()  # nobody else would, if it waited

    tiered.search_batch(queries, 10, nprobe, on_found)
    assert sorted(released) == list(range(len(queries)))
    tiered.close()


def test_shard_scans_the_lists_that_it_holds() -> None:
    partition = Partition(np.array([0, 1, 0, 1]), 2)
    lists, nearness = np.array([[3, 0, 2], [1, 3, -1]]), np.array([[9, 8, 7], [6, 5, 0]], dtype=np.float32)
    fast, near = partition.probes(0, lists, nearness)
    assert fast.tolist() == [[0, 2], [-1, -1]] and near[0].tolist() == [8, 7]
    slow, near = partition.probes(1, lists, nearness)
    assert slow.tolist() == [[3, -1], [1, 3]] and near[1].tolist() == [6, 5]
    assert partition.num_in(lists).tolist() == [[2, 1], [0, 2]]


def test_the_hottest_lists_by_hand() -> None:
    counts = np.array([1.0, 5.0, 0.0, 4.0])
    assert [hottest(counts, share).tolist() for share in (0.0, 0.5, 0.51, 0.9, 1.0)] == [
        [],
        [1],
        [1, 3],
        [1, 3],
        [1, 3, 0],
    ]
    assert hottest(np.zeros(3), 0.5).tolist() == []


def test_accesses_are_counted(index: Any, queries: Any) -> None:
    counts = accesses(index, queries, 3)
    assert counts.sum() == 3 * len(queries) and len(counts) == NLIST
