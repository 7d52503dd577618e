"""Compiled products of a few rows with weights on a CPU, which read each weight once.

They are bound by memory, which is read fastest in several distant streams: a thread reads parts of the matrix side by
side, four for one row, two or four for four rows (missing rows are zeros, which costs less than a second read).
References are in tests/ops/test_cpu_kernels.py.
"""

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from stillroom.ops.cpu_blocks import dot_rows
from stillroom.ops.cpu_codes import linear_codes
from stillroom.ops.cpu_compiler import HAS_TILES, SIXTEEN, Bits, Floats, as_float, inlined, kernel, parallel_kernel
from stillroom.ops.cpu_elements import read, write
from stillroom.ops.cpu_panels import panel_products, round_to_bits
from stillroom.ops.cpu_tiles import CONFIG, TILE, configure_tiles, release_tiles, tile_block, transpose
from stillroom.ops.cpu_vectors import HAS_BYTE_DOT, HAS_DOT, LANES, load, store, store_halves

# T tokens, R tokens padded with zeros to a multiple of four, W to one of sixteen, N outputs, M inputs

_HIGH = np.uint32(0xFFFF0000)
_MOST_DOTTED = 32
"""Most rows that are multiplied without packing weights into panels."""
_rows_4x4, _rows_8x2 = dot_rows(4, 4, prefetches=True), dot_rows(8, 2, prefetches=True)
_bytes_4x4 = dot_rows(4, 4, has_bytes=True)
_tiles_2x2, _tiles_2x1 = tile_block(2, 2, prefetches=True), tile_block(2, 1, prefetches=True)


@kernel
def _pack_columns(x_TM: Floats, packed: Bits) -> None:
    """Round rows to bfloat16 and write them as columns, pairs of inputs [M / 2, W]; missing rows are zeros."""
    num_rows, num_inputs = x_TM.shape
    num_pairs, width = packed.shape
    halves = np.zeros((TILE, num_inputs), np.uint16)
    for first in range(0, width, TILE):
        for row in range(TILE):
            if first + row < num_rows:
                for i in range(0, num_inputs, LANES):
                    store_halves(halves, row * num_inputs + i, load(x_TM, (first + row) * num_inputs + i))
            else:
                halves[row, :] = 0
        for pair in range(0, num_pairs, TILE):
            transpose(halves, 2 * pair, num_inputs, packed, pair * width + first, width)


@kernel
def _unpack_columns(sums: Floats, first: Any, out_TN: Floats, output: Any) -> None:
    """Write the products of a tile of outputs, rows of `sums` [.., W] from `first` on, to their columns."""
    num_rows, num_outputs = out_TN.shape
    width = sums.shape[1]
    rows = np.empty((TILE, TILE), np.float32)
    for row in range(0, num_rows, TILE):
        at = first * width + row
        if row + TILE <= num_rows:
            transpose(sums, at, width, out_TN, row * num_outputs + output, num_outputs)
            continue
        transpose(sums, at, width, rows, 0, TILE)
        for last in range(num_rows - row):
            store(out_TN, (row + last) * num_outputs + output, load(rows, last * TILE))


@parallel_kernel
def _tile_products(x_TM: Floats, weight: Bits, out_TN: Floats, num_threads: int) -> None:
    """As `_dot_products`, with tiles (`cpu_tiles`): sixteen outputs and sixteen rows at a time.

    A thread reads two parts of the matrix side by side and fetches the rows that follow. Each row's sums are added in
    the same order whatever other rows there are.
    """
    num_rows, num_pairs, num_outputs = x_TM.shape[0], weight.shape[1], weight.shape[0]
    num_steps, width = num_pairs // TILE, TILE * ((num_rows + TILE - 1) // TILE)
    packed = np.empty((num_pairs, width), np.uint32)
    _pack_columns(x_TM, packed)
    num_tiles, most = (num_outputs + TILE - 1) // TILE, num_outputs - TILE
    for thread in numba.prange(num_threads):
        configure_tiles(CONFIG)
        sums = np.empty((2 * TILE, width), np.float32)
        at, ahead_at = np.empty(2, np.int64), np.empty(2, np.int64)
        first, end = num_tiles * thread // num_threads, num_tiles * (thread + 1) // num_threads
        half = (end - first + 1) // 2
        for tile in range(first, first + half):
            for stream in range(2):
                output = TILE * (tile + stream * half)  # past the end, the last outputs are computed again
                at[stream], ahead_at[stream] = min(output, most) * num_pairs, min(output + TILE, most) * num_pairs
            for column in range(0, width, 2 * TILE):
                if column + TILE < width:
                    _tiles_2x2(sums, column, width, weight, at, num_pairs, packed, column, num_steps, False, ahead_at)
                else:
                    _tiles_2x1(sums, column, width, weight, at, num_pairs, packed, column, num_steps, False, ahead_at)
            for stream in range(2):
                _unpack_columns(sums, stream * TILE, out_TN, at[stream] // num_pairs)
        release_tiles()


@parallel_kernel
def _dot_products(x_TM: Floats, weight: Bits, out_TN: Floats, num_threads: int) -> None:
    """As `linear_bfloat16`, of several rows that are rounded to bfloat16, as many rows are for torch's product.

    A thread reads four parts of the matrix side by side, two for five to eight rows, and fetches the rows that follow.
    """
    num_rows, num_pairs, num_outputs = x_TM.shape[0], weight.shape[1], weight.shape[0]
    is_one_pass = 4 < num_rows <= 8
    num_padded = 8 if is_one_pass else 4 * ((num_rows + 3) // 4)
    x_RM = np.zeros((num_padded, 2 * num_pairs), np.uint16)
    for place in range(0, x_TM.size, LANES):
        store_halves(x_RM, place, load(x_TM, place))
    num_parts = 2 if is_one_pass else 4
    part = (num_outputs + num_parts - 1) // num_parts
    for thread in numba.prange(num_threads):
        first, end = part * thread // num_threads, part * (thread + 1) // num_threads
        if is_one_pass:
            _multiply_parts(_rows_8x2, 8, 2, x_RM, weight, part, first, end, out_TN)
        else:
            _multiply_parts(_rows_4x4, 4, 4, x_RM, weight, part, first, end, out_TN)


@inlined
def _multiply_parts(  # noqa: PLR0913  a kernel's call
    rows: Any, height: Any, num_parts: Any, x_RM: Bits, weight: Bits, part: Any, first: Any, end: Any, out_TN: Floats
) -> None:
    """Multiply with the rows from `first` to `end` of each part of the matrix; a part has `part` rows."""
    num_rows, num_outputs = out_TN.shape
    num_pairs = weight.shape[1]
    x_at, y_at, ahead_at = np.empty(height, np.int64), np.empty(num_parts, np.int64), np.empty(num_parts, np.int64)
    sums = np.empty(LANES, np.float32)
    for output in range(first, end):
        for stream in range(num_parts):
            y_at[stream] = min(output + stream * part, num_outputs - 1) * num_pairs
            ahead_at[stream] = y_at[stream] + num_pairs
        for row in range(0, len(x_RM), height):
            for i in range(height):
                x_at[i] = (row + i) * 2 * num_pairs
            rows(sums, x_RM, x_at, weight, y_at, num_pairs, ahead_at)
            for i in range(min(height, num_rows - row)):
                for stream in range(num_parts):
                    # past the end, the last output is computed again
                    out_TN[row + i, min(output + stream * part, num_outputs - 1)] = sums[num_parts * i + stream]


@parallel_kernel
def linear_bfloat16(x_TM: Floats, weight: Bits, out_TN: Floats, num_threads: int) -> None:  # noqa: C901
    """x @ weight.T; weight [N, M / 2] holds two bfloat16 in each uint32."""
    num_rows, num_pairs, num_outputs = x_TM.shape[0], weight.shape[1], weight.shape[0]
    if HAS_TILES and num_rows > 1 and num_pairs % TILE == 0 and num_outputs >= TILE:
        _tile_products(x_TM, weight, out_TN, num_threads)
        return
    if HAS_DOT and num_rows > _MOST_DOTTED and num_pairs % LANES == 0 and num_outputs % LANES == 0:
        panel_products(round_to_bits(x_TM), weight, out_TN, False, num_threads)
        return
    if HAS_DOT and num_rows > 1 and num_pairs % LANES == 0:
        _dot_products(x_TM, weight, out_TN, num_threads)
        return
    num_blocks = (num_rows + 3) // 4
    even, odd = np.zeros((4 * num_blocks, num_pairs), np.float32), np.zeros((4 * num_blocks, num_pairs), np.float32)
    for row in range(num_rows):
        for i in range(num_pairs):
            even[row, i] = x_TM[row, 2 * i]
            odd[row, i] = x_TM[row, 2 * i + 1]
    if num_rows == 1:
        part = (num_outputs + 3) // 4
        for thread in numba.prange(num_threads):
            e, o = even[0], odd[0]
            for n in range(part * thread // num_threads, part * (thread + 1) // num_threads):
                n1, n2, n3 = n + part, min(n + 2 * part, num_outputs - 1), min(n + 3 * part, num_outputs - 1)
                n1 = min(n1, num_outputs - 1)
                w0, w1, w2, w3 = weight[n], weight[n1], weight[n2], weight[n3]
                a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                for i in range(num_pairs):
                    a += as_float(w0[i] << SIXTEEN) * e[i] + as_float(w0[i] & _HIGH) * o[i]
                    b += as_float(w1[i] << SIXTEEN) * e[i] + as_float(w1[i] & _HIGH) * o[i]
                    c += as_float(w2[i] << SIXTEEN) * e[i] + as_float(w2[i] & _HIGH) * o[i]
                    d += as_float(w3[i] << SIXTEEN) * e[i] + as_float(w3[i] & _HIGH) * o[i]
                # past the end, the last output is computed again
                out_TN[0, n], out_TN[0, n1], out_TN[0, n2], out_TN[0, n3] = a, b, c, d
        return
    part = (num_outputs + 1) // 2
    for thread in numba.prange(num_threads):
        for n in range(part * thread // num_threads, part * (thread + 1) // num_threads):
            other = min(n + part, num_outputs - 1)
            w0, w1 = weight[n], weight[other]
            for row in range(0, 4 * num_blocks, 4):
                e0, e1, e2, e3 = even[row], even[row + 1], even[row + 2], even[row + 3]
                o0, o1, o2, o3 = odd[row], odd[row + 1], odd[row + 2], odd[row + 3]
                a0, b0, c0, d0 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                a1, b1, c1, d1 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                for i in range(num_pairs):
                    low0, high0 = as_float(w0[i] << SIXTEEN), as_float(w0[i] & _HIGH)
                    low1, high1 = as_float(w1[i] << SIXTEEN), as_float(w1[i] & _HIGH)
                    a0 += low0 * e0[i] + high0 * o0[i]
                    b0 += low0 * e1[i] + high0 * o1[i]
                    c0 += low0 * e2[i] + high0 * o2[i]
                    d0 += low0 * e3[i] + high0 * o3[i]
                    a1 += low1 * e0[i] + high1 * o0[i]
                    b1 += low1 * e1[i] + high1 * o1[i]
                    c1 += low1 * e2[i] + high1 * o2[i]
                    d1 += low1 * e3[i] + high1 * o3[i]
                _store_four(out_TN, row, n, (a0, b0, c0, d0))
                _store_four(out_TN, row, other, (a1, b1, c1, d1))


@parallel_kernel
def linear_scaled(x_TM: Floats, weight_NM: Any, scale_N: Floats, out_TN: Floats, num_threads: int) -> None:
    """x @ (weight * scale).T for int8 or float32 weights, with one scale for each output."""
    num_rows, num_inputs, num_outputs = x_TM.shape[0], weight_NM.shape[1], weight_NM.shape[0]
    num_blocks = (num_rows + 3) // 4
    # assigned once: with two assignments numba may use the wrong shape (its issue 9769)
    x_RM = np.zeros((1 if num_rows == 1 else 4 * num_blocks, num_inputs), np.float32)
    for row in range(num_rows):
        for i in range(num_inputs):
            x_RM[row, i] = x_TM[row, i]
    part = (num_outputs + 3) // 4 if num_rows == 1 else (num_outputs + 1) // 2
    for thread in numba.prange(num_threads):
        for n in range(part * thread // num_threads, part * (thread + 1) // num_threads):
            n1 = min(n + part, num_outputs - 1)
            if num_rows == 1:
                n2, n3 = min(n + 2 * part, num_outputs - 1), min(n + 3 * part, num_outputs - 1)
                x, w0, w1, w2, w3 = x_RM[0], weight_NM[n], weight_NM[n1], weight_NM[n2], weight_NM[n3]
                a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                for i in range(num_inputs):
                    a += np.float32(w0[i]) * x[i]
                    b += np.float32(w1[i]) * x[i]
                    c += np.float32(w2[i]) * x[i]
                    d += np.float32(w3[i]) * x[i]
                out_TN[0, n], out_TN[0, n1] = a * scale_N[n], b * scale_N[n1]
                out_TN[0, n2], out_TN[0, n3] = c * scale_N[n2], d * scale_N[n3]
            else:
                w0, w1, s0, s1 = weight_NM[n], weight_NM[n1], scale_N[n], scale_N[n1]
                for row in range(0, 4 * num_blocks, 4):
                    x0, x1, x2, x3 = x_RM[row], x_RM[row + 1], x_RM[row + 2], x_RM[row + 3]
                    a0, b0, c0, d0 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                    a1, b1, c1, d1 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
                    for i in range(num_inputs):
                        u, v = np.float32(w0[i]), np.float32(w1[i])
                        a0 += u * x0[i]
                        b0 += u * x1[i]
                        c0 += u * x2[i]
                        d0 += u * x3[i]
                        a1 += v * x0[i]
                        b1 += v * x1[i]
                        c1 += v * x2[i]
                        d1 += v * x3[i]
                    _store_four(out_TN, row, n, (a0 * s0, b0 * s0, c0 * s0, d0 * s0))
                    _store_four(out_TN, row, n1, (a1 * s1, b1 * s1, c1 * s1, d1 * s1))


def can_multiply_bytes(num_inputs: int) -> bool:
    """Whether `linear_bytes` supports weights of this width on this processor."""
    return HAS_BYTE_DOT and num_inputs % (4 * LANES) == 0


@parallel_kernel
def linear_bytes(  # noqa: C901  a kernel is one function
    x_TM: Floats, weight_NM: Any, scale_N: Floats, sum_N: Any, out_TN: Floats, num_threads: int
) -> None:
    """As `linear_scaled`, of several rows that are rounded to int8 as `round_rows` does it.

    The instruction needs bytes without a sign, so rows are stored 128 higher, and 128 times `sum_N` is subtracted.

    Args:
        sum_N: int32, sum of each row of the weight.
    """
    num_rows, num_inputs, num_outputs = x_TM.shape[0], weight_NM.shape[1], weight_NM.shape[0]
    num_padded, num_words = 4 * ((num_rows + 3) // 4), num_inputs // 4
    x_RM, scale_R = np.full((num_padded, num_inputs), 128, np.uint8), np.zeros(num_padded, np.float32)
    for row in range(num_rows):
        most, nothing = np.float32(1e-30), np.float32(0)
        for i in range(num_inputs):
            most, nothing = max(most, abs(x_TM[row, i])), nothing + x_TM[row, i] * np.float32(0)
        scale_R[row] = most / np.float32(127) + nothing
        step = np.float32(127) / most
        for i in range(num_inputs):
            x_RM[row, i] = np.uint8(np.int32(np.rint(x_TM[row, i] * step)) + 128)
    part = (num_outputs + 3) // 4
    for thread in numba.prange(num_threads):
        x_at, y_at = np.empty(4, np.int64), np.empty(4, np.int64)
        sums = np.empty(LANES, np.int32)
        for first in range(part * thread // num_threads, part * (thread + 1) // num_threads):
            for stream in range(4):
                y_at[stream] = min(first + stream * part, num_outputs - 1) * num_inputs
            for row in range(0, num_padded, 4):
                for i in range(4):
                    x_at[i] = (row + i) * num_inputs
                _bytes_4x4(sums, x_RM, x_at, weight_NM, y_at, num_words, y_at)
                for i in range(min(4, num_rows - row)):
                    for stream in range(4):
                        n = min(first + stream * part, num_outputs - 1)  # past the end, the last is computed again
                        total = np.float32(sums[4 * i + stream] - 128 * sum_N[n])
                        out_TN[row + i, n] = total * (scale_R[row + i] * scale_N[n])


@parallel_kernel
def round_rows(x_TM: Any, out_TM: Any, scale_T: Floats) -> None:
    """Round float32 or bfloat16 to int8, with one scale for each row; the scale is NaN if a number is not finite."""
    num_rows, width = x_TM.shape
    for row in numba.prange(num_rows):
        x, out = x_TM[row], out_TM[row]
        most, nothing = np.float32(1e-30), np.float32(0)
        for i in range(width):
            value = read(x[i])
            most, nothing = max(most, abs(value)), nothing + value * np.float32(0)
        scale_T[row] = most / np.float32(127) + nothing
        step = np.float32(127) / most
        for i in range(width):
            out[i] = np.int8(np.rint(read(x[i]) * step))


@parallel_kernel
def scale_products(products_TN: Any, scale_T: Floats, scale_N: Floats, out_TN: Any) -> None:
    """Multiply products, of any type, with the scales of their row and column; the output is float32 or bfloat16."""
    num_rows, width = products_TN.shape
    for row in numba.prange(num_rows):
        products, out, scale = products_TN[row], out_TN[row], scale_T[row]
        for i in range(width):
            write(out, i, np.float32(read(products[i])) * (scale * scale_N[i]))


@inlined
def _store_four(out_TN: Any, row: Any, column: Any, values: Any) -> None:
    num_rows = out_TN.shape[0]
    out_TN[row, column] = values[0]
    if row + 1 < num_rows:
        out_TN[row + 1, column] = values[1]
    if row + 2 < num_rows:
        out_TN[row + 2, column] = values[2]
    if row + 3 < num_rows:
        out_TN[row + 3, column] = values[3]


def product(x_TM: Any, weight: Any, bias_N: Any, num_threads: Any) -> Any:
    """x @ weight.T + bias, with the weight of `linear_bfloat16`, or weight and scale of `linear_scaled`, or these and
    the sums of `linear_bytes`, which multiplies several rows, or codes and scales of `linear_codes`.

    An empty bias is no bias.
    """
    raise NotImplementedError  # implemented by the overload in compiled code


@overload(product)
def _compiled_product(  # noqa: C901  one function for each kind of weight
    x_TM: Any, weight: Any, bias_N: Any, num_threads: Any
) -> Any:
    if isinstance(weight, types.BaseTuple) and len(weight) == 3:

        def product_of_bytes(x_TM: Any, weight: Any, bias_N: Any, num_threads: Any) -> Any:
            out_TN = np.empty((x_TM.shape[0], weight[0].shape[0]), np.float32)
            if x_TM.shape[0] == 1:
                linear_scaled(x_TM, weight[0], weight[1], out_TN, num_threads)
            else:
                linear_bytes(x_TM, weight[0], weight[1], weight[2], out_TN, num_threads)
            if len(bias_N) > 0:
                out_TN += bias_N
            return out_TN

        return product_of_bytes

    if isinstance(weight, types.BaseTuple) and weight[0].dtype == types.uint16:

        def product_of_codes(x_TM: Any, weight: Any, bias_N: Any, num_threads: Any) -> Any:
            out_TN = np.empty((x_TM.shape[0], weight[0].shape[0]), np.float32)
            linear_codes(x_TM, weight[0], weight[1], out_TN, num_threads)
            if len(bias_N) > 0:
                out_TN += bias_N
            return out_TN

        return product_of_codes

    if isinstance(weight, types.BaseTuple):

        def scaled_product(x_TM: Any, weight: Any, bias_N: Any, num_threads: Any) -> Any:
            out_TN = np.empty((x_TM.shape[0], weight[0].shape[0]), np.float32)
            linear_scaled(x_TM, weight[0], weight[1], out_TN, num_threads)
            if len(bias_N) > 0:
                out_TN += bias_N
            return out_TN

        return scaled_product

    def product_bfloat16(x_TM: Any, weight: Any, bias_N: Any, num_threads: Any) -> Any:
        out_TN = np.empty((x_TM.shape[0], weight.shape[0]), np.float32)
        linear_bfloat16(x_TM, weight, out_TN, num_threads)
        if len(bias_N) > 0:
            out_TN += bias_N
        return out_TN

    return product_bfloat16
