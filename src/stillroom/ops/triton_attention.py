"""Triton kernels of `device_attention` and their launch. Needs triton.

One program computes one tile for the query heads of one key/value head: up to `block_m // group` queries of one
sequence, all heads of the group stacked, so that keys and values are read once. It reads the slots and the number of
keys from device tensors, so a launch can be captured in a CUDA graph. Softmax is computed online (arXiv 2205.14135).
For a few decoding rows the context is split, one program per split, and a second kernel merges the splits.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

# N tiles, T packed query tokens, C slots of all contexts back to back, S slots, H query heads, G key/value heads,
# D head dimension, P splits of a context

_LOG2_E = math.log2(math.e)  # exponentials are to the base 2, for which GPUs have an instruction

OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
"""Compiler options, the same for all GPUs."""


@triton.jit
def _attend(  # noqa: PLR0913 -- a kernel has no structures
    q_THD,
    k_SGD,
    v_SGD,
    out_THD,
    partial_THPD,
    statistics_THP2,
    tiles_N4,
    slots_C,
    factor,
    cap_factor,
    window,
    slot_stride,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1) * GROUP
    first_row = tl.load(tiles_N4 + tile * 4)
    num_rows = tl.load(tiles_N4 + tile * 4 + 1)
    context = slots_C + tl.load(tiles_N4 + tile * 4 + 2)
    num_keys = tl.load(tiles_N4 + tile * 4 + 3)

    # query and head of each of the M rows of this tile's matrices
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = m // GROUP
    is_row = row < num_rows
    is_dim = d < HEAD_DIM
    position = num_keys - num_rows + row
    lines = (first_row + row) * num_heads + kv_head * GROUP + m % GROUP
    q = tl.load(q_THD + lines[:, None] * HEAD_DIM + d[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)

    begin = num_keys * 0  # a zero of the same type
    if HAS_WINDOW:  # no query of the tile sees an earlier key
        begin = tl.maximum(num_keys - num_rows - window + 1, 0)
    end = num_keys
    if NUM_SPLITS > 1:
        width = tl.cdiv(tl.cdiv(num_keys - begin, NUM_SPLITS), BLOCK_N) * BLOCK_N
        begin += split * width
        end = tl.minimum(begin + width, num_keys)

    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        is_key = n < end
        slot = tl.load(context + n, mask=is_key, other=0).to(tl.int64)
        offsets = slot[:, None] * slot_stride + kv_head * head_stride + d[None, :]
        is_element = is_key[:, None] & is_dim[None, :]
        k = tl.load(k_SGD + offsets, mask=is_element, other=0.0).to(q.dtype)
        v = tl.load(v_SGD + offsets, mask=is_element, other=0.0).to(q.dtype)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_CAP:  # factor * tanh(logits * cap_factor); tanh is 1 in float32 beyond 30, and exp may overflow
            logits = 1.0 - 2.0 / (tl.exp(tl.minimum(2.0 * logits * cap_factor, 30.0)) + 1.0)
        seen = is_key[None, :] & (n[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (n[None, :] > position[:, None] - window)
        logits = tl.where(seen, logits * factor, -float("inf"))
        higher = tl.maximum(best, tl.max(logits, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # for a row that has seen no key yet
        weights = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(best - shift)
        total = total * decay + tl.sum(weights, 1)
        mixed = mixed * decay[:, None] + tl.dot(weights.to(q.dtype), v, input_precision=PRECISION)
        best = higher

    is_output = is_row[:, None] & is_dim[None, :]
    if NUM_SPLITS > 1:
        parts = lines * NUM_SPLITS + split
        tl.store(partial_THPD + parts[:, None] * HEAD_DIM + d[None, :], mixed, mask=is_output)
        tl.store(statistics_THP2 + parts * 2, best, mask=is_row)
        tl.store(statistics_THP2 + parts * 2 + 1, total, mask=is_row)
    else:
        mixed = mixed / tl.where(is_row, total, 1.0)[:, None]
        tl.store(out_THD + lines[:, None] * HEAD_DIM + d[None, :], mixed.to(q.dtype), mask=is_output)


@triton.jit
def _merge(
    partial_THPD,
    statistics_THP2,
    out_THD,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Merge the splits of one head of one row: rescale each to the common maximum, and add."""
    line = tl.program_id(0).to(tl.int64)
    parts = line * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    d = tl.arange(0, BLOCK_D)
    is_dim = d < HEAD_DIM
    best = tl.load(statistics_THP2 + parts * 2)
    total = tl.load(statistics_THP2 + parts * 2 + 1)
    partial = tl.load(partial_THPD + parts[:, None] * HEAD_DIM + d[None, :], mask=is_dim[None, :], other=0.0)
    weight = tl.exp2(best - tl.max(best, 0))  # 0 for a split without keys
    mixed = tl.sum(partial * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out_THD + line * HEAD_DIM + d, mixed.to(out_THD.dtype.element_ty), mask=is_dim)


def attend_tiles(
    q_THD: torch.Tensor,
    kv_SGD: tuple[torch.Tensor, torch.Tensor],
    tiles: tuple[torch.Tensor, torch.Tensor],
    shape: tuple[int, int],
    limits: tuple[float, int | None, float | None],
) -> torch.Tensor:
    """Launch `device_attention.DevicePlan.attend`.

    Args:
        tiles: the plan's two tensors.
        shape: queries per tile, and splits.
        limits: scale, window and soft cap.
    """
    (tiles_N4, slots_C), (num_queries, num_splits), (scale, window, softcap) = tiles, shape, limits
    (num_tokens, num_heads, head_dim), num_kv_heads = q_THD.shape, kv_SGD[0].shape[1]
    assert kv_SGD[0].stride() == kv_SGD[1].stride() and kv_SGD[0].stride(2) == 1
    assert num_splits == 1 or num_queries == 1, "only single rows are split"
    sizes = block_sizes(num_heads // num_kv_heads, head_dim, num_queries, q_THD.dtype)
    q_THD = q_THD.contiguous()
    out_THD = torch.empty_like(q_THD)
    partial = statistics = out_THD
    if num_splits > 1:
        partial = q_THD.new_empty((num_tokens, num_heads, num_splits, head_dim), dtype=torch.float32)
        statistics = q_THD.new_empty((num_tokens, num_heads, num_splits, 2), dtype=torch.float32)
    _attend[(len(tiles_N4), num_kv_heads, num_splits)](
        q_THD,
        *kv_SGD,
        out_THD,
        partial,
        statistics,
        tiles_N4,
        slots_C,
        (softcap or scale) * _LOG2_E,
        scale / (softcap or 1.0),
        window or 0,
        kv_SGD[0].stride(0),
        kv_SGD[0].stride(1),
        **sizes,
        NUM_SPLITS=num_splits,
        HAS_WINDOW=window is not None,
        HAS_CAP=softcap is not None,
        **OPTIONS,
    )
    if num_splits > 1:
        lines = (num_tokens * num_heads,)
        head = {"HEAD_DIM": head_dim, "BLOCK_D": sizes["BLOCK_D"]}
        _merge[lines](partial, statistics, out_THD, **head, NUM_SPLITS=num_splits, **OPTIONS)
    return out_THD


def block_sizes(group: int, head_dim: int, num_queries: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the kernel's constants.

    Queries take at most 32 KiB, keys and values 16 KiB each: with the next keys and values in flight they fit into the
    shared memory of every GPU since Ampere (at least 99 KiB).
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_M": max(16, triton.next_power_of_2(num_queries * group)),
        "BLOCK_N": max(16, min(64, 2**14 // (block_d * dtype.itemsize))),
        "BLOCK_D": block_d,
        # tf32 would round float32 to 10 bits of mantissa
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
