"""Products of tiles beside numpy, and their independence of other rows and of the number of threads."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from stillroom.ops import cpu_kernels, cpu_products, cpu_tiles
from stillroom.ops.cpu_compiler import HAS_TILES, kernel

pytestmark = pytest.mark.skipif(not HAS_TILES, reason="this processor has no tiles")

Floats = NDArray[np.float32]


def bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    bits: NDArray[np.uint16] = (
        torch.from_numpy(np.asarray(values, np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()
    )
    return bits


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = torch.from_numpy(bits).view(torch.bfloat16).double().numpy()
    return found


_blocks = (cpu_tiles.tile_block(2, 2), cpu_tiles.tile_block(2, 1, prefetches=True))
_wide, _narrow = _blocks


@kernel
def _transpose(source: Any, source_at: int, target: Any) -> None:
    cpu_tiles.transpose(source, source_at, 2 * 20, target, 3, 17)


@kernel
def _multiply(sums: Floats, x: Any, at: Any, y: Any, is_added: bool) -> None:
    width = y.shape[1]
    cpu_tiles.configure_tiles(cpu_tiles.CONFIG)
    _wide(sums, 0, width, x, at, x.shape[1], y, 0, y.shape[0] // 16, is_added, at)
    _narrow(sums, 32, width, x, at, x.shape[1], y, 32, y.shape[0] // 16, is_added, at)
    cpu_tiles.release_tiles()


def test_words_are_transposed_where_they_lie(rng: np.random.Generator) -> None:
    source = rng.integers(0, 2**16, (16, 40)).astype(np.uint16)
    target = np.zeros(3 + 16 * 17, np.uint32)
    _transpose(source, 4, target)
    expected = source[:, 4:36].copy().view(np.uint32).T
    assert np.array_equal(target[3:].reshape(16, 17)[:, :16], expected)
    assert not target[:3].any()


@pytest.mark.parametrize("is_added", [False, True])
def test_tiles_far_apart_are_multiplied_and_added(rng: np.random.Generator, is_added: bool) -> None:
    x, y = bfloat16(rng.standard_normal((70, 64))), bfloat16(rng.standard_normal((64, 48)))
    pairs = np.ascontiguousarray(y.reshape(32, 2, 48).transpose(0, 2, 1)).view(np.uint32)[:, :, 0]
    before = rng.standard_normal((32, 48)).astype(np.float32)
    sums = before.copy()
    _multiply(sums, x, np.array([3, 51]) * 64, np.ascontiguousarray(pairs), is_added)
    rows = widened(np.concatenate([x[3:19], x[51:67]]))
    np.testing.assert_allclose(sums, rows @ widened(y) + before * is_added, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [2, 16, 17, 33, 50])
@pytest.mark.parametrize("num_outputs", [16, 33, 301])
def test_products_of_rows_are_those_of_bfloat16_numbers(num_rows: int, num_outputs: int) -> None:
    weight, x = _drawn(num_outputs, 96).to(torch.bfloat16), _drawn(num_rows, 96)
    found = _products(x, weight, 2)
    expected = x.to(torch.bfloat16).double() @ weight.double().T
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_row_has_the_same_bits_among_other_rows_and_with_other_threads() -> None:
    weight, x = _drawn(70, 320).to(torch.bfloat16), _drawn(40, 320)
    whole = _products(x, weight, 1)
    for num_rows, num_threads in ((2, 1), (5, 2), (16, 3), (31, 2), (40, 4)):
        assert torch.equal(_products(x[:num_rows], weight, num_threads), whole[:num_rows])
    assert torch.equal(_products(x[7:30].contiguous(), weight, 1), whole[7:30])


def test_number_that_is_not_finite_stays_in_its_row() -> None:
    weight, x = _drawn(32, 64).to(torch.bfloat16), _drawn(20, 64)
    x[5, 9] = torch.nan
    found = _products(x, weight, 1)
    assert found[5].isnan().all()
    assert found[[0, 4, 6, 19]].isfinite().all()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def _products(x: torch.Tensor, weight: torch.Tensor, num_threads: int) -> torch.Tensor:
    out = torch.empty(len(x), len(weight))
    cpu_kernels.use_threads()
    cpu_products.linear_bfloat16(x.numpy(), weight.view(torch.uint32).numpy(), out.numpy(), num_threads)
    return out
