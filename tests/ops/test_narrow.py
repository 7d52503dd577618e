"""KV in 8 and 4 bits against exact arithmetic, and its kernels against torch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stillroom.ops import cpu_narrow
from stillroom.ops.narrow import (
    GROUP_SIZE,
    NarrowKV,
    Rotation,
    compile_kernels,
    narrow,
    narrow_by_torch,
    narrow_views,
    num_narrow_bytes,
    widen_into,
    widened,
)
from stillroom.ops.rope import rotate, rotation_from_zero

LAYERS, HEADS, DIM = 2, 3, 8
DTYPES = [torch.float32, torch.bfloat16]
INV_FREQ = torch.tensor([[1.0, 0.3, 0.01]] * LAYERS)  # the last two of eight dimensions are not rotated


def random_kv(num_tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """KV with channels and tokens of very different size."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, LAYERS, num_tokens, HEADS, DIM, generator=generator)
    kv[0] *= torch.logspace(-3, 2, DIM)
    kv[1] *= torch.logspace(-2, 2, num_tokens)[:, None, None]
    return kv.to(dtype)


def empty(num_tokens: int, num_bits: int) -> NarrowKV:
    size = (LAYERS, num_tokens, HEADS, DIM)
    return narrow_views(torch.zeros(num_narrow_bytes(size, num_bits), dtype=torch.uint8), size, num_bits)


def before_rotation(kv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cos, sin = (values[:, :, None] for values in rotation)
    return torch.stack((rotate(kv[0].float(), cos, -sin), kv[1].float()))


@given(st.integers(1, 2 * GROUP_SIZE + 3), st.sampled_from([8, 4]), st.integers(0, 5000), st.integers(0, 9))
def test_no_number_is_further_off_than_half_a_step(num_tokens: int, num_bits: int, position: int, seed: int) -> None:
    kv, rotation = random_kv(num_tokens, seed=seed), rotation_from_zero(num_tokens, INV_FREQ, position)
    found = empty(num_tokens, num_bits)
    narrow(kv, rotation, found)
    exact = before_rotation(kv, rotation)
    still = (torch.ones_like(rotation[0]), torch.zeros_like(rotation[1]))
    off = (widened(found, still, torch.float32) - exact).abs()
    for first in range(0, num_tokens, GROUP_SIZE):
        keys = exact[0, :, first : first + GROUP_SIZE]
        limit = _half_step(keys.amin(1), keys.amax(1), num_bits)
        assert (off[0, :, first : first + GROUP_SIZE].amax(1) <= limit).all()
    assert (off[1].amax(-1) <= _half_step(exact[1].amin(-1), exact[1].amax(-1), num_bits)).all()


def _half_step(least: torch.Tensor, most: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Half a step, with what the step and the low are rounded by."""
    rounded_off = torch.maximum(most, -least) / 128
    return (most - least + rounded_off) / ((1 << num_bits) - 1) / 2 * 1.01 + 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bits", [8, 4])
def test_the_kernels_agree_with_torch(dtype: torch.dtype, num_bits: int) -> None:
    num_tokens = GROUP_SIZE + 7
    kv, rotation = random_kv(num_tokens, dtype), rotation_from_zero(num_tokens, INV_FREQ, 300)
    by_kernel, by_torch = empty(num_tokens, num_bits), empty(num_tokens, num_bits)
    narrow(kv, rotation, by_kernel)
    narrow_by_torch(kv, rotation, by_torch)
    for one, other in zip(by_kernel.tensors, by_torch.tensors, strict=True):
        if one.dtype == torch.bfloat16:
            torch.testing.assert_close(one, other, rtol=2**-7, atol=0.0)  # a step that is rounded up once more
    torch.testing.assert_close(by_kernel.k_codes_LTGC.float() % 16, by_torch.k_codes_LTGC.float() % 16, rtol=0, atol=15)
    to = rotation_from_zero(num_tokens, INV_FREQ, 5)
    slots = torch.randperm(2 * num_tokens, generator=torch.Generator().manual_seed(1))[:num_tokens]
    for is_alone in (True, False):
        keys, values = (torch.full((LAYERS, 2 * num_tokens, HEADS, DIM), 7.0, dtype=dtype) for _ in range(2))
        widen_into(by_kernel, to, (keys, values), slots.numpy(), is_alone=is_alone)
        expected = widened(by_kernel, to, dtype)
        found = torch.stack((keys[:, slots], values[:, slots]))
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-4)
        others = [slot for slot in range(2 * num_tokens) if slot not in set(slots.tolist())]
        assert (keys[:, others] == 7).all() and (values[:, others] == 7).all()


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 1e-35, -3.0, 3e38])
def test_equal_numbers_of_any_size_stay_finite(num_bits: int, value: float) -> None:
    kv, rotation = torch.full((2, LAYERS, 3, HEADS, DIM), value), rotation_from_zero(3, INV_FREQ, 0)
    for way in (narrow, narrow_by_torch):
        found = empty(3, num_bits)
        way(kv, rotation, found)
        values = widened(found, rotation, torch.float32)[1]
        assert values.isfinite().all()
        torch.testing.assert_close(values, kv[1], rtol=0.01, atol=1e-20)


def test_sizes() -> None:
    """Step and low for 64 keys of a channel and for a token's values: 4 bytes."""
    size = (30, 192, 3, 64)
    numbers = 2 * 30 * 192 * 3 * 64
    assert num_narrow_bytes(size, 8) == numbers + numbers // 64 * 4
    assert num_narrow_bytes(size, 4) == numbers // 2 + numbers // 64 * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_kernels_serve_placing_without_another_compilation(dtype: torch.dtype) -> None:
    compile_kernels(dtype)
    kernels: list[Any] = [cpu_narrow.narrow_into, cpu_narrow.widen_into, cpu_narrow.widen_into_single_threaded]
    before = [len(kernel.signatures) for kernel in kernels]
    rotation = rotation_from_zero(9, INV_FREQ, 3)
    found = empty(9, 8)
    narrow(random_kv(9, dtype), rotation, found)
    targets = (torch.zeros(LAYERS, 16, HEADS, DIM, dtype=dtype), torch.zeros(LAYERS, 16, HEADS, DIM, dtype=dtype))
    for is_alone in (True, False):
        widen_into(found, rotation, targets, torch.arange(9).numpy(), is_alone=is_alone)
    assert [len(kernel.signatures) for kernel in kernels] == before
