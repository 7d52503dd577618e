"""How many of the lists that a search probes are on the fast tier, and how long that makes a batch (VectorLiteRAG 4.1).

A query probes n lists, of which k are fast ones; over queries k follows a Beta-binomial distribution. A batch is done
when its slowest query is, the one with the fewest. All of it is arithmetic on measured numbers; measuring is elsewhere.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HitRates:
    """Beta-binomial distribution of fast lists among those probed."""

    num_probes: int
    alpha: float
    beta: float

    @property
    def mean(self) -> float:
        """eta_0: share of fast lists, over all queries."""
        return self.alpha / (self.alpha + self.beta)

    def pmf(self) -> Floats:
        """Probability of k = 0..n fast lists: [n + 1]."""
        counts = np.arange(self.num_probes + 1)
        found: Floats = stats.betabinom.pmf(counts, self.num_probes, self.alpha, self.beta)
        return found

    @classmethod
    def fit(cls, num_fast: NDArray[np.int64], num_probes: int) -> "HitRates":
        """By the first two moments of the counts seen, one per query.

        Where they vary no more than independent draws would, the distribution is (almost) binomial.
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
    """Mean of the least of B draws from 0..n, of which `pmf` [n + 1] has the probabilities:
    P(min >= k) = P(one >= k)^B, added up over k > 0."""
    at_least = np.clip(1.0 - np.concatenate([[0.0], np.cumsum(pmf)[:-1]]), 0.0, 1.0)
    return float((at_least[1:] ** batch_size).sum())


def expected_minimum_by_paper(pmf: Floats, batch_size: int) -> float:
    """The same by Eq. 3 and 4 as they are written: the density of a continuous order statistic, which counts draws that
    are equal wrongly. The sum is not normalised there, nor here."""
    cdf = np.minimum(np.cumsum(pmf), 1.0)
    counts = np.arange(len(pmf))
    return float((batch_size * counts * pmf * (1.0 - cdf) ** (batch_size - 1)).sum())


@dataclass(frozen=True, slots=True)
class SearchTimes:
    """Time of a batch with every list on the slow tier: coarse search and scanning, each at the measured batch sizes,
    and straight lines between them (Eq. 1, in pieces: one line fits small and large batches badly)."""

    batch_sizes: tuple[int, ...]
    coarse_seconds: tuple[float, ...]
    scan_seconds: tuple[float, ...]
    dispatch_seconds: float = 0.0
    """Per query: merging what the tiers found and handing it on, which the paper leaves out."""

    def coarse(self, batch_size: float) -> float:
        """T_cq(B)."""
        return _along(self.batch_sizes, self.coarse_seconds, batch_size)

    def scan(self, batch_size: float) -> float:
        """T_lut(B)."""
        return _along(self.batch_sizes, self.scan_seconds, batch_size)

    def batch_seconds(self, batch_size: int, least_hit_rate: float) -> float:
        """T_search (Eq. 5), and dispatching."""
        slow = (1.0 - least_hit_rate) * self.scan(batch_size)
        return self.coarse(batch_size) + slow + batch_size * self.dispatch_seconds


def _along(sizes: tuple[int, ...], seconds: tuple[float, ...], size: float) -> float:
    """On the lines between the points; beyond the last one, on its line."""
    if len(sizes) > 1 and size > sizes[-1]:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        return seconds[-1] + slope * (size - sizes[-1])
    return float(np.interp(size, sizes, seconds))
