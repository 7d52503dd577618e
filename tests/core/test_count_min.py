"""The sketch against exact counts."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.count_min import CountMinSketch, SketchShape

SMALL = SketchShape(width=7, depth=3)  # small enough that everything collides


@given(st.lists(st.integers(0, 30).map(lambda n: bytes([n])), max_size=300))
def test_estimate_never_underestimates(stream: list[bytes]) -> None:
    sketch = CountMinSketch(SMALL)
    for item in stream:
        returned = sketch.add(item)
        assert returned == sketch.estimate(item)
    counts = Counter(stream)
    assert all(sketch.estimate(item) >= count for item, count in counts.items())
    assert sketch.total == len(stream)


@given(st.lists(st.integers(0, 30).map(lambda n: bytes([n])), max_size=300), st.integers(1, 50))
def test_halving_keeps_at_least_the_halved_count(stream: list[bytes], halve_every: int) -> None:
    sketch, aged, since = CountMinSketch(SMALL, halve_every=halve_every), Counter[bytes](), 0
    for item in stream:
        sketch.add(item)
        aged[item] += 1
        since += 1
        if since == halve_every:
            aged, since = Counter({key: count // 2 for key, count in aged.items()}), 0
    assert all(sketch.estimate(item) >= count for item, count in aged.items())


def test_error_bound_holds_on_a_skewed_stream() -> None:
    shape = SketchShape(width=272, depth=5)  # epsilon 0.01, delta 0.007
    stream = np.random.default_rng(0).zipf(1.2, size=20_000) % 5000
    sketch, counts = CountMinSketch(shape), Counter(stream.tolist())
    for item in stream.tolist():
        sketch.add(str(item).encode())
    errors = np.array([sketch.estimate(str(item).encode()) - count for item, count in counts.items()])
    assert errors.min() >= 0
    assert (errors > shape.epsilon * len(stream)).mean() <= math.exp(-shape.depth)


def test_conservative_update_never_exceeds_the_plain_sketch() -> None:
    stream = [bytes([n % 23]) for n in range(500)]
    sketch, plain = CountMinSketch(SMALL), np.zeros((3, 7), dtype=int)
    for item in stream:
        sketch.add(item)
        for row, column in sketch._places(item):
            plain[row, column] += 1
    for item in set(stream):
        assert sketch.estimate(item) <= min(plain[place] for place in sketch._places(item))


@pytest.mark.parametrize(
    ("width", "depth", "epsilon", "num_bytes"),
    [(2048, 4, 0.00133, 32_768), (4096, 4, 0.00066, 65_536), (1024, 5, 0.00265, 20_480), (8192, 4, 0.00033, 131_072)],
)
def test_sizes_and_errors_equal_the_papers_table(width: int, depth: int, epsilon: float, num_bytes: int) -> None:
    shape = SketchShape(width, depth)
    assert shape.epsilon == pytest.approx(epsilon, abs=6e-6)
    assert shape.num_bytes == num_bytes
