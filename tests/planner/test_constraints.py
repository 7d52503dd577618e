"""VectorLiteRAG's constraints by hand, and the smallest hit rate against a search of all."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stillroom.planner.constraints import Shortfall, Sufficient, needed_rates, smallest_hit_rate


class Linear:
    """Eq. 5 and 6 where every query of a batch hits alike."""

    def __init__(self, coarse: float, scan: float) -> None:
        self.coarse, self.scan = coarse, scan

    def __call__(self, hit_rate: float, batch_size: int) -> float:
        return batch_size / (self.coarse + (1 - hit_rate) * self.scan * batch_size)


def test_needed_rates_of_a_worked_example() -> None:
    assert needed_rates(4, 3.0, 2.0) == (3.0, 4.0)  # 2 B / SLO


def test_model_throughput_sets_the_smallest_hit_rate() -> None:
    # batch 1: 1 / (0.1 + (1 - h) 0.4) >= 4 needs 0.1 + (1 - h) 0.4 <= 0.25, so h >= 0.625
    found = smallest_hit_rate(Linear(0.1, 0.4), [1], generated_per_second=4.0, slo_seconds=100.0)
    assert isinstance(found, Sufficient) and found.hit_rate == pytest.approx(0.63) and found.batch_size == 1


def test_latency_target_sets_the_smallest_hit_rate() -> None:
    # batch 2 takes 0.1 + (1 - h) 0.8; twice that within 1 s needs h >= 0.5; a batch of 1 cannot serve 3 per second
    found = smallest_hit_rate(Linear(0.1, 0.4), [2], generated_per_second=3.0, slo_seconds=1.0)
    assert isinstance(found, Sufficient) and found.hit_rate == pytest.approx(0.5)


def test_larger_batch_needs_a_smaller_hit_rate() -> None:
    rate = Linear(0.4, 0.1)
    found = smallest_hit_rate(rate, [1, 8], generated_per_second=5.0, slo_seconds=10.0)
    assert isinstance(found, Sufficient) and (found.batch_size, found.hit_rate) == (8, 0.0)
    assert isinstance(smallest_hit_rate(rate, [1], 5.0, 10.0), Shortfall)


def test_shortfall_names_the_binding_constraint() -> None:
    too_many = smallest_hit_rate(Linear(1.0, 1.0), [1], generated_per_second=5.0, slo_seconds=100.0)
    assert too_many == Shortfall("throughput", 5.0, 1.0)
    too_soon = smallest_hit_rate(Linear(1.0, 1.0), [1], generated_per_second=0.1, slo_seconds=0.5)
    assert too_soon == Shortfall("latency", 4.0, 1.0)


RATES = st.floats(0.05, 2.0)


@given(RATES, RATES, st.floats(0.1, 20.0), st.floats(0.1, 20.0))
@example(coarse=0.05, scan=0.5, generated=20.0, slo=0.5)
def test_smallest_hit_rate_equals_brute_force(coarse: float, scan: float, generated: float, slo: float) -> None:
    rate, sizes = Linear(coarse, scan), (1, 2, 8)
    found = smallest_hit_rate(rate, sizes, generated, slo, step=0.05)
    enough = [
        hit_rate
        for hit_rate in (min(1.0, number * 0.05) for number in range(21))  # rounded like those that are tried
        if any(rate(hit_rate, size) >= max(generated, 2 * size / slo) for size in sizes)
    ]
    if isinstance(found, Sufficient):
        assert found.hit_rate == pytest.approx(enough[0])
        assert found.queries_per_second >= max(needed_rates(found.batch_size, generated, slo))
    else:
        assert enough == [] and found.possible < found.needed
