"""Means with 95 % intervals over groups: questions about one document are not independent samples.

An interval resamples documents instead of questions (a cluster bootstrap, percentiles of 2,000).
"""

from collections.abc import Sequence

import numpy as np

from stillroom_bench.instrument.statistics import Interval

_RESAMPLES = 2000


def mean_by_group(values: Sequence[float], groups: Sequence[str], seed: int = 0) -> Interval:
    """Return the mean of all values with a 95 % interval over groups drawn with replacement."""
    names, places = np.unique(np.asarray(groups), return_inverse=True)
    sums = np.bincount(places, weights=np.asarray(values, dtype=float), minlength=len(names))
    sizes = np.bincount(places, minlength=len(names))
    drawn = np.random.default_rng(seed).integers(0, len(names), size=(_RESAMPLES, len(names)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(sums.sum() / sizes.sum()), float(low), float(high))
