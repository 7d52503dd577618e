"""Results of `stillroom bench reuse` per cell: samples, ratios, sustained rates.

A cell is one arm at one rate. Its samples are the times to first token of single requests. Arms of one group receive
the same requests in the same order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stillroom.planner.simulation.stepped_engine import Prompt
from stillroom_bench.instrument.bench_report import format_value
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.statistics import ratio_of_means, summarise

UNLOADED = 0.0
"""Rate that stands for sequential requests: each is sent when the previous one is answered."""
OFF, METRIC, PER_TOKEN = "off", "first_token_seconds", "time_per_token_seconds"
_OVERLOAD = 5.0
"""Multiple of the unloaded time to first token that counts as overload (RAGCache 7, Metrics)."""
_MISSES = 0.10
"""Share of requests that may miss the SLO at a sustained rate."""
_REFERENCES = (OFF, "lru", "vllm")
_TIERS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True)
class LoadCell:
    """One arm under one load."""

    curve: str
    k: int
    rate: float
    """Multiple of the sequential throughput of `off`."""
    arm: str

    @property
    def group(self) -> str:
        load = "one after the other" if self.rate == UNLOADED else f"{self.rate:g}x"
        return f"{self.curve}, k={self.k}, {load}"

    def at(self, rate: float) -> "LoadCell":
        return LoadCell(self.curve, self.k, rate, self.arm)

    def of(self, arm: str) -> "LoadCell":
        return LoadCell(self.curve, self.k, self.rate, arm)


@dataclass(slots=True)
class _Seen:
    runs: dict[int, list[float]] = field(default_factory=dict)
    """Seconds to the first token of each request, by repetition."""
    further: dict[int, list[float]] = field(default_factory=dict)
    """Seconds per token after the first of each request, by repetition; empty for answers of one token."""
    wall_seconds: float = 0.0
    """Seconds from the first due time to the last answer, summed over runs."""
    num_tokens: int = 0
    num_cached: list[int] = field(default_factory=lambda: [0] * len(_TIERS))

    @property
    def seconds(self) -> list[float]:
        """Seconds to the first token of all runs."""
        return _flat(self.runs)

    @property
    def mean(self) -> float:
        return float(np.mean(self.seconds))

    def num_within(self, seconds: float) -> int:
        """Return the number of requests whose first token came within `seconds`."""
        return sum(one <= seconds for one in self.seconds)


@dataclass(slots=True)
class Figures:
    """Collects results. Precondition: rates are added in ascending order."""

    slo_seconds: float = 1.0
    """Target of time to first token; goodput counts requests within it."""
    num_tokens: int = 1
    """Tokens of each answer."""
    _seen: dict[LoadCell, _Seen] = field(default_factory=dict)
    _memory: list[dict[str, Any]] = field(default_factory=list)
    _service: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    """Mean seconds of a complete answer of each arm, one after the other in the first run."""

    def add(self, cell: LoadCell, repetition: int, prompts: Sequence[Prompt], answer: Mapping[str, Any]) -> None:
        """Add one repetition of a cell.

        Args:
            answer: result of `driving.drive`.
        """
        seen, cached = self._seen.setdefault(cell, _Seen()), answer["cached"]
        seen.wall_seconds += answer["wall_seconds"]
        seen.runs[repetition] = answer["seconds"]
        if self.num_tokens > 1:
            pairs = zip(answer["seconds"], answer["response_seconds"], strict=True)
            seen.further[repetition] = [(response - first) / (self.num_tokens - 1) for first, response in pairs]
        seen.num_tokens += sum(len(part) for prompt in prompts for part in prompt)
        seen.num_cached = [before + sum(row[at] for row in cached) for at, before in enumerate(seen.num_cached)]
        if cell.rate == UNLOADED:  # of the first run, because all runs have the same rates
            arms = self._service.setdefault((cell.curve, cell.k), {})
            arms.setdefault(cell.arm, float(np.mean(answer["response_seconds"])))

    def add_memory(self, k: int, peaks: Mapping[str, int]) -> None:
        self._memory += [{"k": k, "arm": arm, "peak RSS MiB": peak / 2**20} for arm, peak in peaks.items()]

    def service_rate(self, curve: str, k: int) -> float:
        """Return the sequential throughput of `off` in requests per second."""
        return 1 / self._service[curve, k][OFF]

    def response_seconds(self, curve: str, k: int) -> Mapping[str, float]:
        """Return the mean time of a complete answer of each arm, one after the other in the first run."""
        return self._service[curve, k]

    def is_asked(self, cell: LoadCell, slower: float | None, repetition: int) -> bool:
        """Return whether a cell is measured.

        In the first repetition, an arm is measured unless it was overloaded or not measured at the next slower rate.
        Later repetitions measure the same cells.
        """
        if repetition > 0:
            return cell in self._seen
        if slower is None:
            return True
        return cell.at(slower) in self._seen and self._mean(cell.at(slower)) <= max(self._limits(cell))

    def _rates(self, cell: LoadCell) -> list[float]:
        """Return the rates at which the arm was measured."""
        return sorted(one.rate for one in self._seen if one.at(0) == cell.at(0))

    def _mean(self, cell: LoadCell) -> float:
        return self._seen[cell].mean

    def _limits(self, cell: LoadCell) -> tuple[float, float]:
        """Return the times to first token that count as overload, by the unloaded times of the arm and of `off`."""
        unloaded = cell.at(UNLOADED)
        return _OVERLOAD * self._mean(unloaded), _OVERLOAD * self._mean(unloaded.of(OFF))

    def samples(self) -> Samples:
        """Return every request's time to first token and per further token; arms are named `group/arm`."""
        found = Samples()
        for cell in self._cells():
            seen = self._seen[cell]
            found.values[f"{cell.group}/{cell.arm}"] = metrics = {METRIC: seen.seconds}
            if self.num_tokens > 1:
                metrics[PER_TOKEN] = _flat(seen.further)
        return found

    def _cells(self) -> list[LoadCell]:
        """Return the cells by load; arms in order of their first measurement."""
        arms = list(dict.fromkeys(cell.arm for cell in self._seen))
        return sorted(self._seen, key=lambda cell: (cell.curve, cell.k, cell.rate, arms.index(cell.arm)))

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return the tables of the report."""
        cells = self._cells()
        return {
            "time to first token": [self._row(cell) for cell in cells],
            "sustained requests per second": [self._sustained(cell) for cell in cells if cell.rate == UNLOADED],
            "memory": self._memory,
        }

    def _row(self, cell: LoadCell) -> dict[str, Any]:
        seen, service = self._seen[cell], self.service_rate(cell.curve, cell.k)
        summary = summarise(seen.seconds)
        row: dict[str, Any] = {"load": cell.group, "requests/s": cell.rate * service or "", "arm": cell.arm}
        row["answered/s"] = len(seen.seconds) / seen.wall_seconds
        row |= {name: format_value(METRIC, getattr(summary, name)) for name in ("mean", "p50", "p95")}
        num_within = seen.num_within(self.slo_seconds)
        row[f"within {self._slo}"] = f"{num_within / len(seen.seconds):.0%}"
        row["goodput/s"] = num_within / seen.wall_seconds
        if self.num_tokens > 1:
            further = summarise(_flat(seen.further))
            row |= {f"TPOT {name}": format_value(PER_TOKEN, getattr(further, name)) for name in ("mean", "p95")}
        references = [arm for arm in _REFERENCES if self._has(arm)]
        row |= {f"mean x {arm}": self._ratio(cell, arm, lambda one: one.runs) for arm in references}
        if self.num_tokens > 1:
            row |= {f"TPOT x {arm}": self._ratio(cell, arm, lambda one: one.further) for arm in references}
        shares = zip(_TIERS, seen.num_cached, strict=True)
        return row | {f"{tier} hits": f"{count / seen.num_tokens:.1%}" for tier, count in shares}

    @property
    def _slo(self) -> str:
        return format_value(METRIC, self.slo_seconds)

    def _has(self, arm: str) -> bool:
        return any(cell.arm == arm for cell in self._seen)

    def _ratio(self, cell: LoadCell, arm: str, of: Callable[[_Seen], Mapping[int, list[float]]]) -> str:
        """Return the ratio over the repetitions that both arms completed; a peer may have ended early."""
        own, other = of(self._seen[cell]), of(self._seen.get(cell.of(arm), _Seen()))
        common = sorted(own.keys() & other.keys())
        if not common or cell.arm == arm:
            return ""
        seconds, others = ([one for run in common for one in runs[run]] for runs in (own, other))
        ratio = ratio_of_means(seconds, others)
        return str(ratio)

    def _sustained(self, cell: LoadCell) -> dict[str, Any]:
        service = self.service_rate(cell.curve, cell.k)
        points = [(rate * service, self._mean(cell.at(rate))) for rate in self._rates(cell)]
        row: dict[str, Any] = {"traffic": f"{cell.curve}, k={cell.k}", "arm": cell.arm}
        row["unloaded"] = format_value(METRIC, points[0][1])
        for name, limit in zip(("below 5x its own", "below 5x off's"), self._limits(cell), strict=True):
            rate = sustained_rate(points, limit)
            row[name] = _at_least(rate, points)
        cells = [cell.at(rate) for rate in self._rates(cell)]
        late = [1 - self._seen[one].num_within(self.slo_seconds) / len(self._seen[one].seconds) for one in cells]
        shares = [(rate, share) for (rate, _), share in zip(points, late, strict=True)]
        row[f"{1 - _MISSES:.0%} within {self._slo}"] = _at_least(sustained_rate(shares, _MISSES), points)
        return row


def _flat(runs: Mapping[int, list[float]]) -> list[float]:
    return [one for run in runs.values() for one in run]


def _at_least(rate: float, points: Sequence[tuple[float, float]]) -> str:
    return f"{rate:.3g}" if rate < points[-1][0] else f"at least {rate:.3g}"


def sustained_rate(points: Sequence[tuple[float, float]], limit: float) -> float:
    """Return the request rate at which the time reaches a limit, by linear interpolation between measurements.

    Args:
        points: request rate and time, by ascending rate.

    Returns:
        The highest measured rate if the limit is never reached.
    """
    for (rate, seconds), (next_rate, next_seconds) in zip(points, points[1:], strict=False):
        if next_seconds > limit:
            return rate if seconds > limit else rate + (next_rate - rate) * (limit - seconds) / (next_seconds - seconds)
    return points[-1][0]
