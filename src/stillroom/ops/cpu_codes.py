"""Compiled products of a few rows with weights of four bits, which read half the bytes of weights of eight.

A weight is one of sixteen levels times the scale of its block of 64 inputs (QLoRA, arXiv:2305.14314, section 3: levels
that are quantiles of a normal distribution, so each is used about as often). Number l of a block's sixteen uint16 holds
the codes of inputs l, 16 + l, 32 + l and 48 + l, so that one look-up gives sixteen weights in order.
References are in tests/ops/test_cpu_codes.py.
"""

from typing import Any

import numba
import numpy as np

from stillroom.ops.cpu_blocks import dot_codes
from stillroom.ops.cpu_compiler import SIXTEEN, Floats, as_float, inlined, parallel_kernel
from stillroom.ops.cpu_elements import read, write
from stillroom.ops.cpu_vectors import (
    HAS_DOT,
    LANES,
    load,
    look_up,
    multiply,
    multiply_add,
    splat,
    store,
    store_halves,
    total,
)

# T tokens, R tokens padded with zeros to a multiple of four, N outputs, M inputs, B blocks of inputs

BLOCK = 64
"""Inputs that share a scale."""

_LEVELS = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
).view(np.uint32)
_TABLE = np.tile(((_LEVELS + 0x7FFF + ((_LEVELS >> 16) & 1)) >> 16).astype(np.uint16), 2)
LEVELS = (_TABLE[:16].astype(np.uint32) << 16).view(np.float32)
"""NormalFloat4 (appendix E of the paper), rounded to bfloat16."""

_rows_4x4 = dot_codes(4, 4)


_MIDDLES = ((LEVELS[1:].astype(np.float64) + LEVELS[:-1]) / 2).astype(np.float32)
_SHARES = np.array([1.0, 0.95, 0.9, 0.85, 0.8], np.float32)
"""Scales that are tried for each block, as shares of its greatest weight; least squares decide."""


@inlined
def _scale(scale_NB: Any, output: Any, block: Any) -> Any:
    return as_float(np.uint32(scale_NB[output, block]) << SIXTEEN)


@parallel_kernel
def linear_codes(  # noqa: C901  a kernel is one function
    x_TM: Floats, codes: Any, scale_NB: Any, out_TN: Floats, num_threads: int
) -> None:
    """x @ weight.T for weights of four bits.

    Several rows are rounded to bfloat16 where the processor multiplies it.

    Args:
        codes: uint16 [N, M / 4].
        scale_NB: bits of bfloat16, uint16.
    """
    num_rows, num_outputs, num_blocks = x_TM.shape[0], scale_NB.shape[0], scale_NB.shape[1]
    num_inputs, width = num_blocks * BLOCK, num_blocks * LANES
    part = (num_outputs + 3) // 4
    if num_rows == 1:
        for thread in numba.prange(num_threads):
            table = load(LEVELS, 0)
            for first in range(part * thread // num_threads, part * (thread + 1) // num_threads):
                # past the end, the last output is computed again
                n1 = min(first + part, num_outputs - 1)
                n2, n3 = min(first + 2 * part, num_outputs - 1), min(first + 3 * part, num_outputs - 1)
                a, b, c, d = splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0))
                for block in range(num_blocks):
                    at, place = block * BLOCK, block * LANES
                    x0, x1 = load(x_TM, at), load(x_TM, at + LANES)
                    x2, x3 = load(x_TM, at + 2 * LANES), load(x_TM, at + 3 * LANES)
                    p0 = multiply(look_up(table, codes, first * width + place, 0), x0)
                    p1 = multiply(look_up(table, codes, n1 * width + place, 0), x0)
                    p2 = multiply(look_up(table, codes, n2 * width + place, 0), x0)
                    p3 = multiply(look_up(table, codes, n3 * width + place, 0), x0)
                    p0 = multiply_add(look_up(table, codes, first * width + place, 1), x1, p0)
                    p1 = multiply_add(look_up(table, codes, n1 * width + place, 1), x1, p1)
                    p2 = multiply_add(look_up(table, codes, n2 * width + place, 1), x1, p2)
                    p3 = multiply_add(look_up(table, codes, n3 * width + place, 1), x1, p3)
                    p0 = multiply_add(look_up(table, codes, first * width + place, 2), x2, p0)
                    p1 = multiply_add(look_up(table, codes, n1 * width + place, 2), x2, p1)
                    p2 = multiply_add(look_up(table, codes, n2 * width + place, 2), x2, p2)
                    p3 = multiply_add(look_up(table, codes, n3 * width + place, 2), x2, p3)
                    p0 = multiply_add(look_up(table, codes, first * width + place, 3), x3, p0)
                    p1 = multiply_add(look_up(table, codes, n1 * width + place, 3), x3, p1)
                    p2 = multiply_add(look_up(table, codes, n2 * width + place, 3), x3, p2)
                    p3 = multiply_add(look_up(table, codes, n3 * width + place, 3), x3, p3)
                    a = multiply_add(p0, splat(_scale(scale_NB, first, block)), a)
                    b = multiply_add(p1, splat(_scale(scale_NB, n1, block)), b)
                    c = multiply_add(p2, splat(_scale(scale_NB, n2, block)), c)
                    d = multiply_add(p3, splat(_scale(scale_NB, n3, block)), d)
                out_TN[0, first], out_TN[0, n1], out_TN[0, n2], out_TN[0, n3] = total(a), total(b), total(c), total(d)
        return
    num_padded = 4 * ((num_rows + 3) // 4)
    if HAS_DOT:
        x_RM = np.zeros((num_padded, num_inputs), np.uint16)
        for row in range(num_rows):
            for i in range(num_inputs):
                write(x_RM[row], i, x_TM[row, i])
        for thread in numba.prange(num_threads):
            sums, x_at = np.empty(LANES, np.float32), np.empty(4, np.int64)
            codes_at, scales_at = np.empty(4, np.int64), np.empty(4, np.int64)
            for first in range(part * thread // num_threads, part * (thread + 1) // num_threads):
                for stream in range(4):
                    n = min(first + stream * part, num_outputs - 1)
                    codes_at[stream], scales_at[stream] = n * width, n * num_blocks
                for row in range(0, num_padded, 4):
                    for i in range(4):
                        x_at[i] = (row + i) * num_inputs
                    _rows_4x4(sums, x_RM, x_at, codes, codes_at, scale_NB, scales_at, _TABLE, num_blocks)
                    for i in range(min(4, num_rows - row)):
                        for stream in range(4):
                            out_TN[row + i, min(first + stream * part, num_outputs - 1)] = sums[4 * i + stream]
        return
    for thread in numba.prange(num_threads):
        table, weight = load(LEVELS, 0), np.empty(num_inputs, np.float32)
        for n in range(num_outputs * thread // num_threads, num_outputs * (thread + 1) // num_threads):
            for block in range(num_blocks):
                scale = splat(_scale(scale_NB, n, block))
                for number in range(4):
                    found = look_up(table, codes, n * width + block * LANES, number)
                    store(weight, block * BLOCK + number * LANES, multiply(found, scale))
            for row in range(num_rows):
                one = np.float32(0)
                for i in range(num_inputs):
                    one += weight[i] * x_TM[row, i]
                out_TN[row, n] = one


@parallel_kernel
def widen_codes(codes: Any, scale_NB: Any, out_NM: Any, num_threads: int) -> None:
    """Write weights of four bits as bfloat16.

    Args:
        codes, scale_NB: as in `linear_codes`.
        out_NM: uint16.
    """
    num_outputs, num_blocks = scale_NB.shape
    for thread in numba.prange(num_threads):
        table = load(LEVELS, 0)
        for n in range(num_outputs * thread // num_threads, num_outputs * (thread + 1) // num_threads):
            for block in range(num_blocks):
                scale, at = splat(_scale(scale_NB, n, block)), n * num_blocks + block
                for number in range(4):
                    found = look_up(table, codes, at * LANES, number)
                    store_halves(out_NM, at * BLOCK + number * LANES, multiply(found, scale))


@parallel_kernel
def round_weights(  # noqa: C901  a kernel is one function
    weight_NM: Any, codes: Any, scale_NB: Any, num_threads: int
) -> None:
    """Round weights to four bits.

    Args:
        weight_NM: float32, or bits of bfloat16.
        codes, scale_NB: overwritten; as in `linear_codes`.
    """
    num_outputs, num_blocks = scale_NB.shape
    for thread in numba.prange(num_threads):
        x, found, best = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
        for n in range(num_outputs * thread // num_threads, num_outputs * (thread + 1) // num_threads):
            scales = scale_NB[n]
            for block in range(num_blocks):
                most = np.float32(0)
                for i in range(BLOCK):
                    x[i] = read(weight_NM[n, block * BLOCK + i])
                    most = max(most, abs(x[i]))
                best_scale, least = np.float32(np.nan), np.float32(np.inf)  # stays if a weight is not finite
                for i in range(BLOCK):
                    best[i] = 0
                for share in _SHARES:
                    write(scales, block, max(most * share, np.float32(1e-30)))
                    scale, error = read(scales[block]), np.float32(0)
                    for i in range(BLOCK):
                        found[i] = 0
                    for middle in _MIDDLES:
                        limit = middle * scale
                        for i in range(BLOCK):
                            found[i] += np.int32(x[i] > limit)
                    for i in range(BLOCK):
                        difference = LEVELS[found[i]] * scale - x[i]
                        error += difference * difference
                    if error < least:
                        best_scale, least = scale, error
                        for i in range(BLOCK):
                            best[i] = found[i]
                write(scales, block, best_scale)
                for lane in range(LANES):
                    four = best[lane] | best[LANES + lane] << 4 | best[2 * LANES + lane] << 8
                    codes[n, block * LANES + lane] = np.uint16(four | best[3 * LANES + lane] << 12)
