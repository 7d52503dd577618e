"""The compiled vector operations beside numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from stillroom.ops import cpu_blocks, cpu_vectors
from stillroom.ops.cpu_compiler import kernel

Floats = NDArray[np.float32]


def bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    bits: NDArray[np.uint16] = (
        torch.from_numpy(np.asarray(values, np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()
    )
    return bits


def widened(bits: NDArray[np.uint16]) -> Floats:
    found: Floats = torch.from_numpy(bits).view(torch.bfloat16).float().numpy()
    return found


@kernel
def _power(x: Floats, out: Floats) -> None:
    cpu_vectors.store(out, 0, cpu_vectors.power_of_two(cpu_vectors.load(x, 0)))


@kernel
def _pairs(low: Floats, high: Floats, out: NDArray[np.uint32]) -> None:
    cpu_vectors.store_pairs(out, 0, cpu_vectors.load(low, 0), cpu_vectors.load(high, 0))


@kernel
def _interleave(halves: NDArray[np.uint16], low_at: int, high_at: int, out: NDArray[np.uint32]) -> None:
    cpu_vectors.interleave(out, 0, halves, low_at, high_at)


@kernel
def _choose(x: Floats, low: Floats, high: Floats, out: Floats) -> bool:
    a, b, c = cpu_vectors.load(x, 0), cpu_vectors.load(low, 0), cpu_vectors.load(high, 0)
    cpu_vectors.store(out, 0, cpu_vectors.where_between(a, b, a, c, cpu_vectors.splat(np.float32(-7))))
    is_above: bool = cpu_vectors.any_greater(a, c)
    return is_above


_block = cpu_blocks.dot_block(4, 32)


@kernel
def _multiply(
    sums: Floats, x: NDArray[np.uint16], x_at: NDArray[np.int64], y: NDArray[np.uint32], is_added: bool
) -> None:
    _block(sums, 0, y.shape[1], x, x_at, 2, y, 0, y.shape[0], is_added)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_power_of_two_is_close_over_its_range(rng: np.random.Generator) -> None:
    for x in (rng.uniform(-126, 126, 16), rng.uniform(-1, 1, 16), np.linspace(-8, 0, 16)):
        out = np.empty(16, np.float32)
        _power(x.astype(np.float32), out)
        np.testing.assert_allclose(out, np.exp2(x.astype(np.float32).astype(np.float64)), rtol=4e-6)


def test_power_of_two_has_a_twin_without_avx512(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.concatenate([rng.uniform(-126, 126, 12), [0, -1e30, np.nan, -126.5]]).astype(np.float32)
    out, twin = np.empty(16, np.float32), np.empty(16, np.float32)
    _power(x, out)
    monkeypatch.setattr(cpu_vectors, "_HAS_SCALE", False)

    @kernel
    def power(x: Floats, out: Floats) -> None:
        cpu_vectors.store(out, 0, cpu_vectors.power_of_two(cpu_vectors.load(x, 0)))

    power(x, twin)
    np.testing.assert_allclose(out, twin, rtol=1e-6, atol=2.0**-126)


def test_power_of_two_is_exact_for_whole_numbers_and_tiny_far_below() -> None:
    x = np.array([0, 1, -1, 5, -126, -127, -1e30, -1e20] * 2, np.float32)
    out = np.empty(16, np.float32)
    _power(x, out)
    assert out[:5].tolist() == [1, 2, 0.5, 32, 2.0**-126]
    assert all(0 <= power <= 2.0**-126 for power in out[5:8].tolist())


def test_pairs_are_rounded_to_nearest_even_as_torch_rounds(rng: np.random.Generator) -> None:
    low, high = (rng.standard_normal(16).astype(np.float32) for _ in range(2))
    low[0] = np.float32(1 + 2.0**-8)  # a tie
    out = np.empty(16, np.uint32)
    _pairs(low, high, out)
    assert out.view(np.uint16).reshape(16, 2)[:, 0].tolist() == bfloat16(low).tolist()
    assert out.view(np.uint16).reshape(16, 2)[:, 1].tolist() == bfloat16(high).tolist()


def test_missing_row_is_interleaved_as_zeros(rng: np.random.Generator) -> None:
    halves = rng.integers(0, 2**16, 48).astype(np.uint16)
    out = np.empty(16, np.uint32)
    _interleave(halves, 16, 32, out)
    assert out.view(np.uint16).reshape(16, 2).T.tolist() == [halves[16:32].tolist(), halves[32:].tolist()]
    _interleave(halves, 16, -1, out)
    assert out.view(np.uint16).reshape(16, 2).T.tolist() == [halves[16:32].tolist(), [0] * 16]


def test_bounds_hold_the_lower_and_not_the_upper_end() -> None:
    x = np.arange(16, dtype=np.float32)
    out = np.empty(16, np.float32)
    assert _choose(x, np.full(16, 3, np.float32), np.full(16, 9, np.float32), out)
    assert out.tolist() == [-7.0] * 3 + x[3:9].tolist() + [-7.0] * 7
    assert not _choose(x, np.full(16, 3, np.float32), np.full(16, 15, np.float32), out)


@pytest.mark.parametrize("is_added", [False, True])
def test_block_of_products_sums_bfloat16_in_float32(rng: np.random.Generator, is_added: bool) -> None:
    x, y = bfloat16(rng.standard_normal((9, 40))), bfloat16(rng.standard_normal((40, 32)))
    pairs = np.ascontiguousarray(y.reshape(20, 2, 32).transpose(0, 2, 1)).view(np.uint32)[:, :, 0]
    rows = np.array([8, 1, 1, 5])
    before = rng.standard_normal((4, 32)).astype(np.float32)
    sums = before.copy()
    _multiply(sums, x, rows * 40, np.ascontiguousarray(pairs), is_added)
    expected = widened(x)[rows].astype(np.float64) @ widened(y) + before * is_added
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not cpu_vectors.HAS_DOT, reason="this processor has no other way")
def test_products_without_the_instruction_are_the_same(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(cpu_vectors, "HAS_DOT", False)
    block = cpu_blocks.dot_block(4, 16)

    @kernel
    def multiply(sums: Floats, x: NDArray[np.uint16], x_at: NDArray[np.int64], y: NDArray[np.uint32]) -> None:
        block(sums, 0, 16, x, x_at, 2, y, 0, y.shape[0], False)

    x, y = bfloat16(rng.standard_normal((4, 8))), bfloat16(rng.standard_normal((8, 16)))
    pairs = np.ascontiguousarray(y.reshape(4, 2, 16).transpose(0, 2, 1)).view(np.uint32)[:, :, 0]
    sums = np.empty((4, 16), np.float32)
    multiply(sums, x, np.arange(4) * 8, np.ascontiguousarray(pairs))
    np.testing.assert_allclose(sums, widened(x).astype(np.float64) @ widened(y), rtol=1e-5, atol=1e-5)
    out, values = np.empty(16, np.uint32), rng.standard_normal(16).astype(np.float32)

    @kernel
    def pairs_of(low: Floats, out: NDArray[np.uint32]) -> None:
        cpu_vectors.store_pairs(out, 0, cpu_vectors.load(low, 0), cpu_vectors.load(low, 0))

    pairs_of(values, out)
    assert out.view(np.uint16)[::2].tolist() == bfloat16(values).tolist()
