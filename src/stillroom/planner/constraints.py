"""VectorLiteRAG's rule for the smallest sufficient hit rate (4.1, Eq. 7 to 10). Arithmetic only.

A hit rate suffices if the search serves what the model generates and keeps its share of the latency target.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Rate = Callable[[float, int], float]
"""Queries per second at a mean hit rate and a batch size (Eq. 6)."""


@dataclass(frozen=True, slots=True)
class Sufficient:
    """The smallest sufficient hit rate, and a batch size at which it suffices."""

    hit_rate: float
    batch_size: int
    queries_per_second: float


@dataclass(frozen=True, slots=True)
class Shortfall:
    """No hit rate suffices."""

    binding: Literal["throughput", "latency"]
    """The constraint that fails by more with all lists in RAM: Eq. 7 or Eq. 9."""
    needed: float
    """Queries per second."""
    possible: float
    """Queries per second with all lists in RAM, at the batch size nearest to sufficient."""


def needed_rates(batch_size: int, generated_per_second: float, slo_seconds: float) -> tuple[float, float]:
    """Return the queries per second that a search with this batch size must reach: the model's throughput (Eq. 7), and
    what keeps a queue of one batch within the target (Eq. 9, written as Eq. 10)."""
    return generated_per_second, 2 * batch_size / slo_seconds


def smallest_hit_rate(
    rate: Rate, batch_sizes: Sequence[int], generated_per_second: float, slo_seconds: float, step: float = 0.01
) -> Sufficient | Shortfall:
    """Return the first hit rate from 0 to 1 that meets both constraints at some batch size.

    Args:
        generated_per_second: LLM_t, requests per second that the model serves.
        slo_seconds: the search's share of the target, above 0.
    """
    assert slo_seconds > 0 and batch_sizes
    for number in range(round(1 / step) + 1):
        hit_rate = min(1.0, number * step)
        for size in batch_sizes:
            found = rate(hit_rate, size)
            if found >= max(needed_rates(size, generated_per_second, slo_seconds)):
                return Sufficient(hit_rate, size, found)
    best = max(
        batch_sizes, key=lambda size: rate(1.0, size) / max(needed_rates(size, generated_per_second, slo_seconds))
    )
    by_model, by_target = needed_rates(best, generated_per_second, slo_seconds)
    is_throughput = by_model >= by_target
    return Shortfall("throughput" if is_throughput else "latency", max(by_model, by_target), rate(1.0, best))
