"""Products with weights of four bits, beside those of the rounded weights in double precision."""

from typing import Any, cast

import numba
import numpy as np
import pytest
import torch
from scipy import stats

from stillroom.ops import cpu_codes, cpu_kernels
from stillroom.ops import linear as linear_module
from stillroom.ops.cpu_codes import BLOCK, LEVELS
from stillroom.ops.linear import Linear
from tests.ops.test_cpu_kernels import drawn

SHAPES = [(1, 64), (6, 128), (301, 192)]


def rounded(linear: Linear) -> torch.Tensor:
    """The weights that the codes and scales stand for, float64 [N, M]."""
    assert linear.scale is not None
    codes = linear.weight.numpy().astype(np.int64).reshape(len(linear.weight), -1, 1, BLOCK // 4)
    of_inputs = (codes >> np.arange(0, 16, 4)[:, None]) & 15
    levels = torch.from_numpy(LEVELS.astype(np.float64)[of_inputs]).flatten(2)
    return (levels * linear.scale.double()[..., None]).flatten(1)


def test_levels_are_those_of_the_paper() -> None:
    """Appendix E of arXiv:2305.14314, rounded: quantiles of a normal distribution, evenly spaced on each side of 0."""
    assert len(LEVELS) == 16 and (np.diff(LEVELS) > 0).all()
    ends = (1 - 1 / 30 + 1 - 1 / 32) / 2
    below, above = (stats.norm.ppf(np.linspace(ends, 0.5, count)) for count in (8, 9))
    expected = np.concatenate([-below[:-1], [0.0], above[:-1][::-1]]) / below[0]
    np.testing.assert_allclose(LEVELS, expected, rtol=2**-8)
    assert [LEVELS[0], LEVELS[7], LEVELS[15]] == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_weights_take_the_nearest_level_of_a_scale_that_loses_least(num_outputs: int, num_inputs: int) -> None:
    weight = drawn(num_outputs, num_inputs)
    linear = Linear.int4(torch.split(weight, 2))
    assert linear.scale is not None and linear.has_codes
    blocks = weight.double().view(num_outputs, -1, BLOCK)
    found = rounded(linear).view_as(blocks)
    scaled = linear.scale.double()[..., None] * torch.from_numpy(LEVELS).double()
    nearest = (blocks[..., None] - scaled[:, :, None, :]).abs().amin(-1)
    torch.testing.assert_close((found - blocks).abs(), nearest, atol=1e-6, rtol=0)
    whole = (blocks.abs().amax(-1, keepdim=True).bfloat16().double()[..., None] * torch.from_numpy(LEVELS)).squeeze(2)
    error_of_whole = (blocks[..., None] - whole[:, :, None, :]).abs().amin(-1).square().sum(-1)
    assert ((found - blocks).square().sum(-1) <= error_of_whole * 1.0001).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 17])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_products_are_those_of_the_rounded_weights(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool
) -> None:
    monkeypatch.setattr(linear_module, "most_rows_of_int4_kernel", lambda: 16)
    monkeypatch.setattr(linear_module, "is_float32_faster", lambda: True)
    x, bias = drawn(num_rows, num_inputs, seed=1), drawn(num_outputs, seed=2) if has_bias else None
    linear = Linear.int4([drawn(num_outputs, num_inputs).bfloat16()], bias)
    expected = x.double() @ rounded(linear).T + (bias.double() if bias is not None else 0.0)
    atol = 1e-4 if num_rows == 1 else 0.1  # several rows may be rounded to bfloat16, as may widened weights
    torch.testing.assert_close(linear(x).double(), expected, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_processors_without_the_instructions_compute_the_same(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    """The same kernel, with every instruction of AVX-512 left out."""
    x, linear = drawn(num_rows, 192, seed=1), Linear.int4([drawn(37, 192)])
    assert linear.kernel_arrays is not None
    (codes, scale), _ = linear.kernel_arrays
    monkeypatch.setattr(cpu_codes, "HAS_DOT", False)
    monkeypatch.setattr("stillroom.ops.cpu_vectors._HAS_SCALE", False)
    out = np.empty((num_rows, 37), np.float32)
    compiled_anew: Any = numba.njit(cast(Any, cpu_codes.linear_codes).py_func)  # not read from the cache
    compiled_anew(x.numpy(), codes, scale, out, 1)
    np.testing.assert_allclose(out, (x.double() @ rounded(linear).T).numpy(), atol=1e-3)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_widened_weights_are_the_rounded_ones(num_threads: int) -> None:
    linear = Linear.int4([drawn(37, 192)])
    assert linear.kernel_arrays is not None
    (codes, scale), _ = linear.kernel_arrays
    out = torch.empty((37, 192), dtype=torch.bfloat16)
    cpu_kernels.use_threads()
    cpu_codes.widen_codes(codes, scale, cpu_kernels.array(out), num_threads)
    assert torch.equal(out, rounded(linear).bfloat16())


def test_large_weights_are_widened_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, linear = drawn(20, 128, seed=1), Linear.int4([drawn(11, 128)])
    whole = linear._many_rows(x, torch.float32)
    monkeypatch.setattr(linear_module, "_MAX_WIDENED", 3 * 128)
    torch.testing.assert_close(linear._many_rows(x, torch.float32), whole, atol=1e-5, rtol=1e-5)


def test_blocks_of_zeros_stay_zeros() -> None:
    assert Linear.int4([torch.zeros(3, 64)])(torch.ones(2, 64)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_gives_nan(damage: float) -> None:
    """So the check at load finds damaged weights."""
    weight = drawn(3, 128)
    weight[1, 70] = damage
    found = Linear.int4([weight])(torch.ones(1, 128))[0]
    assert found[1].isnan() and found[[0, 2]].isfinite().all()
