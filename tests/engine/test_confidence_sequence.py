"""The bounds hold at all times, detect bad rates soon, and agree with their definition."""

import numpy as np
import pytest
from scipy.integrate import quad

from stillroom.engine.confidence_sequence import is_surely_above, is_surely_below, upper_bound
from stillroom.engine.reuse_level import ALPHA

LIMIT = 0.25
ABOVE = [
    next((count for count in range(seen + 1) if is_surely_above(LIMIT, count, seen, ALPHA / 2)), seen + 1)
    for seen in range(1, 501)
]
"""Fewest disagreements that are significantly too many, by number of audits."""
BELOW = [
    next((count for count in range(seen, -1, -1) if is_surely_below(LIMIT / 2, count, seen, ALPHA / 2)), -1)
    for seen in range(1, 501)
]
"""Most disagreements that are significantly few enough, by number of audits."""


def running_counts(rate: float, num_runs: int) -> np.ndarray:
    differs = np.random.default_rng(11).random((num_runs, 500)) < rate
    return differs.cumsum(axis=1)


def test_false_alarms_stay_below_alpha_when_tested_after_every_audit() -> None:
    """2,000 runs of 500 audits at exactly the allowed rate of disagreement."""
    false_alarms = (running_counts(LIMIT, 2000) >= ABOVE).any(axis=1).mean()
    assert false_alarms <= ALPHA


def test_wrong_lowerings_stay_below_alpha_when_tested_after_every_audit() -> None:
    wrong = (running_counts(LIMIT / 2, 2000) <= BELOW).any(axis=1).mean()
    assert wrong <= ALPHA


def test_bad_rate_is_detected_within_150_audits() -> None:
    found = running_counts(0.5, 2000) >= ABOVE
    assert found[:, :150].any(axis=1).mean() > 0.99
    assert np.median(found.argmax(axis=1) + 1) <= 35


def test_good_rate_is_confirmed_within_300_audits() -> None:
    assert (running_counts(0.02, 2000) <= BELOW)[:, :300].any(axis=1).mean() > 0.99


def test_upper_bound_covers_the_rate_at_all_times() -> None:
    rate = 0.1
    bounds = {}
    escapes = 0
    for counts in running_counts(rate, 200):
        for seen, count in enumerate(counts.tolist(), 1):
            pair = (count, seen)
            if count < rate * seen and pair not in bounds:
                bounds[pair] = upper_bound(count, seen, ALPHA)
        escapes += any(bounds.get((count, seen), 1.0) < rate for seen, count in enumerate(counts.tolist(), 1))
    assert escapes / 200 <= ALPHA


@pytest.mark.parametrize(("count", "seen"), [(0, 1), (3, 40), (7, 500)])
def test_bound_is_where_the_averaged_likelihood_ratio_reaches_its_limit(count: int, seen: int) -> None:
    bound = upper_bound(count, seen, ALPHA)
    mixture, _ = quad(lambda rate: rate**count * (1 - rate) ** (seen - count), 0, 1, epsabs=0, points=[count / seen])
    assert mixture / (bound**count * (1 - bound) ** (seen - count)) == pytest.approx(1 / ALPHA, rel=1e-6)
    assert is_surely_below(bound + 1e-9, count, seen, ALPHA)
    assert not is_surely_below(bound - 1e-9, count, seen, ALPHA)


def test_bounds_at_the_ends_of_the_range() -> None:
    assert upper_bound(0, 0, ALPHA) == upper_bound(5, 5, ALPHA) == 1.0
    assert is_surely_above(0.0, 1, 1000, ALPHA), "no disagreement is allowed"
    assert not is_surely_above(0.0, 0, 1000, ALPHA)
    assert not is_surely_above(1.0, 1000, 1000, ALPHA), "every answer may differ"
    assert not is_surely_below(0.0, 0, 1000, ALPHA)
