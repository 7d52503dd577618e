"""What computing and loading KV costs on this machine, measured once (`stillroom calibrate`).

T(cached, new) is the time to prefill `new` tokens after `cached` ones whose KV is there, between grid points by
bilinear interpolation (RAGCache 5.1, Algorithm 1 lines 6 to 9). Beyond the grid the last cell goes on in a straight
line.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from stillroom.core.kv import Tier


@dataclass(frozen=True, slots=True)
class Link:
    """Moving bytes from a tier to the device."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class CostProfile:
    """Measured times of one model on one machine."""

    cached: tuple[int, ...]
    """Grid: tokens that are there already, increasing, from 0; at least two."""
    new: tuple[int, ...]
    """Grid: tokens to compute, increasing, from at least 1; at least two."""
    seconds: tuple[tuple[float, ...], ...]
    """[len(cached)][len(new)]."""
    links: Mapping[Tier, Link] = field(default_factory=dict)
    """For host and disk; where there is none, loading is taken to cost nothing."""

    def __post_init__(self) -> None:
        assert len(self.cached) > 1 and len(self.new) > 1
        assert list(self.cached) == sorted(set(self.cached)) and list(self.new) == sorted(set(self.new))
        assert len(self.seconds) == len(self.cached)
        assert all(len(row) == len(self.new) and all(value > 0 for value in row) for row in self.seconds)

    def prefill_seconds(self, num_cached: int, num_new: int) -> float:
        """T(cached, new); 0 for no new tokens."""
        if num_new <= 0:
            return 0.0
        row, row_share = _cell(self.cached, num_cached)
        column, column_share = _cell(self.new, num_new)
        above, below = self.seconds[row], self.seconds[row + 1]
        low = above[column] + row_share * (below[column] - above[column])
        high = above[column + 1] + row_share * (below[column + 1] - above[column + 1])
        return max(low + column_share * (high - low), 1e-9)

    def load_seconds(self, tier: Tier, num_bytes: int) -> float:
        """From this tier to the device."""
        link = self.links.get(tier)
        return 0.0 if link is None else link.seconds(num_bytes)


def linear_profile(
    seconds_per_step: float, seconds_per_token: float, seconds_per_pair: float, links: Mapping[Tier, Link] | None = None
) -> CostProfile:
    """A profile from three numbers: a step, each new token, and each pair of a new token and one it attends to."""
    cached, new = (0, 512, 2048, 8192), (1, 64, 256, 1024, 4096)

    def seconds(before: int, count: int) -> float:
        return seconds_per_step + seconds_per_token * count + seconds_per_pair * count * (before + count / 2)

    return CostProfile(
        cached, new, tuple(tuple(seconds(before, count) for count in new) for before in cached), links or {}
    )


def _cell(grid: tuple[int, ...], value: int) -> tuple[int, float]:
    """The cell a value lies in, or the nearest one, and how far into it."""
    index = bisect_right(grid, value, 1, len(grid) - 1) - 1
    return index, (value - grid[index]) / (grid[index + 1] - grid[index])
