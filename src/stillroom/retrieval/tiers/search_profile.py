"""Measures the batches that `search_model` fits (VectorLiteRAG 4.1).

Batches of several sizes are timed with all lists on disk, a random half in RAM, and all in RAM. Before each batch the
page cache of the lists on disk is dropped, so the model gives the worst case, the only one that a budget can promise.
Scans on a device are timed alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.retrieval.tiers.device_shard import DeviceShard
from stillroom.retrieval.tiers.division import ID_BYTES, Counts, Division, Floats
from stillroom.retrieval.tiers.faiss_lists import write_bare_list_file
from stillroom.retrieval.tiers.hit_rates import HitRates
from stillroom.retrieval.tiers.partition import Lists, Partition, hottest
from stillroom.retrieval.tiers.search_model import (
    DeviceCosts,
    ObservedBatch,
    ScanModel,
    fit,
    fit_device,
    hits_of,
    rate_by_hits,
)
from stillroom.retrieval.tiers.tiered_ivf import DISK, FIRST_DEVICE, RAM, TieredLists
from stillroom.retrieval.vector_index import one_thread

Vectors = NDArray[np.float32]
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_SHARES = (0.0, 0.5, 1.0)
_LEAST_SECONDS = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Extent of a measurement."""

    batch_sizes: Sequence[int] = BATCH_SIZES
    num_queries: int = 128
    """Queries per group of batches; at least two batches."""
    num_rounds: int = 2
    """Rounds over all groups, so that a slow moment of the machine does not affect one group alone."""
    num_found: int = 50
    """Results per search."""
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SearchProfile:
    """Measured model of an index with its queries."""

    sizes: Counts
    """Vectors in each list."""
    bytes_per_vector: int
    probed: Lists
    """Lists probed by the queries, [n, p]."""
    model: ScanModel

    @property
    def list_bytes(self) -> int:
        return int(self.sizes.sum()) * self.bytes_per_vector

    def accesses(self, rows: slice = slice(None)) -> Floats:
        """Count the probes of each list by a slice of the queries, [nlist]."""
        probed = self.probed[rows]
        found: Floats = np.bincount(probed[probed >= 0].ravel(), minlength=len(self.sizes)).astype(float)
        return found


def rate_at(profile: SearchProfile, nprobe: int) -> Callable[[float, int], float]:
    """Return a function (mean hit rate, batch size) -> queries per second (Eq. 6).

    Half of the queries determine the hot lists, the others the hit rates.
    """
    half = len(profile.probed) // 2
    probed = profile.probed[:, :nprobe]
    accesses = profile.accesses(slice(0, max(1, half)))
    known: dict[int, HitRates] = {}

    def rate(hit_rate: float, batch_size: int) -> float:
        held = hottest(accesses, hit_rate) if hit_rate < 1 else np.arange(len(profile.sizes))
        if len(held) not in known:
            shard_of = np.full(len(profile.sizes), DISK)
            shard_of[held] = RAM
            division = Division(profile.sizes, profile.bytes_per_vector, Partition(shard_of, 2))
            known[len(held)] = hits_of(division, probed[half:])
        return rate_by_hits(profile.model.times, known[len(held)], batch_size)

    return rate


def probed_lists(lists: Any, queries: Vectors, nprobe: int) -> Lists:
    """Return the lists [n, p] that queries [n, d] probe, nearest first."""
    with one_thread():
        found: Lists = lists.quantizer.search(np.ascontiguousarray(queries), min(nprobe, int(lists.nlist)))[1]
    return found


def measure_profile(
    lists: Any,
    queries: Vectors,
    nprobe: int,
    folder: Path,
    effort: Effort | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> SearchProfile:
    """Measure and fit a profile.

    Args:
        lists: a trained IndexIVFPQ with vectors.
        queries: [n, d], n at least 1; drawn with replacement if there are few.
        folder: place for a temporary file, on the disk of the lists.
    """
    effort = effort or Effort()
    rng = np.random.default_rng([effort.seed, 1])
    place = rng.permutation(lists.nlist)
    groups: list[list[ObservedBatch]] = []
    for at, share in enumerate(_SHARES):
        partition = Partition(np.where(place < round(share * lists.nlist), RAM, DISK), 2)

        def tell(done: int, total: int, at: int = at) -> None:
            on_progress(at * total + done, len(_SHARES) * total)

        groups += observe(lists, partition, queries, nprobe, folder, effort, tell)
    model = fit(groups)
    return SearchProfile(*_shape(lists), probed_lists(lists, queries, nprobe), model)


def measure_device(
    lists: Any, queries: Vectors, nprobe: int, device: str, num_bytes: int, effort: Effort | None = None
) -> DeviceCosts | None:
    """Time scans of random lists on a device, without coarse search.

    Args:
        num_bytes: limit of codes on the device.

    Returns:
        None if no list fits.
    """
    effort = effort or Effort()
    rng = np.random.default_rng([effort.seed, 3])
    sizes, bytes_per_vector = _shape(lists)
    order = rng.permutation(lists.nlist)
    held = np.sort(order[np.cumsum(sizes[order] * (bytes_per_vector - ID_BYTES)) <= num_bytes])
    if not sizes[held].sum():
        return None
    shard_of = np.full(lists.nlist, DISK)
    shard_of[held] = FIRST_DEVICE
    division = Division(sizes, bytes_per_vector, Partition(shard_of, FIRST_DEVICE + 1))
    shard = DeviceShard(lists, held, device)
    works: list[Floats] = []
    seconds: list[float] = []
    for size, probes in _groups(min(nprobe, int(lists.nlist)), effort.batch_sizes):
        for number in range(1 + max(2, effort.num_queries // size)):
            chosen = np.ascontiguousarray(queries[rng.choice(len(queries), size=size, replace=size > len(queries))])
            with one_thread():
                nearness, probed = lists.quantizer.search(chosen, probes)
            asked, work = division.device_work(FIRST_DEVICE, probed)
            if not len(asked):
                continue
            mine, near = division.partition.probes(FIRST_DEVICE, probed, nearness)
            began = time.perf_counter()
            shard.scan_batch(chosen[asked], effort.num_found, mine[asked], near[asked])
            took = time.perf_counter() - began
            if number:  # the first of a shape allocates, and loads kernels on a GPU
                works.append(work)
                seconds.append(max(took, _LEAST_SECONDS))
    return fit_device(works, seconds) if works else None


def observe(  # noqa: PLR0913  what is measured, and how
    lists: Any,
    partition: Partition,
    queries: Vectors,
    nprobe: int,
    folder: Path,
    effort: Effort,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[ObservedBatch]]:
    """Measure groups of batches with one division; arguments as of `measure_profile`."""
    division = Division(*_shape(lists), partition)
    rng = np.random.default_rng([effort.seed, 2, division.ram_bytes])
    file = folder / f"profile-{time.monotonic_ns()}.ivf"
    tiered = TieredLists(write_bare_list_file(lists, file), partition.of(RAM))
    plan = list(_groups(min(nprobe, int(lists.nlist)), effort.batch_sizes))
    groups: list[list[ObservedBatch]] = [[] for _ in plan]
    try:
        bench = _DivisionBench(lists, tiered, division, queries, effort, rng)
        bench.batch(*plan[0])  # warm-up: threads and pages
        for number in range(effort.num_rounds):
            for at, (size, probes) in enumerate(plan):
                num_batches = max(2, effort.num_queries // size)
                share = range(
                    num_batches * number // effort.num_rounds, num_batches * (number + 1) // effort.num_rounds
                )
                groups[at] += [bench.batch(size, probes) for _ in share]
                on_progress(number * len(plan) + at + 1, effort.num_rounds * len(plan))
    finally:
        tiered.close()
        file.unlink(missing_ok=True)
    return groups


def _shape(lists: Any) -> tuple[Counts, int]:
    """Return the vectors in each list [nlist], and the bytes of a code with its id."""
    sizes = np.array([lists.invlists.list_size(number) for number in range(lists.nlist)], dtype=np.int64)
    return sizes, int(lists.code_size) + ID_BYTES


def _groups(nprobe: int, batch_sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield batch sizes and probes; fewer probes too, to separate the cost of a query from that of its lists."""
    for size in batch_sizes:
        yield size, nprobe
    for probes in sorted({max(1, nprobe // 2), max(1, nprobe // 4)} - {nprobe}):
        yield batch_sizes[0], probes
        yield batch_sizes[len(batch_sizes) // 2], probes


class _DivisionBench:
    """Measures batches with one division."""

    def __init__(
        self,
        lists: Any,
        tiered: TieredLists,
        division: Division,
        queries: Vectors,
        effort: Effort,
        rng: np.random.Generator,
    ) -> None:
        self._lists, self._tiered, self._division = lists, tiered, division
        self._queries, self._num_found, self._rng = queries, effort.num_found, rng

    def batch(self, size: int, nprobe: int) -> ObservedBatch:
        """Measure a batch of drawn queries."""
        chosen = self._rng.choice(len(self._queries), size=size, replace=size > len(self._queries))
        queries = np.ascontiguousarray(self._queries[chosen])
        self._tiered.drop_pages()
        began = time.perf_counter()
        self._tiered.search_batch(queries, self._num_found, nprobe, lambda number, scored: None)
        seconds = time.perf_counter() - began
        began = time.perf_counter()
        probed = probed_lists(self._lists, queries, nprobe)
        coarse = time.perf_counter() - began
        return ObservedBatch(self._division, probed, min(coarse, seconds - _LEAST_SECONDS), seconds)
