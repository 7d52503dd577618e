"""VectorLiteRAG's rule: the smallest hit rate with which the search is no bottleneck and keeps its share of the latency
target (4.1, Eq. 7 to 10). Arithmetic only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Rate = Callable[[float, int], float]
"""Queries per second at a mean hit rate and a batch size (Eq. 6)."""


@dataclass(frozen=True, slots=True)
class Sufficient:
    """The smallest hit rate that does, and a batch size at which it does."""

    hit_rate: float
    batch_size: int
    queries_per_second: float


@dataclass(frozen=True, slots=True)
class Shortfall:
    """No hit rate does."""

    binding: Literal["throughput", "latency"]
    """Eq. 7, or Eq. 9: which one everything in RAM fails by more."""
    needed: float
    """Queries per second."""
    possible: float
    """With all lists in RAM, at the batch size that is nearest to sufficient."""


def needed_rates(batch_size: int, generated_per_second: float, slo_seconds: float) -> tuple[float, float]:
    """Queries per second that a search of batches of this size must reach: what the model generates (Eq. 7), and what
    keeps a queue as long as a batch within the target (Eq. 9, written as Eq. 10)."""
    return generated_per_second, 2 * batch_size / slo_seconds


def smallest_hit_rate(
    rate: Rate, batch_sizes: Sequence[int], generated_per_second: float, slo_seconds: float, step: float = 0.01
) -> Sufficient | Shortfall:
    """Scan hit rates from 0 to 1: the first that meets both constraints at some batch size.

    Args:
        generated_per_second: LLM_t, requests that the model can serve.
        slo_seconds: the search's share of the target, more than 0.
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
