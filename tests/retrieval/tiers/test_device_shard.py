"""Lists on a device give faiss' results for every division; on the CPU, and on CUDA if available."""

from pathlib import Path
from typing import Any

import faiss as _faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.errors import ConfigError
from stillroom.ops import pq_scan
from stillroom.retrieval.ranking import first_arrays
from stillroom.retrieval.tiers import device_shard
from stillroom.retrieval.tiers.device_lists import spread
from stillroom.retrieval.tiers.device_shard import DeviceShard
from stillroom.retrieval.tiers.faiss_lists import accesses, all_entries, without_entries
from stillroom.retrieval.tiers.host_scan import Scored, scan
from stillroom.retrieval.tiers.list_file import ListFile, Origin, write_list_file
from stillroom.retrieval.tiers.partition import hottest
from stillroom.retrieval.tiers.tiered_ivf import DISK, FIRST_DEVICE, RAM, TieredLists

faiss: Any = _faiss
NLIST, DIMENSION = 24, 16
NO_LISTS = np.empty(0, dtype=np.int64)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def trained(*, is_residual: bool = True, nbits: int = 8, with_doubles: bool = False) -> Any:
    """Train on clustered vectors; scores are distinct without duplicates."""
    rng = np.random.default_rng(0)
    num = 3000
    centres = rng.standard_normal((40, DIMENSION))
    vectors = centres[rng.integers(40, size=num)] + 0.3 * rng.standard_normal((num, DIMENSION))
    if with_doubles:
        vectors[num // 2 : num // 2 + 400] = vectors[:400]
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    index = faiss.IndexIVFPQ(faiss.IndexFlatIP(DIMENSION), DIMENSION, NLIST, 4, nbits, faiss.METRIC_INNER_PRODUCT)
    index.by_residual = is_residual
    index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1
    index.train(vectors)
    index.add_with_ids(vectors, rng.permutation(num).astype(np.int64))
    return index


@pytest.fixture(scope="module")
def index() -> Any:
    return trained()


@pytest.fixture(scope="module")
def queries() -> NDArray[np.float32]:
    rng = np.random.default_rng(1)
    found = rng.standard_normal((16, DIMENSION)).astype(np.float32)
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True), dtype=np.float32)


def probes(index: Any, queries: Any, nprobe: int) -> tuple[Any, Any]:
    nearness, lists = index.quantizer.search(queries, nprobe)
    return lists, nearness


def divided(index: Any, shard_of: NDArray[np.int64], path: Path, devices: list[str]) -> TieredLists:
    ids = np.arange(index.ntotal, dtype=np.int64)
    write_list_file(path, Origin("a corpus", 1, index.ntotal), without_entries(index), all_entries(index), ids)
    file = ListFile(path)
    held = [np.flatnonzero(shard_of == FIRST_DEVICE + number) for number in range(len(devices))]
    shards = [DeviceShard(file.shell, own, device, file.entries) for own, device in zip(held, devices, strict=True)]
    return TieredLists(file, np.flatnonzero(shard_of == RAM), list(zip(shards, held, strict=True)))


def searched(tiered: TieredLists, queries: Any, num: int, nprobe: int) -> dict[int, Scored]:
    found: dict[int, Scored] = {}
    tiered.search_batch(queries, num, nprobe, lambda number, scored: found.__setitem__(number, scored))
    tiered.close()
    assert sorted(found) == list(range(len(queries)))
    return found


def assert_same(found: Scored, expected: Scored) -> None:
    """Assert equal scores up to rounding, and equal ids except where rounding cannot separate scores."""
    assert found[1] == pytest.approx(expected[1], rel=1e-5, abs=1e-6)
    differing = found[0] != expected[0]
    near = np.abs(expected[1][:, None] - expected[1][None, :]) < 2e-6
    for at in np.flatnonzero(differing):
        assert found[0][at] in expected[0][near[at]]
    assert np.array_equal(found[1], np.sort(found[1])[::-1])


def scan_alone(shard: DeviceShard, query: Any, num: int, probed: Any, nearness: Any) -> tuple[Any, Any]:
    """Scan for one query."""
    (found,) = shard.scan_batch(query[None], num, probed[None], nearness[None])
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_residual", [True, False])
def test_a_shard_of_all_lists_scans_what_faiss_scans(queries: Any, device: str, is_residual: bool) -> None:
    index = trained(is_residual=is_residual)
    shard = DeviceShard(index, np.arange(NLIST), device)
    assert len(shard) == index.ntotal
    lists, nearness = probes(index, queries, 6)
    for num in (1, 10, 5000):
        for at, query in enumerate(queries):
            expected = first_arrays(*scan(index, query, num, lists[at], nearness[at]), num)
            assert_same(first_arrays(*scan_alone(shard, query, num, lists[at], nearness[at]), num), expected)


@settings(max_examples=40, deadline=None)
@given(
    held=st.sets(st.integers(0, NLIST - 1)),
    nprobe=st.integers(1, NLIST),
    num=st.integers(1, 60),
    batch_size=st.integers(1, 16),
    at_once=st.sampled_from([1, 1000, 2**24]),
    dropped=st.integers(0, 2**32 - 1),
)
def test_any_lists_and_any_probes_give_what_faiss_gives(  # noqa: PLR0913  what is drawn
    index: Any, queries: Any, held: set[int], nprobe: int, num: int, batch_size: int, at_once: int, dropped: int
) -> None:
    shard = DeviceShard(index, np.array(sorted(held), dtype=np.int64), "cpu")
    lists, nearness = probes(index, queries[:batch_size], nprobe)
    missing = np.random.default_rng(dropped).random(lists.shape) < 0.3
    lists[missing] = -1
    wanted = np.where(np.isin(lists, list(held)), lists, -1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device_shard, "_SCORED_AT_ONCE", at_once)
        found = shard.scan_batch(queries[:batch_size], num, lists, nearness)
    assert len(found) == batch_size
    for at, part in enumerate(found):
        expected = first_arrays(*scan(index, queries[at], num, wanted[at], nearness[at]), num)
        assert_same(first_arrays(*part, num), expected)
        assert_same(first_arrays(*scan_alone(shard, queries[at], num, lists[at], nearness[at]), num), expected)


@settings(max_examples=30, deadline=None)
@given(
    shards=st.lists(st.integers(RAM, FIRST_DEVICE + 1), min_size=NLIST, max_size=NLIST),
    nprobe=st.integers(1, NLIST),
    num=st.integers(1, 60),
    batch_size=st.integers(1, 16),
)
def test_dividing_among_devices_ram_and_disk_changes_nothing_but_rounding(  # noqa: PLR0913  what is drawn
    index: Any,
    queries: Any,
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[int],
    nprobe: int,
    num: int,
    batch_size: int,
) -> None:
    file = tmp_path_factory.mktemp("tiered") / "lists.ivf"
    tiered = divided(index, np.array(shards), file, ["cpu", "cpu"])
    lists, nearness = probes(index, queries, nprobe)
    for number, scored in searched(tiered, queries[:batch_size], num, nprobe).items():
        query = queries[number]
        assert_same(scored, first_arrays(*scan(index, query, num, lists[number], nearness[number]), num))


@pytest.mark.parametrize("device", DEVICES)
def test_the_hottest_lists_on_devices_the_next_in_ram_the_rest_on_disk(
    index: Any, queries: Any, tmp_path: Path, device: str
) -> None:
    counts = accesses(index, queries, 4)
    sizes = np.array([index.invlists.list_size(number) for number in range(NLIST)])
    shard_of = np.full(NLIST, DISK)
    shard_of[hottest(counts, 0.8)] = RAM
    for device_number, held in enumerate(spread(hottest(counts, 0.5), sizes, [NO_LISTS] * 2, int(sizes.sum()))):
        shard_of[held] = FIRST_DEVICE + device_number
    assert set(shard_of) == {RAM, DISK, FIRST_DEVICE, FIRST_DEVICE + 1}
    tiered = divided(index, shard_of, tmp_path / "lists.ivf", [device, device])
    lists, nearness = probes(index, queries, 4)
    for at, scored in searched(tiered, queries, 10, 4).items():
        expected = first_arrays(*scan(index, queries[at], 10, lists[at], nearness[at]), 10)
        assert_same(scored, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_ties_are_returned_completely_in_the_order_of_id(queries: Any, device: str) -> None:
    index = trained(with_doubles=True)
    shard = DeviceShard(index, np.arange(NLIST), device)
    lists, nearness = probes(index, queries, NLIST)
    num_ties = 0
    for num in (1, 2, 3, 7):
        for at, query in enumerate(queries):
            ids, scores = scan_alone(shard, query, num, lists[at], nearness[at])
            assert len(ids) >= num
            assert (scores[num - 1 :] == scores[num - 1]).all(), "more than were asked for only if they equal the last"
            equal = np.flatnonzero(scores[1:] == scores[:-1])
            assert (ids[equal] < ids[equal + 1]).all()
            num_ties += len(equal)
            everything = scan_alone(shard, query, index.ntotal, lists[at], nearness[at])
            assert everything[0][: len(ids)].tolist() == ids.tolist()
    assert num_ties > 20


def scan_one(query_D: torch.Tensor, centroids_MCS: torch.Tensor, codes_NM: torch.Tensor, offset: float) -> list[float]:
    """Score one list for one query in float64, every code decoded to a vector."""
    scores = []
    for code_M in codes_NM.tolist():
        vector_D = torch.cat([centroids_CS[byte] for centroids_CS, byte in zip(centroids_MCS, code_M, strict=True)])
        scores.append(offset + float(query_D.double() @ vector_D.double()))
    return scores


def test_the_scan_equals_its_slow_twin(index: Any) -> None:
    rng = np.random.default_rng(2)
    generator = torch.Generator().manual_seed(3)
    centroids_MCS = torch.randn(3, pq_scan.CENTROIDS, 5, generator=generator)
    queries_QD = torch.randn(2, 15, generator=generator)
    codes_NM = torch.from_numpy(rng.integers(256, size=(11, 3), dtype=np.uint8))
    starts_L, sizes_L = torch.tensor([7, 0, 3]), torch.tensor([4, 3, 4])
    lists_QP, offsets_QP = torch.tensor([[2, -1, 0], [1, -1, -1]]), torch.randn(2, 3, generator=generator)
    rows_QW, place_QW = pq_scan.rows_of(lists_QP, starts_L, sizes_L, 9)
    assert rows_QW.tolist() == [[3, 4, 5, 6, 7, 8, 9, 10, -1], [0, 1, 2, -1, -1, -1, -1, -1, -1]]
    tables_MQC = pq_scan.tables(queries_QD, centroids_MCS)
    scores_QW = pq_scan.scan(tables_MQC, codes_NM.T.contiguous(), rows_QW, offsets_QP.gather(1, place_QW))
    for query in range(2):
        expected = []
        for number, offset in zip(lists_QP[query].tolist(), offsets_QP[query].tolist(), strict=True):
            if number >= 0:
                codes = codes_NM[starts_L[number] : starts_L[number] + sizes_L[number]]
                expected += scan_one(queries_QD[query], centroids_MCS, codes, offset)
        expected += [-float("inf")] * (9 - len(expected))
        assert scores_QW[query].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_empty_shard_or_no_probes_find_nothing(index: Any, queries: Any) -> None:
    lists, nearness = probes(index, queries, 3)
    empty = DeviceShard(index, np.empty(0, dtype=np.int64), "cpu")
    assert len(empty) == 0
    assert all(len(ids) == 0 for ids, _ in empty.scan_batch(queries, 5, lists, nearness))
    full = DeviceShard(index, np.arange(NLIST), "cpu")
    assert len(scan_alone(full, queries[0], 5, np.full(3, -1), nearness[0])[0]) == 0
    assert full.num_bytes > index.ntotal * 4


def test_codes_of_other_widths_are_refused() -> None:
    with pytest.raises(ConfigError, match="index.nbits=5 does not work"):
        DeviceShard(trained(nbits=5), np.arange(NLIST), "cpu")


def test_read_only_query_is_searched(index: Any, queries: Any) -> None:
    """An embedder's cached vectors are read-only; PyTorch warns of such arrays, which fails the test."""
    kept = queries[:1].copy()
    kept.setflags(write=False)
    lists, nearness = probes(index, kept, 6)
    (found,) = DeviceShard(index, np.arange(NLIST), "cpu").scan_batch(kept, 10, lists, nearness)
    assert_same(found, first_arrays(*scan(index, kept[0], 10, lists[0], nearness[0]), 10))
