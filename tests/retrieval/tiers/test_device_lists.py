"""Placement of lists on devices: worked examples, properties, and an index whose lists move between devices, RAM and
disk. Runs on the CPU with the same code."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.config.settings import IndexConfig
from stillroom.errors import ConfigError
from stillroom.retrieval.filters import allowed_lists
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.index.ivf_pq import IvfPqIndex
from stillroom.retrieval.index.tiered_index import TieredIvfPqIndex
from stillroom.retrieval.tiers import device_lists
from stillroom.retrieval.tiers.device_lists import DeviceLists, parse_devices, spread
from stillroom.retrieval.tiers.device_shard import DeviceShard
from stillroom.retrieval.tiers.faiss_lists import write_bare_list_file
from stillroom.retrieval.tiers.hot_lists import DriftRules
from stillroom.retrieval.tiers.list_file import ListFile
from stillroom.retrieval.tiers.tiered_ivf import TieredLists
from tests.retrieval.index.dense_documents import run_now
from tests.retrieval.tiers.test_device_shard import NLIST, trained

D = 16
CONFIG = IndexConfig(
    kind="ivf_pq", nbits=8, num_subquantizers=4, nlist=16, nprobe=5, refine=3, seed=3, devices="cpu,cpu"
)
NONE = np.empty(0, dtype=np.int64)


def vectors(count: int, seed: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    rng = np.random.default_rng(seed)
    found = np.random.default_rng(99).standard_normal((30, D))[rng.integers(30, size=count)]
    found = found + 0.4 * rng.standard_normal((count, D))
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True), dtype=np.float32)


def test_largest_list_goes_to_the_device_with_most_free_memory() -> None:
    sizes = np.array([5, 9, 7, 2, 4])
    assert [held.tolist() for held in spread(np.arange(5), sizes, [NONE, NONE], 14)] == [[1, 4], [0, 2, 3]]
    kept = spread(np.array([0, 2, 4]), sizes, [np.array([1]), np.array([0, 2, 3])], 14)
    assert [held.tolist() for held in kept] == [[4], [0, 2]], "1 and 3 leave, 0 and 2 stay where they are"


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 4), st.integers(0, 100), st.integers(0, 999)
)
def test_device_limits_hold_and_no_list_moves_between_devices(
    sizes: list[int], num_devices: int, num_bytes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    each = np.array(sizes)
    before = [NONE] * num_devices
    for _ in range(3):
        chosen = np.flatnonzero(rng.random(len(sizes)) < 0.6)
        after = spread(chosen, each, before, num_bytes)
        held = np.concatenate(after)
        assert len(set(held.tolist())) == len(held) and set(held) <= set(chosen)
        assert all(each[one].sum() <= num_bytes for one in after)
        for old, new in zip(before, after, strict=True):
            assert set(old) & set(chosen) <= set(new)
        left = np.setdiff1d(chosen, held)
        assert all(each[one] + each[own].sum() > num_bytes for one in left for own in after), "it does not fit"
        before = after


def test_lists_on_devices_follow_the_traffic(tmp_path: Path) -> None:
    tiers = TieredLists(write_bare_list_file(trained(), tmp_path / "lists"))
    sizes = tiers.file.sizes * tiers.file.code_size
    on_devices = DeviceLists(tiers, ["cpu", "cpu"], int(sizes.sum() // 6))
    first = np.arange(NLIST, 0, -1).astype(float)
    num = on_devices.exchange(first, 0.02)
    held = np.flatnonzero(tiers.device_of >= 0)
    assert num == len(held) > 4 and held.max() < NLIST // 2, "the hottest that fit"
    assert on_devices.num_bytes == sizes[held].sum() <= sizes.sum() // 3
    assert on_devices.exchange(first + 0.01, 0.02) == 0, "nothing to gain"
    assert on_devices.exchange(first[::-1].copy(), 0.02) > 4
    assert np.flatnonzero(tiers.device_of >= 0).min() > NLIST // 2
    tiers.close()


def test_device_without_memory_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = TieredLists(write_bare_list_file(trained(), tmp_path / "lists"))
    num_bytes = int((tiers.file.sizes * tiers.file.code_size).sum() // 6)
    num_tried = []

    def full(shell: object, held: object, device: str, entries: object) -> DeviceShard:
        num_tried.append(device)
        if device == "meta":
            raise RuntimeError("out of memory, tried to allocate\nmuch more")
        return DeviceShard(shell, held, device, entries)  # type: ignore[arg-type]

    monkeypatch.setattr(device_lists, "DeviceShard", full)
    on_devices = DeviceLists(tiers, ["meta", "cpu"], num_bytes)
    heat = np.arange(NLIST, 0, -1).astype(float)
    for counts in (heat, heat[::-1].copy()):
        assert on_devices.exchange(counts, 0.02) > 0
        assert set(tiers.device_of.tolist()) == {-1, 1} and 0 < on_devices.num_bytes <= num_bytes
    assert num_tried == ["meta", "cpu", "cpu"]
    assert [record.getMessage() for record in caplog.records if "meta cannot hold" in record.getMessage()] != []
    assert "much more" not in caplog.text
    gone = DeviceLists(tiers, ["meta"], num_bytes)
    assert [gone.exchange(heat, 0.02) for _ in range(2)] == [0, 0] and num_tried.count("meta") == 2
    tiers.close()


@pytest.mark.parametrize("one_in", [2, pytest.param(7, marks=pytest.mark.slow), 60])
def test_filter_gives_the_same_results_with_lists_on_devices(
    tmp_path: Path, one_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowed_lists, "ENTRIES_PER_COMPARED", 10**9)  # never compare all that is allowed
    config = dataclasses.replace(CONFIG, device_bytes=3000, hot_bytes=30_000, refine=20)
    plain, index = IvfPqIndex(D, config), TieredIvfPqIndex(D, config, tmp_path, run_now)
    for each in (plain, index):
        each.add(np.arange(11_000), vectors(11_000, 1))
        each.remove(list(range(1, 11_000, 5)))
        each.add(np.arange(11_000, 11_400), vectors(400, 2))
    allowed = AllowedIds(np.arange(0, 11_400, one_in, dtype=np.int64))
    for query in vectors(20, 3):
        found = index.search(query, 10, allowed=allowed)
        assert found == plain.search(query, 10, allowed=allowed)
        assert len(found) == 10 and all(number % one_in == 0 for number, _ in found)
    figures = index.figures
    assert figures is not None and figures.num_device_hits > 0
    index.close()


@pytest.mark.parametrize("hot_bytes", [pytest.param(0, marks=pytest.mark.slow), 30_000])
def test_index_with_lists_on_devices_finds_what_ram_finds(tmp_path: Path, hot_bytes: int) -> None:
    """Every candidate is scored again with its full vector, so rounding on the device has no effect."""
    config = dataclasses.replace(CONFIG, device_bytes=3000, hot_bytes=hot_bytes, refine=20)
    rules = DriftRules(half_life=20, window=8)
    plain, index = IvfPqIndex(D, config), TieredIvfPqIndex(D, config, tmp_path, run_now, rules)
    rng = np.random.default_rng(0)
    ids = rng.permutation(20_000)[:11_000]
    for each in (plain, index):
        each.add(ids, vectors(11_000, 1))
    index.snapshot().write(tmp_path / "dense.lists", "a corpus", 1)
    index.use_file(ListFile(tmp_path / "dense.lists"))
    figures = index.figures
    assert figures is not None and figures.num_lists_on_devices >= 2 and figures.device_bytes <= 6000
    assert (figures.disk_bytes == 0) is (hot_bytes == 0)
    more = np.arange(50_000, 50_300)
    for each in (plain, index):
        each.remove(ids[:4000].tolist())
        each.add(more, vectors(300, 2))
    queries = vectors(40, 3)
    batch: dict[int, object] = {}
    index.search_batch(queries, 10, batch.__setitem__)
    for number, query in enumerate(queries):
        expected = plain.search(query, 10)
        assert index.search(query, 10) == expected == batch[number]
    figures = index.figures
    assert figures is not None and 0 < figures.num_device_hits < figures.num_hits <= figures.num_probes
    index.close()


def test_device_names_are_parsed() -> None:
    assert parse_devices("cpu, cpu") == ("cpu", "cpu")
    for wrong, message in (("nonsense", "nonsense"), ("cuda:99", "cuda:99"), (" ", "names no device")):
        with pytest.raises(ConfigError, match=message):
            parse_devices(wrong)
    with pytest.raises(ConfigError, match="nbits = 8"):
        dataclasses.replace(CONFIG, device_bytes=1, nbits=4)
