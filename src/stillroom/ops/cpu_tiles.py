"""Products of tiles of bfloat16 (Intel AMX) for the compiled kernels.

A tile register holds sixteen rows of 64 bytes. One instruction multiplies sixteen rows of 32 bfloat16 with sixteen
columns of as many, and adds the products to 256 sums in float32: eight times what the instruction for vectors does in
the same time. The left tile is read as it lies in memory, row by row; the right one as pairs of rows, [pairs, columns].
So weights [outputs, inputs] are the left factor and need no packing, and only the few rows of activations are packed.

A kernel calls `configure_tiles` in each of its threads before products, and `release_tiles` after them. Precondition of
every call: `HAS_TILES`. tests/ops/test_cpu_tiles.py computes each operation with numpy.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from stillroom.ops.cpu_compiler import HAS_TILES
from stillroom.ops.cpu_vectors import LANES, address, fetch_line

TILE = LANES
"""Rows of a tile; pairs of bfloat16, or sums, in each of its rows."""

CONFIG = np.zeros(64, np.uint8)
"""Palette 1; all eight tiles have 64 bytes in each of 16 rows."""
CONFIG[0] = 1
CONFIG[16:32:2] = 4 * TILE
CONFIG[48:56] = TILE

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_INTS = ir.VectorType(_I32, LANES)
_LEFT, _RIGHT = 4, 6
"""First registers of the left and of the right tiles; those before hold sums."""


def _tiles(builder: Any, name: str, *arguments: Any) -> None:
    """Call an instruction of tiles; integers name registers."""
    if not HAS_TILES:  # compiled into a branch that is never taken
        return
    values = [ir.Constant(_I8, value) if isinstance(value, int) else value for value in arguments]
    function_type = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"llvm.x86.{name}"), values)


def _index(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


@intrinsic
def configure_tiles(_context: Any, config: Any) -> Any:
    """Prepare this thread's tiles as `CONFIG` says."""

    def codegen(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = address(target, builder, signature.args[0], arguments[0], _index(0), _I8)
        _tiles(builder, "ldtilecfg", place)
        return target.get_dummy_value()

    return types.void(config), codegen


@intrinsic
def release_tiles(_context: Any) -> Any:
    """Leave this thread's tiles to others."""

    def codegen(target: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        _tiles(builder, "tilerelease")
        return target.get_dummy_value()

    return types.void(), codegen


@intrinsic
def transpose(
    _context: Any, source: Any, source_at: Any, source_step: Any, target: Any, target_at: Any, target_step: Any
) -> Any:
    """Write sixteen rows of sixteen 32-bit words as columns.

    Args:
        source, source_at, source_step: array, flat index of the first word, and distance of rows, in its elements.
        target, target_at, target_step: the same.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def places(array: int) -> list[Any]:
            values, at, step = arguments[array : array + 3]
            indices = [builder.add(at, builder.mul(step, _index(row))) for row in range(LANES)]
            return [address(context, builder, signature.args[array], values, index, _INTS) for index in indices]

        rows = [builder.load(place, align=2) for place in places(0)]
        for size in (1, 2, 4, 8):  # swap the off-diagonal blocks of this size
            low = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
            high = [lane + size if not lane & size else LANES + lane for lane in range(LANES)]
            masks = [ir.Constant(_INTS, [ir.Constant(_I32, lane) for lane in lanes]) for lanes in (low, high)]
            for row in (row for row in range(LANES) if not row & size):
                pair = rows[row], rows[row + size]
                rows[row], rows[row + size] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        for place, row in zip(places(3), rows, strict=True):
            builder.store(row, place, align=2)
        return context.get_dummy_value()

    size = types.intp
    return types.void(source, size, size, target, size, size), codegen


def tile_block(  # noqa: C901  one block of code is emitted
    num_left: int, num_right: int, *, prefetches: bool = False
) -> Any:
    """Make an intrinsic that multiplies `num_left` by `num_right` tiles, at most two by two.

    The intrinsic is `block(sums, sums_at, width, x, x_at, x_step, y, y_at, num_steps, is_added, ahead_at)`:
    sums[16 l + r, c] (+)= the products of row r of left tile l with column c of the right tiles.

    Args:
        prefetches: whether to fetch rows of x into the second cache that a later call reads.

    Args of the intrinsic:
        sums, sums_at, width: float32; flat index of the first sum, and the distance of its rows.
        x, x_at, x_step: bfloat16 in an array of uint16 or uint32; flat index of each left tile's first row, int64
            [num_left]; distance of its rows.
        y, y_at: uint32, [16 * num_steps, width] from this flat index on.
        num_steps: multiples of 32 bfloat16 in a row.
        is_added: whether to add to the sums that are there; else they are overwritten.
        ahead_at: flat index of the first row of each tile that is fetched, int64 [num_left]; its rows must follow each
            other without a gap.
    """
    assert 1 <= num_left <= 2 and 1 <= num_right <= 2
    pairs = [(left, right) for left in range(num_left) for right in range(num_right)]

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, sums_at, width, x, x_at, x_step, y, y_at, num_steps, is_added, ahead_at = arguments
        array = signature.args
        size = array[3].dtype.bitwidth // 8  # of an element of x
        row_bytes, x_bytes = builder.mul(width, _index(4)), builder.mul(x_step, _index(size))

        def starts(numbers: Any, place: int) -> list[Any]:
            found = (address(context, builder, array[place], numbers, _index(left), _I64) for left in range(num_left))
            return [address(context, builder, array[3], x, builder.load(one), _I8) for one in found]

        def sum_at(left: int, right: int) -> Any:
            row = builder.add(sums_at, builder.mul(_index(TILE * left), width))
            return address(context, builder, array[0], sums, builder.add(row, _index(TILE * right)), _I8)

        lefts, aheads = starts(x_at, 4), starts(ahead_at, 10) if prefetches else []
        columns = address(context, builder, array[6], y, y_at, _I8)
        with builder.if_else(is_added) as (then, otherwise):
            with then:
                for number, pair in enumerate(pairs):
                    _tiles(builder, "tileloadd64", number, sum_at(*pair), row_bytes)
            with otherwise:
                for number in range(len(pairs)):
                    _tiles(builder, "tilezero", number)
        with cgutils.for_range(builder, num_steps) as loop:
            offset = builder.mul(loop.index, _index(4 * TILE))
            for left, start in enumerate(lefts):
                _tiles(builder, "tileloadd64", _LEFT + left, builder.gep(start, [offset]), x_bytes)
            row = builder.mul(builder.mul(loop.index, _index(TILE)), row_bytes)
            for right in range(num_right):
                place = builder.gep(columns, [builder.add(row, _index(4 * TILE * right))])
                _tiles(builder, "tileloadd64", _RIGHT + right, place, row_bytes)
            for number, (left, right) in enumerate(pairs):
                _tiles(builder, "tdpbf16ps", number, _LEFT + left, _RIGHT + right)
            for start in aheads:
                _prefetch(builder, start, builder.mul(offset, _index(TILE)))
        for number, pair in enumerate(pairs):
            _tiles(builder, "tilestored64", number, sum_at(*pair), row_bytes)
        return context.get_dummy_value()

    @intrinsic
    def block(  # noqa: PLR0913  a kernel's call
        _context: Any,
        sums: Any,
        sums_at: Any,
        width: Any,
        x: Any,
        x_at: Any,
        x_step: Any,
        y: Any,
        y_at: Any,
        num_steps: Any,
        is_added: Any,
        ahead_at: Any,
    ) -> Any:
        size = types.intp
        return types.void(sums, size, size, x, x_at, size, y, size, size, types.boolean, ahead_at), emit

    return block


def _prefetch(builder: Any, start: Any, offset: Any) -> None:
    """Fetch the bytes of a tile, sixteen lines, into the second cache."""
    for line in range(TILE):
        fetch_line(builder, builder.gep(start, [builder.add(offset, _index(4 * TILE * line))]))
