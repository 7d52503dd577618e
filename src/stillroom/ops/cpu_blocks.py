"""Blocks of products for the compiled kernels: their sums stay in registers, which LLVM does not do by itself.

Each function makes an intrinsic, whose numbers of rows and columns are known when it is compiled.
tests/ops/test_cpu_vectors.py computes each of them with numpy.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from stillroom.ops.cpu_vectors import (
    F32,
    FLOATS,
    HALVES,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    address,
    call,
    emit_byte_dot,
    emit_dot,
    emit_splat,
    fetch_line,
    floats,
    ints,
)


def dot_block(num_rows: int, num_columns: int) -> Any:
    """Make an intrinsic that multiplies bfloat16 rows with packed columns: a block of sums is kept in registers.

    The intrinsic is `block(sums, sums_at, width, x, x_at, x_step, y, y_at, num_pairs, is_added)`:
    sums[r, c] (+)= sum over i of the products of both halves of pair i of row r and of column c.

    Args of the intrinsic:
        sums, sums_at, width: float32; flat index of the block's first sum, and the distance of its rows.
        x, x_at, x_step: array of uint16 or uint32, whose 32-bit pairs are read; flat index of each row's first pair,
            int64 [num_rows]; distance of a row's pairs.
        y, y_at: uint32, [num_pairs, width] from this flat index on.
        is_added: whether to add to the sums that are there; else they are overwritten.
    """
    num_vectors = num_columns // LANES

    def emit(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, sums_at, width, x, x_at, x_step, y, y_at, num_pairs, is_added = arguments
        array = signature.args

        def index(value: int) -> ir.Constant:
            return ir.Constant(I64, value)

        def sum_at(row: int, vector: int) -> Any:
            place = builder.add(sums_at, builder.add(builder.mul(index(row), width), index(LANES * vector)))
            return address(target, builder, array[0], sums, place, FLOATS)

        places = [(row, vector) for row in range(num_rows) for vector in range(num_vectors)]
        starts = [builder.load(address(target, builder, array[4], x_at, index(row), I64)) for row in range(num_rows)]
        entry = builder.block
        given, head, body, end = (builder.append_basic_block(name) for name in ("given", "head", "body", "end"))
        builder.cbranch(is_added, given, head)
        with builder.goto_block(given):
            found = [builder.load(sum_at(*place), align=4) for place in places]
            builder.branch(head)
        builder.position_at_end(head)
        pair = builder.phi(I64)
        totals = [builder.phi(FLOATS) for _ in places]
        for block, values in ((entry, [floats(0.0)] * len(places)), (given, found)):
            pair.add_incoming(index(0), block)
            for total, value in zip(totals, values, strict=True):
                total.add_incoming(value, block)
        builder.cbranch(builder.icmp_signed("<", pair, num_pairs), body, end)
        builder.position_at_end(body)
        y_row = builder.add(y_at, builder.mul(pair, width))
        columns = [
            builder.load(
                address(target, builder, array[6], y, builder.add(y_row, index(LANES * vector)), INTS), align=4
            )
            for vector in range(num_vectors)
        ]
        step = builder.mul(pair, x_step)
        for row, start in enumerate(starts):
            one = builder.load(address(target, builder, array[3], x, builder.add(start, step), I32), align=2)
            wide = emit_splat(builder, one, INTS)
            for vector in range(num_vectors):
                total = totals[row * num_vectors + vector]
                total.add_incoming(emit_dot(builder, total, wide, columns[vector]), builder.block)
        pair.add_incoming(builder.add(pair, index(1)), builder.block)
        builder.branch(head)
        builder.position_at_end(end)
        for place, total in zip(places, totals, strict=True):
            builder.store(total, sum_at(*place), align=4)
        return target.get_dummy_value()

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
        num_pairs: Any,
        is_added: Any,
    ) -> Any:
        size = types.intp
        return types.void(sums, size, size, x, x_at, size, y, size, size, types.boolean), emit

    return block


def wide_block(  # noqa: C901  one block of code is emitted
    num_rows: int, num_columns: int, *, has_pairs: bool
) -> Any:
    """Make an intrinsic that multiplies float32 rows with bfloat16 columns, which are widened in registers.

    The intrinsic is `block(sums, sums_at, width, x, x_at, y, y_at, num_steps)`: sums[r, c] is overwritten by the sum
    over i of x[r, i] * y[i, c].

    Args:
        has_pairs: words of y hold two rows: inputs 2 i in the lower halves and 2 i + 1 in the upper ones.

    Args of the intrinsic:
        sums, sums_at, width: float32; flat index of the block's first sum, and the distance of its rows.
        x, x_at: float32; flat index of each row's first number, int64 [num_rows].
        y, y_at: with pairs uint32, [num_steps, num_columns] from y_at[0] on; else uint16, whose rows are at y_at, int64
            [num_steps].
        num_steps: words or rows of y.
    """
    num_vectors = num_columns // LANES

    def emit(  # noqa: C901
        target: Any, builder: Any, signature: Any, arguments: Any
    ) -> Any:
        sums, sums_at, width, x, x_at, y, y_at, num_steps = arguments
        array = signature.args

        def index(value: int) -> ir.Constant:
            return ir.Constant(I64, value)

        def number(array_type: Any, numbers: Any, place: Any) -> Any:
            return builder.load(address(target, builder, array_type, numbers, place, I64))

        def as_floats(words: Any) -> Any:
            return builder.bitcast(words, FLOATS)

        starts = [number(array[4], x_at, index(row)) for row in range(num_rows)]
        first = number(array[6], y_at, index(0)) if has_pairs else None
        entry, head, body, end = builder.block, *(builder.append_basic_block(name) for name in ("head", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        step = builder.phi(I64)
        step.add_incoming(index(0), entry)
        totals = [builder.phi(FLOATS) for _ in range(num_rows * num_vectors)]
        for total in totals:
            total.add_incoming(floats(0.0), entry)
        builder.cbranch(builder.icmp_signed("<", step, num_steps), body, end)
        builder.position_at_end(body)
        kind = INTS if has_pairs else HALVES
        row_at = (
            builder.add(first, builder.mul(step, index(num_columns))) if has_pairs else number(array[6], y_at, step)
        )
        places = [builder.add(row_at, index(LANES * vector)) for vector in range(num_vectors)]
        found = [builder.load(address(target, builder, array[5], y, place, kind), align=2) for place in places]
        if has_pairs:
            inputs = [[builder.shl(one, ints(16)) for one in found], [builder.and_(one, ints(-65536)) for one in found]]
        else:
            inputs = [[builder.shl(builder.zext(one, INTS), ints(16)) for one in found]]
        after = list(totals)
        for number_of_input, columns in enumerate(inputs):
            offset = builder.add(builder.mul(step, index(len(inputs))), index(number_of_input))
            for row, start in enumerate(starts):
                place = address(target, builder, array[3], x, builder.add(start, offset), F32)
                factor = emit_splat(builder, builder.load(place), FLOATS)
                for vector, column in enumerate(columns):
                    at = row * num_vectors + vector
                    after[at] = call(builder, "llvm.fma.v16f32", FLOATS, [factor, as_floats(column), after[at]])
        for total, value in zip(totals, after, strict=True):
            total.add_incoming(value, builder.block)
        step.add_incoming(builder.add(step, index(1)), builder.block)
        builder.branch(head)
        builder.position_at_end(end)
        for at, total in enumerate(totals):
            row, vector = divmod(at, num_vectors)
            place = builder.add(sums_at, builder.add(builder.mul(index(row), width), index(LANES * vector)))
            builder.store(total, address(target, builder, array[0], sums, place, FLOATS), align=4)
        return target.get_dummy_value()

    @intrinsic
    def block(  # noqa: PLR0913  a kernel's call
        _context: Any, sums: Any, sums_at: Any, width: Any, x: Any, x_at: Any, y: Any, y_at: Any, num_steps: Any
    ) -> Any:
        size = types.intp
        return types.void(sums, size, size, x, x_at, y, y_at, size), emit

    return block


def dot_rows(num_rows: int, num_outputs: int, *, has_bytes: bool = False, prefetches: bool = False) -> Any:
    """Make an intrinsic that multiplies rows with rows of a matrix: sixteen sums are kept in registers.

    The intrinsic is `rows(sums, x, x_at, y, y_at, num_words, ahead_at)`: the products of row r with row n of the matrix
    overwrite sums[r * num_outputs + n]. A word has 32 bits: two bfloat16, or four bytes, which are unsigned in x and
    signed in y.

    Args:
        has_bytes: words are four bytes; needs `HAS_BYTE_DOT`.
        prefetches: whether to fetch rows of the matrix into the second cache that a later call reads.

    Args of the intrinsic:
        sums: float32, of bytes int32 [16].
        x, x_at: array whose words are read; its index of each row's first element, int64 [num_rows].
        y, y_at: array whose words are read; its index of each matrix row's first element, int64 [num_outputs].
        num_words: of a row; a multiple of 16.
        ahead_at: as `y_at`, of the rows that are fetched; they may lie behind the end.
    """
    assert num_rows * num_outputs == LANES
    dot, lanes, lane = (emit_byte_dot, INTS, I32) if has_bytes else (emit_dot, FLOATS, F32)

    def emit(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, x, x_at, y, y_at, num_words, ahead_at = arguments
        array = signature.args

        def number(array_type: Any, numbers: Any, place: int) -> Any:
            return builder.load(address(target, builder, array_type, numbers, ir.Constant(I64, place), I64))

        def places(array_type: Any, values: Any, starts: list[Any], word: Any, element: ir.Type) -> list[Any]:
            offset = builder.mul(word, ir.Constant(I64, 32 // array_type.dtype.bitwidth))
            return [
                address(target, builder, array_type, values, builder.add(start, offset), element) for start in starts
            ]

        x_starts = [number(array[2], x_at, row) for row in range(num_rows)]
        y_starts = [number(array[4], y_at, output) for output in range(num_outputs)]
        aheads = [number(array[6], ahead_at, output) for output in range(num_outputs)] if prefetches else []
        entry, head, body, end = builder.block, *(builder.append_basic_block(name) for name in ("head", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        word = builder.phi(I64)
        word.add_incoming(ir.Constant(I64, 0), entry)
        totals = [builder.phi(lanes) for _ in range(LANES)]
        for total in totals:
            total.add_incoming(ir.Constant(lanes, [ir.Constant(lane, 0)] * LANES), entry)
        builder.cbranch(builder.icmp_signed("<", word, num_words), body, end)
        builder.position_at_end(body)
        weights = [builder.load(place, align=2) for place in places(array[3], y, y_starts, word, INTS)]
        rows = [builder.load(place, align=2) for place in places(array[1], x, x_starts, word, INTS)]
        for place in places(array[3], y, aheads, word, I8):
            fetch_line(builder, place)
        for place, total in enumerate(totals):
            row, output = divmod(place, num_outputs)
            total.add_incoming(dot(builder, total, rows[row], weights[output]), builder.block)
        word.add_incoming(builder.add(word, ir.Constant(I64, LANES)), builder.block)
        builder.branch(head)
        builder.position_at_end(end)
        found = _sum_each(builder, totals, builder.add if has_bytes else builder.fadd)
        builder.store(found, address(target, builder, array[0], sums, ir.Constant(I64, 0), lanes), align=4)
        return target.get_dummy_value()

    @intrinsic
    def rows(  # noqa: PLR0913  a kernel's call
        _context: Any, sums: Any, x: Any, x_at: Any, y: Any, y_at: Any, num_words: Any, ahead_at: Any
    ) -> Any:
        return types.void(sums, x, x_at, y, y_at, types.intp, ahead_at), emit

    return rows


def dot_codes(num_rows: int, num_outputs: int) -> Any:
    """Make an intrinsic that multiplies rows with rows of codes of four bits; needs `HAS_DOT`.

    The intrinsic is `rows(sums, x, x_at, codes, codes_at, scales, scales_at, table, num_blocks)`: the products of row r
    with output n overwrite sums[r * num_outputs + n]. The products of a block of 64 inputs are summed, then multiplied
    by the scale of the output's block.

    Args of the intrinsic:
        sums: float32 [16].
        x, x_at: bits of bfloat16, uint16; index of each row's first number, int64 [num_rows].
        codes, codes_at: as `look_up` reads them; index of each output's first number, int64 [num_outputs].
        scales, scales_at: bits of bfloat16, uint16, one for each block; as `codes_at`.
        table: bits of bfloat16, uint16 [32]: the sixteen levels twice.
        num_blocks: of a row.
    """
    assert num_rows * num_outputs == LANES
    words = ir.VectorType(I16, 2 * LANES)
    halves = [
        ir.Constant(words, [ir.Constant(I16, low)] * LANES + [ir.Constant(I16, low + 4)] * LANES) for low in (0, 8)
    ]
    twice = ir.Constant(ir.VectorType(I32, 2 * LANES), [ir.Constant(I32, lane % LANES) for lane in range(2 * LANES)])

    def emit(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, x, x_at, codes, codes_at, scales, scales_at, table, num_blocks = arguments
        array = signature.args

        def starts(place: int, numbers: Any, count: int) -> list[Any]:
            indices = [ir.Constant(I64, number) for number in range(count)]
            return [builder.load(address(target, builder, array[place], numbers, index, I64)) for index in indices]

        def loaded(place: int, values: Any, index: Any, element: ir.Type) -> Any:
            return builder.load(address(target, builder, array[place], values, index, element), align=2)

        x_starts, code_starts = starts(2, x_at, num_rows), starts(4, codes_at, num_outputs)
        scale_starts = starts(6, scales_at, num_outputs)
        levels = loaded(7, table, ir.Constant(I64, 0), words)
        entry, head, body, end = builder.block, *(builder.append_basic_block(name) for name in ("head", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        block = builder.phi(I64)
        block.add_incoming(ir.Constant(I64, 0), entry)
        totals = [builder.phi(FLOATS) for _ in range(LANES)]
        for one in totals:
            one.add_incoming(floats(0.0), entry)
        builder.cbranch(builder.icmp_signed("<", block, num_blocks), body, end)
        builder.position_at_end(body)
        at_codes, at_x = (builder.mul(block, ir.Constant(I64, size)) for size in (LANES, 4 * LANES))
        weights, factors = [], []
        for first, scale_at in zip(code_starts, scale_starts, strict=True):
            found = loaded(3, codes, builder.add(first, at_codes), HALVES)
            both = builder.shuffle_vector(found, found, twice)
            indices = [builder.lshr(both, shifts) for shifts in halves]
            named = (call(builder, "llvm.x86.avx512.permvar.hi.512", words, [levels, one]) for one in indices)
            weights.append([builder.bitcast(one, INTS) for one in named])
            bits = builder.zext(loaded(5, scales, builder.add(scale_at, block), I16), I32)
            factors.append(emit_splat(builder, builder.bitcast(builder.shl(bits, ir.Constant(I32, 16)), F32), FLOATS))
        for row, first in enumerate(x_starts):
            places = [builder.add(builder.add(first, at_x), ir.Constant(I64, more)) for more in (0, 2 * LANES)]
            inputs = [loaded(1, x, place, INTS) for place in places]
            for output in range(num_outputs):
                products = floats(0.0)
                for one, weight in zip(inputs, weights[output], strict=True):
                    products = emit_dot(builder, products, one, weight)
                before = totals[row * num_outputs + output]
                after = call(builder, "llvm.fma.v16f32", FLOATS, [products, factors[output], before])
                before.add_incoming(after, builder.block)
        block.add_incoming(builder.add(block, ir.Constant(I64, 1)), builder.block)
        builder.branch(head)
        builder.position_at_end(end)
        pointer = address(target, builder, array[0], sums, ir.Constant(I64, 0), FLOATS)
        builder.store(_sum_each(builder, totals, builder.fadd), pointer, align=4)
        return target.get_dummy_value()

    @intrinsic
    def rows(  # noqa: PLR0913  a kernel's call
        _context: Any,
        sums: Any,
        x: Any,
        x_at: Any,
        codes: Any,
        codes_at: Any,
        scales: Any,
        scales_at: Any,
        table: Any,
        num_blocks: Any,
    ) -> Any:
        return types.void(sums, x, x_at, codes, codes_at, scales, scales_at, table, types.intp), emit

    return rows


def _sum_each(builder: Any, vectors: list[Any], add: Callable[..., Any]) -> Any:
    """Return the sums of sixteen vectors, in one vector."""
    size = LANES // 2
    while len(vectors) > 1:  # halves of parts are added: half as many vectors of parts half as long
        low = [lane for lane in range(2 * LANES) if lane % (2 * size) < size]
        masks = [ir.Constant(INTS, [ir.Constant(I32, lane + shift) for lane in low]) for shift in (0, size)]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [add(*(builder.shuffle_vector(a, b, mask) for mask in masks)) for a, b in pairs]
        size //= 2
    return vectors[0]
