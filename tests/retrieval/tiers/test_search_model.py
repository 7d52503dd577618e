"""Time model of divided searches: work against examples and a slow twin, and a fit that recovers known costs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.retrieval.tiers.division import Division, hottest_in_ram, hottest_on_devices
from stillroom.retrieval.tiers.hit_rates import HitRates, SearchTimes
from stillroom.retrieval.tiers.partition import Partition
from stillroom.retrieval.tiers.search_model import (
    DeviceCosts,
    ObservedBatch,
    ScanModel,
    fit,
    fit_device,
    fit_line,
    hits_of,
    linear_times,
    rate_by_hits,
    worst_error_of_line,
)
from stillroom.retrieval.tiers.tiered_ivf import DISK, FIRST_DEVICE, RAM

SIZES = np.array([4, 0, 10, 6])
TIMES = SearchTimes((1, 4), (0.5, 2.0), (3.0, 9.0))


def model(device: DeviceCosts | None = None, **costs: float) -> ScanModel:
    known = {
        "per_batch": 0.0,
        "per_query": 0.0,
        "per_list": 0.0,
        "per_code": 0.0,
        "per_window": 0.0,
        "per_byte": 0.0,
        "overlap": 0.0,
        "block_sd": 0.0,
        "batch_sd": 0.0,
    }
    return ScanModel(TIMES, window_bytes=16, num_blocks=20, device=device, **{**known, **costs})


def divided(*shards: int) -> Division:
    return Division(SIZES, 2, Partition(np.array(shards), 2))


def test_work_by_hand() -> None:
    division = divided(RAM, DISK, DISK, DISK)  # in the file: list 2 at [16, 36), list 3 at [48, 60)
    probed = np.array([[0, 2, 3], [2, 1, 0], [0, -1, -1]])
    order, rows = division.work(RAM, probed, 16)
    assert order.tolist() == [0, 1, 2] and rows.tolist() == [[1, 1, 4, 0, 0]] * 3
    order, rows = division.work(DISK, probed, 16)
    assert order.tolist() == [0, 1], "queries with equal work keep their order; the third has none"
    assert rows.tolist() == [[1, 2, 16, 3, 32], [1, 2, 10, 0, 0]], "the second query finds what the first has read"
    assert (division.ram_bytes, division.disk_bytes) == (8, 32)


def test_release_by_hand() -> None:
    """Query 0: list 0 in RAM and 2 on disk; query 1: list 3 on disk."""
    division = divided(RAM, DISK, DISK, DISK)
    probed = np.array([[0, 2], [3, -1]])
    told = model(per_query=1.0, per_code=0.1).release_seconds(division, probed)
    # disk: both scan one list, so in their order: 1 + 10 codes, then 1 + 6; RAM: 1 + 4 codes; coarse search 1.0
    assert told.tolist() == pytest.approx([1.0 + 2.0, 1.0 + 2.0 + 1.6])
    held_up = model(per_query=1.0, per_code=0.1, overlap=0.5).release_seconds(division, probed)
    assert held_up.tolist() == pytest.approx([1.0 + 2.0 + 0.5 * 1.4, 1.0 + 3.6 + 0.5 * 1.4])


LISTS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@given(LISTS, st.data())
def test_windows_are_those_of_the_file_byte_by_byte(sizes: list[int], data: st.DataObject) -> None:
    num = len(sizes)
    shards = np.array(data.draw(st.lists(st.sampled_from([RAM, DISK]), min_size=num, max_size=num)))
    query = st.lists(st.integers(0, num - 1), unique=True, max_size=3).map(lambda found: (found + [-1] * 3)[:3])
    probed = np.array(data.draw(st.lists(query, min_size=1, max_size=4)))
    window = data.draw(st.sampled_from([1, 7, 64]))
    division = Division(np.array(sizes), 3, Partition(shards, 2))
    owners = []
    for number, size in enumerate(sizes):  # lists begin at multiples of eight entries
        owners += 3 * size * [number] + 3 * (-size % 8) * [-1]
    touched = {number for number in probed[probed >= 0].tolist() if shards[number] == DISK}
    windows = {at // window for at, owner in enumerate(owners) if owner in touched}
    _, rows = division.work(DISK, probed, window)
    assert rows[:, 3].sum() == len(windows)
    assert rows[:, 4].sum() == sum(owner in touched for owner in owners)


def test_the_hottest_lists_that_fit() -> None:
    heat = np.array([1.0, 9.0, 5.0, 7.0])
    assert np.flatnonzero(hottest_in_ram(heat, SIZES, 2, 20).partition.shard_of == RAM).tolist() == [0, 1, 3], (
        "2 does not fit, 0 does"
    )
    assert hottest_in_ram(heat, SIZES, 2, 40).disk_bytes == 0
    assert hottest_in_ram(heat, SIZES, 2, 0).ram_bytes == 0


ONE, TWO = FIRST_DEVICE, FIRST_DEVICE + 1


def test_a_device_releases_a_batch_at_once_by_hand() -> None:
    """Query 0 has list 0 on the device, query 1 list 2, query 2 list 3 in RAM, query 3 nothing."""
    division = Division(SIZES, 10, Partition(np.array([ONE, DISK, ONE, RAM]), 3))
    probed = np.array([[0, -1], [2, 3], [3, -1], [-1, -1]])
    asked, work = division.device_work(ONE, probed)
    assert asked.tolist() == [0, 1] and work.tolist() == [1, 2, 2 * 10], "as wide as the query with the most codes"
    costs = model(DeviceCosts(0.5, 0.2, 0.01), per_query=1.0, per_code=0.1)
    # coarse search of four 2.0; the device 0.5 + 2 * 0.2 + 20 * 0.01; RAM 1 + 6 codes for query 1, then for query 2
    assert costs.release_seconds(division, probed).tolist() == pytest.approx([3.1, 3.6, 5.2, 2.0])
    assert division.device_bytes == (2 * 14,), "8 of 10 bytes are the id, which stays on the host"
    assert (division.ram_bytes, division.disk_bytes) == (60, 0)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.data())
def test_releases_with_devices_are_those_of_a_slow_twin(sizes: list[int], data: st.DataObject) -> None:
    num = len(sizes)
    shards = data.draw(st.lists(st.sampled_from([RAM, DISK, ONE, TWO]), min_size=num, max_size=num))
    query = st.lists(st.integers(0, num - 1), unique=True, max_size=3).map(lambda found: (found + [-1] * 3)[:3])
    probed = data.draw(st.lists(query, min_size=1, max_size=4))
    known = model(DeviceCosts(0.5, 0.03, 0.002), per_query=0.2, per_list=0.1, per_code=0.01, overlap=0.3)
    found = known.release_seconds(Division(np.array(sizes), 10, Partition(np.array(shards), 4)), np.array(probed))

    ends = {number: [0.0] for number in range(len(probed))}
    on_host: dict[int, list[tuple[int, float]]] = {}
    for shard in (RAM, DISK):
        rows = [
            (number, [one for one in row if one >= 0 and shards[one] == shard]) for number, row in enumerate(probed)
        ]
        at, done = 0.0, []
        for number, mine in sorted(((n, mine) for n, mine in rows if mine), key=lambda one: len(one[1])):
            at += 0.2 + 0.1 * len(mine) + 0.01 * sum(sizes[one] for one in mine)
            done.append((number, at))
        on_host[shard] = done
    for shard, other in ((RAM, DISK), (DISK, RAM)):
        busy = on_host[other][-1][1] if on_host[other] else 0.0
        for number, at in on_host[shard]:
            ends[number].append(at + (0.3 if len(probed) > 1 else 1.0) * min(at, busy))
    for shard in (ONE, TWO):
        codes = {
            number: sum(sizes[one] for one in row if one >= 0 and shards[one] == shard)
            for number, row in enumerate(probed)
            if any(one >= 0 and shards[one] == shard for one in row)
        }
        for number in codes:
            ends[number].append(0.5 + 0.03 * len(codes) + 0.002 * len(codes) * max(codes.values()))
    coarse = TIMES.coarse(len(probed))
    assert found.tolist() == pytest.approx([coarse + max(ends[number]) for number in range(len(probed))])


def test_hottest_lists_are_on_devices_and_the_next_in_ram() -> None:
    heat = np.array([1.0, 9.0, 5.0, 7.0])
    sizes = np.array([4, 5, 10, 6])
    held = hottest_on_devices(heat, sizes, 9, 6, 2)  # a byte of each vector's 9 is its code
    assert [one.tolist() for one in held] == [[3], [1]], "the larger first; the next fits on neither"
    division = hottest_in_ram(heat, sizes, 9, 95, held)
    assert division.partition.shard_of.tolist() == [DISK, TWO, RAM, ONE] and division.device_bytes == (6, 5)
    nothing = hottest_in_ram(heat, sizes, 9, 95, hottest_on_devices(heat, sizes, 9, 0, 1))
    assert nothing.device_bytes == (0,) and nothing.partition.of(RAM).tolist() == [0, 1]


def test_fit_recovers_the_costs_of_a_device() -> None:
    rng = np.random.default_rng(4)
    sizes = rng.integers(5, 200, size=64)
    division = Division(sizes, 56, Partition(np.where(rng.random(64) < 0.6, ONE, DISK), 3))
    made = DeviceCosts(3e-4, 2e-5, 4e-9)
    works = []
    for size, probes in [(1, 16), (4, 16), (16, 16), (1, 4), (4, 4), (16, 4)]:
        for _ in range(8):
            probed = np.array([rng.choice(64, size=probes, replace=False) for _ in range(size)])
            works.append(division.device_work(ONE, probed)[1])
    seconds = [made.seconds(work) for work in works]
    found = fit_device(works, seconds)
    assert (found.per_launch, found.per_query, found.per_code) == pytest.approx((3e-4, 2e-5, 4e-9), rel=1e-6)
    noisy = fit_device(works, [one * float(np.exp(0.05 * rng.standard_normal())) for one in seconds])
    assert [noisy.seconds(work) for work in works] == pytest.approx(seconds, rel=0.1)


def observations(truth: ScanModel, noise: float, seed: int) -> list[list[ObservedBatch]]:
    """Draw groups of batches with the times of a known model plus noise."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(5, 200, size=64)
    place = rng.permutation(64)
    groups = []
    for share in (0.0, 0.5, 1.0):
        division = Division(sizes, 56, Partition(np.where(place < share * 64, RAM, DISK), 2))
        for size, probes in [(1, 16), (4, 16), (1, 8), (4, 8), (1, 4), (4, 4)]:
            group = []
            for _ in range(12):
                probed = np.array([rng.choice(64, size=probes, replace=False) for _ in range(size)])
                seconds = truth.release_seconds(division, probed).max() * np.exp(noise * rng.standard_normal())
                group.append(ObservedBatch(division, probed, truth.times.coarse(size), float(seconds)))
            groups.append(group)
    return groups


def truth() -> ScanModel:
    times = SearchTimes((1, 4), (1e-4, 2e-4), (1e-3, 3e-3))
    return ScanModel(times, 2e-4, 1e-4, 2e-6, 5e-8, 3e-5, 1e-9, 2**16, 0.4, 0.0, 0.0, 18)


@pytest.mark.parametrize("per_code_alone", [5e-8, 2e-7])
def test_fit_recovers_the_costs_of_the_model(per_code_alone: float) -> None:
    made = replace(truth(), per_code_alone=per_code_alone)
    found = fit(observations(made, 0.0, 1))
    assert found.window_bytes == made.window_bytes
    names = ("per_batch", "per_query", "per_list", "per_code", "per_code_alone", "per_window", "per_byte", "overlap")
    for name in names:
        assert getattr(found, name) == pytest.approx(getattr(made, name), rel=0.02, abs=1e-12), name
    assert found.block_sd < 1e-3 and found.batch_sd < 1e-3


@pytest.mark.parametrize("is_alone", [True, False])
def test_costs_of_what_was_not_observed_are_those_of_the_other(is_alone: bool) -> None:
    observed = [group for group in observations(truth(), 0.0, 1) if (len(group[0].probed) == 1) == is_alone]
    found = fit(observed)
    assert found.per_code == found.per_code_alone == pytest.approx(truth().per_code, rel=0.05)


def test_interrupted_coarse_search_changes_the_fit_little() -> None:
    observed = observations(truth(), 0.05, 1)
    alone = fit(observed)
    for number, group in enumerate(observed):
        group[number % len(group)] = replace(group[number % len(group)], coarse_seconds=group[0].seconds)

    found = fit(observed)

    for name in ("per_batch", "per_code", "per_window", "block_sd"):
        assert getattr(found, name) == pytest.approx(getattr(alone, name), rel=0.05, abs=1e-12), name


def test_prediction_interval_covers_new_batches() -> None:
    made = truth()
    found = fit(observations(made, 0.2, 2))
    rng = np.random.default_rng(3)
    sizes = rng.integers(5, 200, size=64)
    division = hottest_in_ram(rng.random(64), sizes, 56, int(sizes.sum() * 56 * 0.3))
    batches = [np.array([rng.choice(64, size=16, replace=False) for _ in range(4)]) for _ in range(40)]
    told = found.throughput(division, batches, num_measured=20)
    held = 0
    for _ in range(200):
        chosen = [batches[at] for at in rng.integers(40, size=20)]
        seconds = [made.release_seconds(division, one).max() * np.exp(0.2 * rng.standard_normal()) for one in chosen]
        held += told.holds(4 * 20 / sum(seconds))
    assert held >= 180 and told.low < told.value < told.high
    assert found.batch_sd == pytest.approx(0.2, rel=0.2)


def test_straight_lines_by_hand() -> None:
    assert fit_line((1, 2, 3), (2.0, 4.0, 6.0)) == pytest.approx((2.0, 0.0))
    assert worst_error_of_line((1, 2, 3), (2.0, 4.0, 6.0)) == pytest.approx(0.0)
    assert worst_error_of_line((1, 2, 3), (1.0, 1.0, 4.0)) == pytest.approx(1.0)  # 1.5 B - 1: at 2, 2 and not 1
    line = linear_times(SearchTimes((1, 2, 3), (1.0, 1.0, 1.0), (1.0, 2.0, 4.5)))
    assert (line.scan(1), line.scan(3)) == pytest.approx((0.75, 4.25))


def test_rates_by_hits_by_hand() -> None:
    hits = HitRates(4, 1e9, 1e-6)  # all in RAM, always
    assert rate_by_hits(TIMES, hits, 4) == pytest.approx(4 / 2.0)
    none = HitRates(4, 1e-6, 1e9)
    assert rate_by_hits(TIMES, none, 4) == pytest.approx(4 / 11.0)
    assert rate_by_hits(TIMES, hits, 4, as_paper=True) == pytest.approx(4 / 11.0), "it counts equal draws wrongly"


def test_hits_are_counted_over_queries() -> None:
    division = divided(RAM, DISK, RAM, DISK)
    fitted = hits_of(division, np.array([[0, 2], [1, 3], [0, 1], [2, 3]]))
    assert fitted.num_probes == 2 and fitted.mean == pytest.approx(0.5)
    on_device = Division(SIZES, 10, Partition(np.array([ONE, DISK, RAM, DISK]), 3))
    assert hits_of(on_device, np.array([[0, 2], [1, 3], [0, 1], [2, 3]])) == fitted, "a device counts as RAM does"
