"""Attention of one query of each sequence (decoding): parts of contexts are computed, then merged (flash decoding).

Queries and softmax weights are float32, and keys and values of bfloat16 are widened in registers, for the query heads
that share them. A query's result depends neither on the other queries nor on the number of threads. Reference:
`attention.attend_reference`.
"""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from stillroom.ops.cpu_blocks import wide_block
from stillroom.ops.cpu_compiler import Bits, Floats, kernel, parallel_kernel
from stillroom.ops.cpu_elements import exp, read
from stillroom.ops.cpu_tiles import transpose
from stillroom.ops.cpu_vectors import IS_ONE_REGISTER, LANES, load, store

# B queries, H query heads, G key/value heads, D head dimension, S slots

SPLIT = 64
"""Context tokens of a task."""
_HEADS = 4
"""Query heads of a block. A block of fewer repeats the last one; its rows follow those of the others."""
_score_block = wide_block(_HEADS, SPLIT, has_pairs=True)
_VALUES = 64
_value_block = wide_block(_HEADS, _VALUES, has_pairs=False)


@parallel_kernel
def attend_rows(
    q_BHD: Floats,
    cache: tuple[Bits, Bits],
    contexts: tuple[Any, Any],
    splits: tuple[Any, Any],
    limits: Any,
    out_BHD: Floats,
) -> None:
    """Write the attention of each query over its context.

    Args:
        contexts: slots of all contexts back to back, and their bounds [B + 1].
        splits: from `split_contexts`.
        limits: float32 (scale, soft cap or 0, window or 0).
    """
    num_heads, head_dim = q_BHD.shape[1], q_BHD.shape[2]
    slots, starts = contexts
    tasks, bounds = splits
    num_tasks, scale, cap, window = tasks.shape[0], limits[0], limits[1], np.int64(limits[2])
    has_blocks = IS_ONE_REGISTER and cache[0].itemsize == 2 and head_dim % _VALUES == 0
    sums = np.zeros((num_tasks, num_heads + _HEADS - 1, head_dim), np.float32)
    highs = np.full((num_tasks, num_heads), -np.inf, np.float32)
    totals = np.zeros((num_tasks, num_heads), np.float32)
    for task in numba.prange(num_tasks):
        sequence, first = tasks[task, 0], starts[tasks[task, 0]] + tasks[task, 1]
        end = min(starts[sequence + 1], first + SPLIT)
        if window > 0:
            first = max(first, starts[sequence + 1] - window)
        if first < end:
            weights = np.empty((num_heads + _HEADS - 1, SPLIT), np.float32)
            if has_blocks:
                _score_blocks(q_BHD[sequence], cache[0], slots[first:end], weights)
            else:
                _score_numbers(q_BHD[sequence], cache[0], slots[first:end], weights)
            for head in range(num_heads):
                highs[task, head], totals[task, head] = _soften(weights[head, : end - first], scale, cap)
            if has_blocks:
                _sum_blocks(weights, cache[1], slots[first:end], sums[task])
            else:
                _sum_numbers(weights, cache[1], slots[first:end], sums[task])
    for sequence in numba.prange(q_BHD.shape[0]):
        parts = slice(bounds[sequence], bounds[sequence + 1])
        for head in range(num_heads):
            _merge(highs[parts, head], totals[parts, head], sums[parts, head], out_BHD[sequence, head])


@kernel
def _soften(logits: Floats, scale: Any, cap: Any) -> Any:
    """Replace products by the weights of the softmax; returns the highest logit and the sum of the weights."""
    high, total = np.float32(-np.inf), np.float32(0)
    for at in range(len(logits)):
        logits[at] *= scale
    if cap > 0:  # cap * tanh(logit / cap)
        for at in range(len(logits)):
            power = exp(np.float32(2) * logits[at] / cap)
            logits[at] = cap - np.float32(2) * cap / (power + np.float32(1))
    for at in range(len(logits)):
        high = max(high, logits[at])
    for at in range(len(logits)):
        logits[at] = exp(logits[at] - high)
        total += logits[at]
    return high, total


@kernel
def _merge(highs: Floats, totals: Floats, sums: Floats, out_D: Floats) -> None:
    """Write a head's attention from the highest logits, totals and sums of the parts of its context."""
    high, total = np.float32(-np.inf), np.float32(0)
    for part in range(len(highs)):
        high = max(high, highs[part])
    out_D[:] = 0
    for part in range(len(highs)):
        if totals[part] != 0:  # NaN stays NaN
            factor = exp(highs[part] - high)
            total += factor * totals[part]
            for i in range(len(out_D)):
                out_D[i] += factor * sums[part, i]
    for i in range(len(out_D)):
        out_D[i] /= total


@kernel
def _score_numbers(q_HD: Floats, k_SGD: Bits, slots: Any, logits: Floats) -> None:
    """Write the products of queries with the keys of these slots; [H, SPLIT]."""
    num_groups, head_dim = k_SGD.shape[1], k_SGD.shape[2]
    share = len(q_HD) // num_groups
    row = np.empty(head_dim, np.float32)
    for token in range(len(slots)):  # the keys of a token are contiguous, and are read once
        for group in range(num_groups):
            for i in range(head_dim):
                row[i] = read(k_SGD[slots[token], group, i])
            for head in range(group * share, (group + 1) * share):
                logit = np.float32(0)
                for i in range(head_dim):
                    logit += q_HD[head, i] * row[i]
                logits[head, token] = logit


@kernel
def _score_blocks(q_HD: Floats, k_SGD: Bits, slots: Any, logits: Floats) -> None:
    """As `_score_numbers`, of bfloat16: keys are turned, pairs of dimensions to rows and tokens to columns."""
    num_groups, head_dim = k_SGD.shape[1], k_SGD.shape[2]
    share, num_pairs = len(q_HD) // num_groups, head_dim // 2
    rows, columns = _copied(k_SGD, slots), np.empty((num_pairs, SPLIT), np.uint32)
    q_at, start = np.empty(_HEADS, np.int64), np.zeros(1, np.int64)
    for group in range(num_groups):
        for token in range(0, len(slots), LANES):
            for pair in range(0, num_pairs, LANES):
                at = (token * num_groups + group) * head_dim + 2 * pair
                transpose(rows, at, num_groups * head_dim, columns, pair * SPLIT + token, SPLIT)
        for first in range(group * share, (group + 1) * share, _HEADS):
            for i in range(_HEADS):
                q_at[i] = min(first + i, (group + 1) * share - 1) * head_dim
            _score_block(logits, first * SPLIT, SPLIT, q_HD, q_at, columns, start, num_pairs)


@kernel
def _copied(cache_SGD: Bits, slots: Any) -> Bits:
    """Return the rows of these slots, [SPLIT, G, D]: memory is read fastest in its own order."""
    num_groups, head_dim = cache_SGD.shape[1], cache_SGD.shape[2]
    width = num_groups * head_dim
    rows = np.empty((SPLIT, num_groups, head_dim), np.uint16)
    for token in range(len(slots)):
        for i in range(0, width, 2 * LANES):
            store(rows, token * width + i, load(cache_SGD, slots[token] * width + i))
    return rows


@kernel
def _sum_numbers(weights: Floats, v_SGD: Bits, slots: Any, sums: Floats) -> None:
    """Write the sum of the values of these slots, each times its weight, for each head."""
    num_groups, head_dim = v_SGD.shape[1], v_SGD.shape[2]
    share = (len(sums) - _HEADS + 1) // num_groups
    row = np.empty(head_dim, np.float32)
    for token in range(len(slots)):
        for group in range(num_groups):
            for i in range(head_dim):
                row[i] = read(v_SGD[slots[token], group, i])
            for head in range(group * share, (group + 1) * share):
                weight = weights[head, token]
                for i in range(head_dim):
                    sums[head, i] += weight * row[i]


@kernel
def _sum_blocks(weights: Floats, v_SGD: Bits, slots: Any, sums: Floats) -> None:
    """As `_sum_numbers`, of bfloat16."""
    num_groups, head_dim = v_SGD.shape[1], v_SGD.shape[2]
    share = (len(sums) - _HEADS + 1) // num_groups
    rows = _copied(v_SGD, slots)
    weights_at, values_at = np.empty(_HEADS, np.int64), np.empty(len(slots), np.int64)
    for group in range(num_groups):
        for first in range(group * share, (group + 1) * share, _HEADS):
            for i in range(_HEADS):
                weights_at[i] = min(first + i, (group + 1) * share - 1) * SPLIT
            for column in range(0, head_dim, _VALUES):
                for token in range(len(slots)):
                    values_at[token] = (token * num_groups + group) * head_dim + column
                at = first * head_dim + column
                _value_block(sums, at, head_dim, weights, weights_at, rows, values_at, len(slots))


def split_contexts(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tasks of `attend_rows` for contexts of these lengths.

    Returns:
        Sequence and first context token of each split of `SPLIT` tokens [n, 2], in order, and the bounds of each
        sequence's tasks [B + 1].
    """
    counts = -(-lengths // SPLIT)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    sequences = np.repeat(np.arange(len(lengths)), counts)
    firsts = (np.arange(bounds[-1]) - bounds[sequences]) * SPLIT
    return np.stack([sequences, firsts], axis=1), bounds
