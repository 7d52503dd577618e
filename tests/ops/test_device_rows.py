"""Rotation with storing, and the gate, on a GPU equal torch's operators."""

import pytest
import torch

from stillroom.ops.rope import rotate, rotate_and_store
from stillroom.ops.row_kernels import gate
from tests.gpu_kernels import DEVICE, HALF_PRECISION, use_kernels

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, *HALF_PRECISION])


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@DTYPES
@pytest.mark.parametrize(
    ("heads", "head_dim", "num_pairs"), [((4, 2), 8, 4), ((3, 1), 16, 5), ((1, 1), 24, 12), ((2, 2), 16, 1)]
)
def test_rotation_is_rounded_once_and_writes_its_slots_only(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, num_pairs: int
) -> None:
    num_heads, num_kv_heads = heads
    qkv = drawn(5, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = drawn(5, 1, num_pairs, seed=1)
    rotation = angles.cos(), angles.sin()
    slots = torch.tensor([7, 0, 3, 9, 2], device=DEVICE)
    pool = torch.full((2, 10, num_kv_heads, head_dim), 99.0, dtype=dtype, device=DEVICE)
    q = rotate_and_store(qkv, rotation, slots, (pool[0], pool[1]))
    wide = qkv.float()
    # a GPU adds a product without rounding it first, so a number between two others may go to the other one
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(q, rotate(wide[:, :num_heads], *rotation).to(dtype), rtol=tolerance, atol=tolerance)
    keys = rotate(wide[:, num_heads : num_heads + num_kv_heads], *rotation).to(dtype)
    torch.testing.assert_close(pool[0, slots], keys, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pool[1, slots], qkv[:, num_heads + num_kv_heads :], rtol=0, atol=0)
    others = [slot for slot in range(10) if slot not in slots.tolist()]
    assert (pool[:, others] == 99.0).all()


@DTYPES
@pytest.mark.parametrize("width", [3, 1024, 1500])
def test_gate_is_rounded_once(dtype: torch.dtype, width: int) -> None:
    gate_up = (4 * drawn(3, 2 * width)).to(dtype)
    gates, up = gate_up.float().chunk(2, dim=-1)
    expected = (torch.nn.functional.silu(gates) * up).to(dtype)
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(gate(gate_up, "silu"), expected, rtol=tolerance, atol=1e-6)
