"""Hit-rate model against draws, brute force and worked examples."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.retrieval.tiers.hit_rates import (
    HitRates,
    SearchTimes,
    expected_minimum,
    expected_minimum_by_paper,
)

PMF = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6).map(lambda weights: np.array(weights) / sum(weights))


@given(PMF, st.integers(1, 4))
def test_the_expected_minimum_is_that_of_all_outcomes(pmf: np.ndarray, batch_size: int) -> None:
    expected = sum(
        min(outcome) * float(np.prod(pmf[list(outcome)])) for outcome in product(range(len(pmf)), repeat=batch_size)
    )
    assert expected_minimum(pmf, batch_size) == pytest.approx(expected)


def test_the_papers_formula_counts_equal_draws_wrongly() -> None:
    pmf = np.array([0.0, 0.0, 1.0])  # every query hits two of two
    assert expected_minimum(pmf, 4) == 2.0
    assert expected_minimum_by_paper(pmf, 4) == 0.0
    fine = HitRates(2000, 3.0, 2.0).pmf()  # so many values that hardly two are equal
    assert expected_minimum_by_paper(fine, 4) == pytest.approx(expected_minimum(fine, 4), rel=0.01)


@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 3.0), (8.0, 2.0), (0.5, 0.5)])
def test_fit_recovers_the_drawn_distribution(alpha: float, beta: float) -> None:
    rng = np.random.default_rng(0)
    drawn = rng.binomial(32, rng.beta(alpha, beta, size=20_000))
    fitted = HitRates.fit(drawn, 32)
    assert fitted.mean == pytest.approx(alpha / (alpha + beta), rel=0.02)
    assert [fitted.alpha, fitted.beta] == pytest.approx([alpha, beta], rel=0.1)
    assert fitted.pmf().sum() == pytest.approx(1.0)


@pytest.mark.parametrize("num_fast", [[3, 3, 3, 3], [0, 0], [8, 8], [0, 8]])
def test_a_fit_of_extremes_is_a_distribution(num_fast: list[int]) -> None:
    fitted = HitRates.fit(np.array(num_fast), 8)
    assert fitted.alpha > 0 and fitted.beta > 0
    assert fitted.mean == pytest.approx(np.mean(num_fast) / 8, abs=1e-5)


def test_times_by_hand() -> None:
    times = SearchTimes((1, 4), (1.0, 2.5), (4.0, 10.0), dispatch_seconds=0.25)
    assert (times.coarse(2), times.scan(2), times.scan(6)) == (1.5, 6.0, 14.0)
    assert times.batch_seconds(4, 0.5) == 2.5 + 5.0 + 1.0
