"""Products of many rows with bfloat16 weights, by vectors (AVX-512 bf16).

A panel is 64 outputs. Its weights are transposed to pairs of inputs, [pairs, 64], which stay in the processor's second
cache while they are multiplied with six rows at a time; the 24 vectors of sums stay in registers. So weights lie in
memory once, as other kernels read them: torch packs all of them through memory at each product. What follows a product
(a sum, or the gate of a feed-forward layer) is computed from sums that are still in the cache.

A row's sums are added in the order of the inputs, whatever other rows there are and however many threads. Reference:
tests/ops/test_cpu_panels.py.
"""

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from stillroom.ops.cpu_blocks import dot_block
from stillroom.ops.cpu_compiler import Bits, Floats, kernel, parallel_kernel
from stillroom.ops.cpu_tiles import transpose
from stillroom.ops.cpu_vectors import (
    HAS_DOT,
    LANES,
    add,
    divide,
    greater,
    load,
    multiply,
    power_of_two,
    splat,
    store,
    store_halves,
)

# T rows, M inputs, N outputs, I outputs of a gate

_WIDTH = 64
_ROWS = 6
_MOST_PAIRS = 1024
"""Of a panel; 256 KiB. More inputs are added in several turns."""
_MOST_BLOCKS = 86
"""Blocks of rows in a turn; 129 KiB of sums."""
_block = dot_block(_ROWS, _WIDTH)
_LOWEST, _MINUS_LOG2_E = np.float32(-87.0), np.float32(-1.4426950408889634)


def can_use_panels(num_outputs: int, num_inputs: int) -> bool:
    """Whether these kernels support a weight [outputs, inputs] on this processor; the outputs of a gate are halved."""
    return HAS_DOT and num_outputs % LANES == 0 and num_inputs % (2 * LANES) == 0


@kernel
def _multiply(  # noqa: PLR0913  a kernel's call
    x_TM: Bits, weight: Bits, outputs: Any, first: Any, end: Any, panel: Bits, sums: Floats
) -> None:
    """Write the products of rows from `first` to `end` with a panel to `sums` [rows, 64].

    Args:
        outputs: int64 [4], the first of each sixteen outputs.
    """
    num_pairs = weight.shape[1]
    at = np.empty(_ROWS, np.int64)
    for begin in range(0, num_pairs, _MOST_PAIRS):
        some = min(_MOST_PAIRS, num_pairs - begin)
        for column in range(0, _WIDTH, LANES):
            start = outputs[column // LANES] * num_pairs + begin
            for pair in range(0, some, LANES):
                transpose(weight, start + pair, num_pairs, panel, pair * _WIDTH + column, _WIDTH)
        for row in range(first, end, _ROWS):
            for i in range(_ROWS):  # past the end, the last row is computed again
                at[i] = 2 * (min(row + i, end - 1) * num_pairs + begin)
            _block(sums, (row - first) * _WIDTH, _WIDTH, x_TM, at, 2, panel, 0, some, begin > 0)


@kernel
def _part(at: Any, end: Any, num_blocks: Any) -> Any:
    """Return panel, first block of rows and end of the blocks that a thread computes next.

    Args:
        at, end: numbers of blocks, counted over all panels.
    """
    panel, first = at // num_blocks, at % num_blocks
    return panel, first, min(first + _MOST_BLOCKS, num_blocks, first + end - at)


@parallel_kernel
def panel_products(x_TM: Bits, weight: Bits, out_TN: Any, is_added: bool, num_threads: int) -> None:
    """x @ weight.T, written to the output or added to it.

    Args:
        x_TM: bits of bfloat16, uint16.
        weight: [N, M / 2], two bfloat16 in each uint32.
        out_TN: float32, or bits of bfloat16, uint16, which are not added to.
    """
    num_rows, num_outputs = out_TN.shape
    num_blocks, num_panels = (num_rows + _ROWS - 1) // _ROWS, (num_outputs + _WIDTH - 1) // _WIDTH
    for thread in numba.prange(num_threads):
        panel = np.empty((min(_MOST_PAIRS, weight.shape[1]), _WIDTH), np.uint32)
        sums = np.empty((_ROWS * min(_MOST_BLOCKS, num_blocks), _WIDTH), np.float32)
        outputs = np.empty(_WIDTH // LANES, np.int64)
        at, end = num_panels * num_blocks * thread // num_threads, num_panels * num_blocks * (thread + 1) // num_threads
        while at < end:
            number, begin, stop = _part(at, end, num_blocks)
            at += stop - begin
            num_columns = min(_WIDTH, num_outputs - number * _WIDTH)
            for column in range(0, _WIDTH, LANES):
                outputs[column // LANES] = number * _WIDTH + min(column, num_columns - LANES)
            first, last = begin * _ROWS, min(stop * _ROWS, num_rows)
            _multiply(x_TM, weight, outputs, first, last, panel, sums)
            for row in range(first, last):
                for column in range(0, num_columns, LANES):
                    value = load(sums, (row - first) * _WIDTH + column)
                    _put(out_TN, row * num_outputs + number * _WIDTH + column, value, is_added)


@parallel_kernel
def panel_gate(x_TM: Bits, weight: Bits, out_TI: Bits, num_threads: int) -> None:
    """silu(gate) * up of the product x @ weight.T, whose columns are gate, then up; as `panel_products`.

    Args:
        out_TI: bits of bfloat16, uint16.
    """
    num_rows, num_outputs = out_TI.shape
    half = _WIDTH // 2
    num_blocks, num_panels = (num_rows + _ROWS - 1) // _ROWS, (num_outputs + half - 1) // half
    for thread in numba.prange(num_threads):
        panel = np.empty((min(_MOST_PAIRS, weight.shape[1]), _WIDTH), np.uint32)
        sums = np.empty((_ROWS * min(_MOST_BLOCKS, num_blocks), _WIDTH), np.float32)
        outputs = np.empty(_WIDTH // LANES, np.int64)
        at, end = num_panels * num_blocks * thread // num_threads, num_panels * num_blocks * (thread + 1) // num_threads
        while at < end:
            number, begin, stop = _part(at, end, num_blocks)
            at += stop - begin
            num_columns = min(half, num_outputs - number * half)
            for column in range(0, half, LANES):
                output = number * half + min(column, num_columns - LANES)
                outputs[column // LANES], outputs[(half + column) // LANES] = output, num_outputs + output
            first, last = begin * _ROWS, min(stop * _ROWS, num_rows)
            _multiply(x_TM, weight, outputs, first, last, panel, sums)
            for row in range(first, last):
                for column in range(0, num_columns, LANES):
                    place = (row - first) * _WIDTH + column
                    gate, up = load(sums, place), load(sums, place + half)
                    power = power_of_two(multiply(greater(gate, splat(_LOWEST)), splat(_MINUS_LOG2_E)))
                    value = multiply(divide(gate, add(splat(np.float32(1)), power)), up)
                    store_halves(out_TI, row * num_outputs + number * half + column, value)


@kernel
def round_to_bits(x_TM: Floats) -> Bits:
    """Return rows, of a multiple of 16 numbers, as bits of bfloat16."""
    bits = np.empty(x_TM.shape, np.uint16)
    for place in range(0, x_TM.size, LANES):
        store_halves(bits, place, load(x_TM, place))
    return bits


def _put(out_TN: Any, place: Any, value: Any, is_added: Any) -> None:
    """Write sixteen numbers in the output's type, or add them if it is float32."""
    raise NotImplementedError  # implemented by the overload in compiled code


@overload(_put)
def _compiled_put(out_TN: Any, place: Any, value: Any, is_added: Any) -> Any:
    if out_TN.dtype == types.uint16:

        def put_halves(out_TN: Any, place: Any, value: Any, is_added: Any) -> None:
            store_halves(out_TN, place, value)

        return put_halves

    def put_floats(out_TN: Any, place: Any, value: Any, is_added: Any) -> None:
        if is_added:
            store(out_TN, place, add(load(out_TN, place), value))
        else:
            store(out_TN, place, value)

    return put_floats
