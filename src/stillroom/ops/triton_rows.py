"""Triton kernels of what lies between a layer's products: rotation with storing, and the gate of the MLP. Needs triton.

Numbers are float32 between loading and storing, so that a result is rounded once. Launch counts decide the time of
short prompts on a GPU; each kernel replaces several of torch's operators, which stay as its reference.
"""

from typing import Any

import torch
import triton
import triton.language as tl

# T tokens, H query heads, G key/value heads, D head dimension, P pairs of rotated dimensions, S slots, I inner size

OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": True}
"""Compiler options of the rotation, the same for all GPUs."""
_BLOCK = 1024


@triton.jit
def _rotate_and_store(  # noqa: PLR0913 -- a kernel has no structures
    qkv_THD,
    cos_TP,
    sin_TP,
    slots_T,
    k_SGD,
    v_SGD,
    q_THD,
    slot_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per token and head: rotates a query or a key, or copies a value."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = qkv_THD + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    slot = tl.load(slots_T + token).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    if head >= NUM_HEADS + NUM_KV_HEADS:
        out = v_SGD + slot * slot_stride + (head - NUM_HEADS - NUM_KV_HEADS) * head_stride
        value = tl.load(row + d, mask=d < HEAD_DIM)
        tl.store(out + d, value.to(v_SGD.dtype.element_ty), mask=d < HEAD_DIM)
    else:
        p = tl.arange(0, BLOCK_P)
        is_pair = p < NUM_PAIRS
        cos = tl.load(cos_TP + token * NUM_PAIRS + p, mask=is_pair)
        sin = tl.load(sin_TP + token * NUM_PAIRS + p, mask=is_pair)
        first = tl.load(row + p, mask=is_pair).to(tl.float32)
        second = tl.load(row + NUM_PAIRS + p, mask=is_pair).to(tl.float32)
        turned_first, turned_second = first * cos - second * sin, second * cos + first * sin
        is_rest = (d >= 2 * NUM_PAIRS) & (d < HEAD_DIM)
        if head < NUM_HEADS:
            out = q_THD + (token * NUM_HEADS + head) * HEAD_DIM
            tl.store(out + p, turned_first.to(q_THD.dtype.element_ty), mask=is_pair)
            tl.store(out + NUM_PAIRS + p, turned_second.to(q_THD.dtype.element_ty), mask=is_pair)
            if 2 * NUM_PAIRS < HEAD_DIM:
                tl.store(out + d, tl.load(row + d, mask=is_rest), mask=is_rest)
        else:
            key = k_SGD + slot * slot_stride + (head - NUM_HEADS) * head_stride
            tl.store(key + p, turned_first.to(k_SGD.dtype.element_ty), mask=is_pair)
            tl.store(key + NUM_PAIRS + p, turned_second.to(k_SGD.dtype.element_ty), mask=is_pair)
            if 2 * NUM_PAIRS < HEAD_DIM:
                tl.store(key + d, tl.load(row + d, mask=is_rest).to(k_SGD.dtype.element_ty), mask=is_rest)


def rotate_and_store(
    qkv: torch.Tensor,
    cos_sin_T1P: tuple[torch.Tensor, torch.Tensor],
    slots_T: torch.Tensor,
    kv_SGD: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Launch `rope.rotate_and_store`; cosines and sines are float32."""
    num_tokens, num_rows, head_dim = qkv.shape
    num_kv_heads = kv_SGD[0].shape[1]
    num_heads = num_rows - 2 * num_kv_heads
    assert kv_SGD[0].stride() == kv_SGD[1].stride() and kv_SGD[0].stride(2) == 1
    cos, sin = (one.contiguous() for one in cos_sin_T1P)
    num_pairs = cos.shape[-1]
    q_THD = qkv.new_empty((num_tokens, num_heads, head_dim))
    _rotate_and_store[(num_tokens, num_rows)](
        qkv.contiguous(),
        cos,
        sin,
        slots_T,
        *kv_SGD,
        q_THD,
        kv_SGD[0].stride(0),
        kv_SGD[0].stride(1),
        **block_sizes(num_heads, num_kv_heads, head_dim, num_pairs),
        **OPTIONS,
    )
    return q_THD


def block_sizes(num_heads: int, num_kv_heads: int, head_dim: int, num_pairs: int) -> dict[str, int]:
    """Return the constants of the rotation."""
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "NUM_PAIRS": num_pairs,
        "BLOCK_P": triton.next_power_of_2(num_pairs),
        "BLOCK_D": triton.next_power_of_2(head_dim),
    }


@triton.jit
def _silu_gate(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_element = i < width
    gates = tl.load(gate_up + row * 2 * width + i, mask=is_element).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + i, mask=is_element).to(tl.float32)
    gated = gates / (1.0 + tl.exp(-gates)) * up
    tl.store(out + row * width + i, gated.to(out.dtype.element_ty), mask=is_element)


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Launch `row_kernels.gate` with silu: [T, 2 * I] -> [T, I]."""
    rows = gate_up.contiguous()
    num_rows, width = rows.shape[0], rows.shape[1] // 2
    out = rows.new_empty((num_rows, width))
    _silu_gate[(num_rows, triton.cdiv(width, _BLOCK))](rows, out, width, BLOCK=_BLOCK, num_warps=4)
    return out
