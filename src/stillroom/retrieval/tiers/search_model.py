"""Time model of searches with lists divided among devices, RAM and disk (VectorLiteRAG 4.1).

It is fitted to a few measured divisions and predicts the time of any other. The paper scales the time of a full scan by
the least hit rate of a batch (Eq. 5), which fits if all queries of a batch are scanned in parallel. `TieredLists` scans
them one after the other in each shard, and reads a list that two queries probe from disk once. So this model counts the
lists of each batch. Each shard takes

    per query + per probed list + per code + (on disk) per window of the file first touched + per byte of it

for its queries, those with the least to scan first; a query is released when its last shard has finished. A single
query starts no shards: one thread scans its lists in RAM, then those on disk, and a code has a cost of its own, because
faiss scans it and compiled kernels scan batches. A device scans for all queries of a batch
at once and releases them together:

    per launch + per query + per slot of a code; each query has as many slots as the query with the most codes

Both models are kept; `bench tiered --predict` compares both with measurements.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, stats

from stillroom.retrieval.tiers.division import Division, Floats
from stillroom.retrieval.tiers.hit_rates import HitRates, SearchTimes, expected_minimum, expected_minimum_by_paper
from stillroom.retrieval.tiers.partition import Lists
from stillroom.retrieval.tiers.tiered_ivf import DISK, RAM

WINDOWS = tuple(2**power for power in range(14, 25))
"""Candidates for the bytes that the system reads around a missing page; the best fit is taken."""
_NUM_FITTED = 8
_CONFIDENCE = 0.90


@dataclass(frozen=True, slots=True, eq=False)
class ObservedBatch:
    """A measured batch."""

    division: Division
    probed: Lists
    """Probed lists, [q, p]."""
    coarse_seconds: float
    """Seconds of the coarse search."""
    seconds: float
    """Seconds to the last result."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted throughput in queries per second, with its 90 % prediction interval."""

    value: float
    low: float
    high: float

    def holds(self, measured: float) -> bool:
        return self.low <= measured <= self.high


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Seconds of the parts of a scan on a device."""

    per_launch: float
    """Launch, and transfer of the results."""
    per_query: float
    """Look-up tables and selection of the best."""
    per_code: float
    """Seconds per slot, used or empty."""

    def seconds(self, work: Floats) -> float:
        """Return the seconds of a `Division.device_work`."""
        return float(work @ np.array([self.per_launch, self.per_query, self.per_code]))


@dataclass(frozen=True, slots=True)
class ScanModel:
    """Seconds of the parts of a search."""

    times: SearchTimes
    """Times with every list on disk (Eq. 1)."""
    per_batch: float
    """Starting the shards."""
    per_query: float
    """Includes merging and delivering results, which the paper leaves out."""
    per_list: float
    per_code: float
    per_window: float
    per_byte: float
    window_bytes: int
    overlap: float
    """How much two scanning shards slow each other: 0 not at all, 1 they take turns."""
    block_sd: float
    """Standard deviation of log(measured / modelled) over groups of like batches."""
    batch_sd: float
    """Standard deviation of the same for batches within a group."""
    num_blocks: int
    device: DeviceCosts | None = None
    """Costs of every device; None if no device was measured."""
    per_code_alone: float | None = None
    """Of a single query; None: `per_code`."""

    def release_seconds(self, division: Division, probed: Lists) -> Floats:
        """Return the seconds from the start of a batch [q, p] to each query's result, [q]."""
        is_alone = self.per_code_alone is not None and not _uses_shards(probed)
        per_code = self.per_code_alone if is_alone else self.per_code
        costs = np.array([self.per_query, self.per_list, per_code, self.per_window, self.per_byte])
        works = [division.work(shard, probed, self.window_bytes) for shard in (RAM, DISK)]
        ends = [np.cumsum(rows @ costs) for _, rows in works]
        totals = [float(end[-1]) if len(end) else 0.0 for end in ends]
        found = np.zeros(len(probed))
        overlap = self.overlap if _uses_shards(probed) else 1.0
        for (order, _), end, other in zip(works, ends, reversed(totals), strict=True):
            found[order] = np.maximum(found[order], end + overlap * np.minimum(end, other))
        for device in division.devices:
            asked, work = division.device_work(device, probed)
            if len(asked):
                assert self.device is not None, "no device was measured"
                found[asked] = np.maximum(found[asked], self.device.seconds(work))
        return found + self.times.coarse(len(probed)) + self.per_batch * _uses_shards(probed)

    def throughput(self, division: Division, batches: Sequence[Lists], num_measured: int) -> Prediction:
        """Predict queries per second to the last result of each batch (Eq. 6).

        Args:
            batches: representative batches, [q, p] each.
            num_measured: batches of the measurement to compare with; more give a narrower interval.
        """
        seconds = np.array([self.release_seconds(division, probed).max() for probed in batches])
        value = len(batches[0]) / float(seconds.mean())
        drawn = float(np.var(seconds / seconds.mean()))
        spread = self.block_sd**2 * (1 + _NUM_FITTED / max(self.num_blocks, 1))
        spread += (self.batch_sd**2 + drawn) / num_measured
        width = _students_t(self.num_blocks) * math.sqrt(spread)
        return Prediction(value, value * math.exp(-width), value * math.exp(width))


def _students_t(num_blocks: int) -> float:
    return float(stats.t.ppf(0.5 + _CONFIDENCE / 2, max(1, num_blocks - _NUM_FITTED)))


def fit(observed: Sequence[Sequence[ObservedBatch]]) -> ScanModel:
    """Fit to groups of batches of the same size, probes and division.

    Precondition: the divisions include all lists on disk and all in RAM. A mixed division determines `overlap`.
    """
    observed = _with_usual_coarse_seconds(observed)
    everything = [one for group in observed for one in group]
    whole = max(one.probed.shape[1] for one in everything)
    in_ram = [one for one in everything if one.division.disk_bytes == 0]
    on_disk = [one for one in everything if one.division.ram_bytes == 0]
    divided = [
        one for one in everything if one.division.ram_bytes and one.division.disk_bytes and _uses_shards(one.probed)
    ]
    assert in_ram and on_disk
    works = [np.concatenate([[_uses_shards(one.probed)], _scan_work(one, RAM)]) for one in in_ram]
    per_batch, *scan_costs = _least_squares(
        works, [_scan(one) for one in in_ram], [one.seconds for one in in_ram]
    ).tolist()
    if not any(work[0] for work in works):
        scan_costs[2] = scan_costs[3]
    elif all(work[0] for work in works):
        scan_costs[3] = scan_costs[2]
    window_bytes, file_costs = _file_costs(on_disk, per_batch, np.array(scan_costs))
    costs = np.array([*scan_costs[:3], *file_costs])
    overlap = _overlap(divided, per_batch, costs, window_bytes)
    times = _times([one for one in on_disk if one.probed.shape[1] == whole])
    per_query, per_list, per_code, per_window, per_byte = costs.tolist()
    model = ScanModel(
        times=times,
        per_batch=per_batch,
        per_query=per_query,
        per_list=per_list,
        per_code=per_code,
        per_window=per_window,
        per_byte=per_byte,
        window_bytes=window_bytes,
        overlap=overlap,
        block_sd=0.0,
        batch_sd=0.0,
        num_blocks=len(observed),
        per_code_alone=scan_costs[3],
    )
    errors = [np.array([_log_error(model, one) for one in group]) for group in observed]
    num_free = max(1, len(errors) - _NUM_FITTED)
    block_sd = math.sqrt(sum(float(np.mean(group)) ** 2 for group in errors) / num_free)
    within = np.concatenate([group - group.mean() for group in errors])
    batch_sd = math.sqrt(float((within**2).sum()) / max(1, len(within) - len(errors)))
    return replace(model, block_sd=block_sd, batch_sd=batch_sd)


def fit_device(works: Sequence[Floats], seconds: Sequence[float]) -> DeviceCosts:
    """Fit to scans of different sizes and widths: their `Division.device_work` [3] and seconds."""
    return DeviceCosts(*_least_squares(works, seconds, seconds).tolist())


def _with_usual_coarse_seconds(observed: Sequence[Sequence[ObservedBatch]]) -> list[list[ObservedBatch]]:
    """Replace each coarse time by the median of its batch size: it does not depend on the division.

    An interrupted coarse search would leave almost no time for the scan, whose relative error would dominate the fit.
    """
    by_size: dict[int, list[float]] = {}
    for one in (one for group in observed for one in group):
        by_size.setdefault(len(one.probed), []).append(one.coarse_seconds)
    usual = {size: float(np.median(seconds)) for size, seconds in by_size.items()}
    return [
        [replace(one, coarse_seconds=min(usual[len(one.probed)], one.seconds)) for one in group] for group in observed
    ]


def _uses_shards(probed: Lists) -> float:
    """1 if a batch [q, p] is scanned by the shards' threads, 0 for a single query."""
    return float(len(probed) > 1)


def _scan(one: ObservedBatch) -> float:
    return max(one.seconds - one.coarse_seconds, 1e-9)


def _total(one: ObservedBatch, shard: int, window_bytes: int) -> Floats:
    found: Floats = one.division.work(shard, one.probed, window_bytes)[1].sum(axis=0)
    return found


def _scan_work(one: ObservedBatch, shard: int) -> Floats:
    """Return queries, lists, codes of a batch and codes of a single query, one of the last two 0."""
    queries, lists, codes = _total(one, shard, WINDOWS[0])[:3]
    is_batch = _uses_shards(one.probed)
    return np.array([queries, lists, codes * is_batch, codes * (1 - is_batch)])


def _least_squares(rows: Sequence[Floats], seconds: Sequence[float], scale: Sequence[float]) -> Floats:
    """Return non-negative costs by least squares of errors relative to `scale`."""
    weights = 1 / np.maximum(np.array(scale), 1e-9)
    matrix = np.array(rows) * weights[:, None]
    units = np.maximum(np.abs(matrix).max(axis=0), 1e-300)  # scaled columns, for the stopping rule of nnls
    solved, _ = optimize.nnls(matrix / units, np.array(seconds) * weights)
    found: Floats = solved / units
    return found


def _file_costs(on_disk: Sequence[ObservedBatch], per_batch: float, scan_costs: Floats) -> tuple[int, Floats]:
    """Return the best-fitting window, and the costs of a window and of a byte of the file."""
    totals = [_scan(one) for one in on_disk]
    scale = [one.seconds for one in on_disk]
    best: tuple[float, int, Floats] | None = None
    for window_bytes in WINDOWS:
        works = [_total(one, DISK, window_bytes) for one in on_disk]
        woken = [per_batch * _uses_shards(one.probed) for one in on_disk]
        scanned = [start + float(_scan_work(one, DISK) @ scan_costs) for start, one in zip(woken, on_disk, strict=True)]
        rest = [max(total - one, 0.0) for total, one in zip(totals, scanned, strict=True)]
        costs = _least_squares([work[3:] for work in works], rest, scale)
        told = np.array([one + float(work[3:] @ costs) for one, work in zip(scanned, works, strict=True)])
        error = float(np.mean(((told - np.array(totals)) / np.array(scale)) ** 2))
        if best is None or error < best[0]:
            best = error, window_bytes, costs
    assert best is not None
    return best[1], best[2]


def _overlap(divided: Sequence[ObservedBatch], per_batch: float, costs: Floats, window_bytes: int) -> float:
    """Return the slowdown of the longer scan as a share of the shorter, by least squares of relative errors."""
    numerator = denominator = 0.0
    for one in divided:
        shards = [float(_total(one, shard, window_bytes) @ costs) for shard in (RAM, DISK)]
        weight = 1 / one.seconds**2
        numerator += weight * (_scan(one) - per_batch - max(shards)) * min(shards)
        denominator += weight * min(shards) ** 2
    return float(np.clip(numerator / denominator, 0.0, 1.0)) if denominator else 0.0


def _times(on_disk: Sequence[ObservedBatch]) -> SearchTimes:
    """Return the mean times by batch size (piecewise Eq. 1)."""
    sizes = sorted({len(one.probed) for one in on_disk})
    groups = [[one for one in on_disk if len(one.probed) == size] for size in sizes]
    coarse = tuple(float(np.mean([one.coarse_seconds for one in group])) for group in groups)
    scan = tuple(float(np.mean([_scan(one) for one in group])) for group in groups)
    return SearchTimes(tuple(sizes), coarse, scan)


def _log_error(model: ScanModel, one: ObservedBatch) -> float:
    told = float(model.release_seconds(one.division, one.probed).max())
    told += one.coarse_seconds - model.times.coarse(len(one.probed))
    return math.log(one.seconds / max(told, 1e-12))


# By hit rates


def linear_times(times: SearchTimes) -> SearchTimes:
    """Return Eq. 1 as published: one line over all batch sizes, for coarse search and for scanning."""
    ends = (times.batch_sizes[0], times.batch_sizes[-1])
    coarse, scan = (fit_line(times.batch_sizes, one) for one in (times.coarse_seconds, times.scan_seconds))
    at = [tuple(max(slope * size + start, 0.0) for size in ends) for slope, start in (coarse, scan)]
    return SearchTimes(ends, at[0], at[1], times.dispatch_seconds)


def worst_error_of_line(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the largest relative error of the best line at a measured point."""
    slope, start = fit_line(sizes, seconds)
    return max(abs(slope * size + start - one) / one for size, one in zip(sizes, seconds, strict=True))


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return slope and intercept by least squares."""
    if len(sizes) == 1:
        return 0.0, seconds[0]
    slope, start = np.polyfit(sizes, seconds, 1)
    return float(slope), float(start)


def rate_by_hits(times: SearchTimes, hits: HitRates, batch_size: int, *, as_paper: bool = False) -> float:
    """Return queries per second (Eq. 5, 6) by the least hit rate of a batch.

    Args:
        as_paper: use Eq. 1, 3 and 4 as published instead of the exact order statistic with measured times.
    """
    if as_paper:
        least = min(1.0, expected_minimum_by_paper(hits.pmf(), batch_size) / hits.num_probes)
        return batch_size / linear_times(times).batch_seconds(batch_size, least)
    least = expected_minimum(hits.pmf(), batch_size) / hits.num_probes
    return batch_size / times.batch_seconds(batch_size, least)


def hits_of(division: Division, probed: Lists) -> HitRates:
    """Fit hit rates to the number of probed lists [n, p] in RAM or on devices per query."""
    num_in = division.partition.num_in(probed)
    return HitRates.fit(num_in.sum(axis=1) - num_in[:, DISK], probed.shape[1])
