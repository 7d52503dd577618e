"""Cost profile: seconds to compute and to load KV on one machine, measured once by `stillroom calibrate`.

T(cached, new) is the time to prefill `new` tokens behind `cached` tokens whose KV is present. It is interpolated
bilinearly between grid points (RAGCache 5.1, Algorithm 1 lines 6 to 9) and extrapolated from the last cell.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from stillroom.core.kv import Link, Tier


@dataclass(frozen=True)
class CostProfile:
    """Times of one model on one machine."""

    cached: tuple[int, ...]
    """Grid of tokens that have KV: at least two values, increasing, from 0."""
    new: tuple[int, ...]
    """Grid of tokens to compute: at least two values, increasing, from at least 1."""
    seconds: tuple[tuple[float, ...], ...]
    """[len(cached)][len(new)]."""
    links: Mapping[Tier, Link] = field(default_factory=dict)
    """Of host, disk and the shared tier; loading from a tier without a link costs nothing."""

    def __post_init__(self) -> None:
        assert len(self.cached) > 1 and len(self.new) > 1
        assert list(self.cached) == sorted(set(self.cached)) and list(self.new) == sorted(set(self.new))
        assert len(self.seconds) == len(self.cached)
        assert all(len(row) == len(self.new) and all(value > 0 for value in row) for row in self.seconds)

    def prefill_seconds(self, num_cached: int, num_new: int) -> float:
        """Return T(cached, new); 0 without new tokens."""
        if num_new <= 0:
            return 0.0
        row, row_share = _cell(self.cached, num_cached)
        column, column_share = _cell(self.new, num_new)
        above, below = self.seconds[row], self.seconds[row + 1]
        low = above[column] + row_share * (below[column] - above[column])
        high = above[column + 1] + row_share * (below[column + 1] - above[column + 1])
        return max(low + column_share * (high - low), 1e-9)

    def load_seconds(self, tier: Tier, num_bytes: int) -> float:
        """Return the seconds to load this many bytes from a tier to the device."""
        link = self.links.get(tier)
        return 0.0 if link is None else link.seconds(num_bytes)


def linear_profile(
    seconds_per_step: float, seconds_per_token: float, seconds_per_pair: float, links: Mapping[Tier, Link] | None = None
) -> CostProfile:
    """Return a profile from seconds per step, per new token, and per pair of a new and an attended token."""
    cached, new = (0, 512, 2048, 8192), (1, 64, 256, 1024, 4096)

    def seconds(before: int, count: int) -> float:
        return seconds_per_step + seconds_per_token * count + seconds_per_pair * count * (before + count / 2)

    return CostProfile(
        cached, new, tuple(tuple(seconds(before, count) for count in new) for before in cached), links or {}
    )


def _cell(grid: tuple[int, ...], value: int) -> tuple[int, float]:
    """Return the index of a value's grid cell, or of the nearest, and the value's relative offset in it."""
    index = bisect_right(grid, value, 1, len(grid) - 1) - 1
    return index, (value - grid[index]) / (grid[index + 1] - grid[index])
