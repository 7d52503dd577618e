"""Triton kernel of `device_experts`: multiplies each row with one of many matrices. Needs triton.

A tensor holds the addresses of the matrices.
"""

from typing import Any

import torch
import triton
import triton.language as tl

# N tiles, R rows (token, choice) sorted by expert, E experts, K inputs, O outputs

OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}


@triton.jit
def _multiply(  # noqa: PLR0913 -- a kernel has no structures
    x,
    addresses_E,
    tiles_N3,
    order_R,
    out,
    num_inputs,
    num_outputs,
    NUM_ACTIVE: tl.constexpr,
    IS_FIRST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The first product of an MLP reads rows of tokens and writes sorted rows; the last product does the reverse."""
    tile = tl.program_id(0)
    expert = tl.load(tiles_N3 + tile * 3)
    begin = tl.load(tiles_N3 + tile * 3 + 1)
    end = tl.load(tiles_N3 + tile * 3 + 2)
    if begin < end:
        rows = begin + tl.arange(0, BLOCK_R)
        is_row = rows < end
        assignments = tl.load(order_R + rows, mask=is_row, other=0)
        sources, targets = rows, assignments
        if IS_FIRST:
            sources, targets = assignments // NUM_ACTIVE, rows
        o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
        is_output = o < num_outputs
        # without known alignment of 16 bytes each weight would be loaded separately
        weight = tl.multiple_of(tl.load(addresses_E + expert).to(tl.pointer_type(x.dtype.element_ty)), 16)
        total = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
        for first in range(0, num_inputs, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            is_input = k < num_inputs
            x_RK = tl.load(
                x + sources[:, None] * num_inputs + k[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
            )
            w_OK = tl.load(
                weight + o[:, None].to(tl.int64) * num_inputs + k[None, :],
                mask=is_output[:, None] & is_input[None, :],
                other=0.0,
            )
            total += tl.dot(x_RK, tl.trans(w_OK), input_precision=PRECISION)
        offsets = targets[:, None] * num_outputs + o[None, :]
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def multiply(
    x: torch.Tensor,
    addresses_E: torch.Tensor,
    tiles_N3: torch.Tensor,
    order_R: torch.Tensor,
    shape: tuple[int, int, int],
    is_first: bool,
) -> torch.Tensor:
    """Return each row times its expert's matrix, [R, O]; `shape` is (outputs, rows per tile, experts per token)."""
    num_outputs, block_r, num_active = shape
    x = x.contiguous()
    out = x.new_empty((len(order_R), num_outputs))
    sizes = block_sizes(block_r, x.dtype)
    _multiply[(len(tiles_N3), triton.cdiv(num_outputs, sizes["BLOCK_O"]))](
        x,
        addresses_E,
        tiles_N3,
        order_R,
        out,
        x.shape[1],
        num_outputs,
        NUM_ACTIVE=num_active,
        IS_FIRST=is_first,
        **sizes,
        **OPTIONS,
    )
    return out


def block_sizes(block_r: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the kernel's constants; float32 is not rounded to tf32."""
    precision = "ieee" if dtype == torch.float32 else "tf32"
    return {"BLOCK_R": block_r, "BLOCK_O": 64, "BLOCK_K": 128 // dtype.itemsize, "PRECISION": precision}
