"""Hit-rate model of tiered lists: distribution of fast lists per query, and time of a batch (VectorLiteRAG 4.1).

A query probes n lists, of which k are on the fast tier; over queries k follows a Beta-binomial distribution. A batch
ends with its slowest query, the one with the fewest fast lists. Only arithmetic on measured numbers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HitRates:
    """Beta-binomial distribution of the number of fast lists among those probed."""

    num_probes: int
    alpha: float
    beta: float

    @property
    def mean(self) -> float:
        """eta_0: mean share of fast lists."""
        return self.alpha / (self.alpha + self.beta)

    def pmf(self) -> Floats:
        """Return the probability of k = 0..n fast lists, [n + 1]."""
        counts = np.arange(self.num_probes + 1)
        found: Floats = stats.betabinom.pmf(counts, self.num_probes, self.alpha, self.beta)
        return found

    @classmethod
    def fit(cls, num_fast: NDArray[np.int64], num_probes: int) -> "HitRates":
        """Fit by the first two moments of the counts, one per query.

        If they vary no more than independent draws, the distribution is (almost) binomial.
        """
        share = float(np.clip(np.mean(num_fast) / num_probes, 1e-6, 1 - 1e-6))
        if num_probes == 1:
            return cls(1, share, 1 - share)
        binomial = num_probes * share * (1 - share)
        # variance = binomial (1 + (n - 1) rho), rho = 1 / (alpha + beta + 1)
        rho = (float(np.var(num_fast)) / binomial - 1) / (num_probes - 1)
        rho = float(np.clip(rho, 1e-6, 1 - 1e-6))
        total = 1 / rho - 1
        return cls(num_probes, share * total, (1 - share) * total)


def expected_minimum(pmf: Floats, batch_size: int) -> float:
    """Return the mean of the least of B draws with probabilities `pmf` [n + 1]: the sum of P(X >= k)^B over k > 0."""
    at_least = np.clip(1.0 - np.concatenate([[0.0], np.cumsum(pmf)[:-1]]), 0.0, 1.0)
    return float((at_least[1:] ** batch_size).sum())


def expected_minimum_by_paper(pmf: Floats, batch_size: int) -> float:
    """Return `expected_minimum` by Eq. 3 and 4 as published.

    They use the density of a continuous order statistic, which miscounts equal draws, and do not normalise the sum.
    """
    cdf = np.minimum(np.cumsum(pmf), 1.0)
    counts = np.arange(len(pmf))
    return float((batch_size * counts * pmf * (1.0 - cdf) ** (batch_size - 1)).sum())


@dataclass(frozen=True, slots=True)
class SearchTimes:
    """Time of a batch with every list on the slow tier (Eq. 1), piecewise linear between measured batch sizes.

    A single line fits small and large batches badly.
    """

    batch_sizes: tuple[int, ...]
    coarse_seconds: tuple[float, ...]
    scan_seconds: tuple[float, ...]
    dispatch_seconds: float = 0.0
    """Per query: merging and delivering results, which the paper leaves out."""

    def coarse(self, batch_size: float) -> float:
        """T_cq(B)."""
        return _interpolate(self.batch_sizes, self.coarse_seconds, batch_size)

    def scan(self, batch_size: float) -> float:
        """T_lut(B)."""
        return _interpolate(self.batch_sizes, self.scan_seconds, batch_size)

    def batch_seconds(self, batch_size: int, least_hit_rate: float) -> float:
        """Return T_search (Eq. 5) plus dispatching."""
        slow = (1.0 - least_hit_rate) * self.scan(batch_size)
        return self.coarse(batch_size) + slow + batch_size * self.dispatch_seconds


def _interpolate(sizes: tuple[int, ...], seconds: tuple[float, ...], size: float) -> float:
    """Interpolate linearly; beyond the last point, extend the last line."""
    if len(sizes) > 1 and size > sizes[-1]:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return seconds[-1] + slope * (size - sizes[-1])
    return float(np.interp(size, sizes, seconds))
