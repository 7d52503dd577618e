"""Vectors of sixteen float32 for the compiled kernels, and products of bfloat16 that are summed in float32.

LLVM vectorises plain loops, but it neither finds a processor's bfloat16 products nor keeps a block of sums in
registers. On a processor without such products (AVX-512 bf16) the same operations are made of float32 ones; results
differ by rounding. tests/ops/test_cpu_vectors.py computes each operation with numpy.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, register_model

from stillroom.ops.cpu_compiler import HOST_FEATURES

LANES = 16

HAS_DOT = bool(HOST_FEATURES.get("avx512bf16"))
"""Whether one instruction of this processor multiplies pairs of bfloat16 and adds them to float32."""
HAS_BYTE_DOT = bool(HOST_FEATURES.get("avx512vnni"))
"""Whether one instruction multiplies four bytes with four and adds the products to an int32."""

_HAS_SCALE = bool(HOST_FEATURES.get("avx512f") and HOST_FEATURES.get("avx512dq"))
"""Whether one instruction splits off a float's fraction, and another multiplies by a power of two."""
_FLOOR = 9
"""Operand of the first: round down, raise nothing."""

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _INTS, _HALVES = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES), ir.VectorType(_I16, LANES)


class Lanes(types.Type):  # type: ignore[misc]
    """Sixteen float32 in one register: the type of a variable in a kernel."""

    def __init__(self) -> None:
        super().__init__("Lanes")


_LANES = Lanes()


@register_model(Lanes)
class _LanesModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, declared: Any) -> None:
        super().__init__(manager, declared, _FLOATS)


def _ints(value: int) -> ir.Constant:
    return ir.Constant(_INTS, [ir.Constant(_I32, value)] * LANES)


def _floats(value: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [ir.Constant(_F32, value)] * LANES)


def call(builder: Any, name: str, result: ir.Type, arguments: Sequence[Any]) -> Any:
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def _splat(builder: Any, value: Any, vector: ir.VectorType) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, _ints(0))


def address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, element: ir.Type) -> Any:
    """Return where an element of a contiguous array lies, counted flat, as a pointer to `element`."""
    start = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(start, [index]), element.as_pointer())


def _call_masked(builder: Any, name: str, x: Any, y: Any) -> Any:
    """Call an AVX-512 instruction for all lanes, with the rounding that is set."""
    mask, rounding = ir.Constant(_I16, -1), ir.Constant(_I32, 4)
    return call(builder, f"llvm.x86.avx512.mask.{name}.ps.512", _FLOATS, [x, y, x, mask, rounding])


def _as_halves(builder: Any, floats: Any) -> Any:
    """Round to bfloat16, to nearest, ties to even; returns 16 bits a lane."""
    if HAS_DOT:
        return call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _HALVES, [floats])
    bits = builder.bitcast(floats, _INTS)
    odd = builder.and_(builder.lshr(bits, _ints(16)), _ints(1))
    return builder.trunc(builder.lshr(builder.add(builder.add(bits, _ints(0x7FFF)), odd), _ints(16)), _HALVES)


def _dot(builder: Any, total: Any, x: Any, y: Any) -> Any:
    """total + products of the two bfloat16 in each lane of x and y."""
    if HAS_DOT:
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, [total, x, y])
    halves = [(builder.shl(v, _ints(16)), builder.and_(v, _ints(-65536))) for v in (x, y)]
    for a, b in zip(*halves, strict=True):
        factors = [builder.bitcast(half, _FLOATS) for half in (a, b)]
        total = call(builder, "llvm.fma.v16f32", _FLOATS, [*factors, total])
    return total


def _byte_dot(builder: Any, total: Any, x: Any, y: Any) -> Any:
    """total + products of the four unsigned bytes in each lane of x with the signed bytes of y, int32."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", _INTS, [total, x, y])


# --------------------------------------------------------------------------------------------------- operations
@intrinsic
def splat(_context: Any, value: Any) -> Any:
    """Return a float32 in every lane."""

    def codegen(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _splat(builder, arguments[0], _FLOATS)

    return _LANES(types.float32), codegen


@intrinsic
def load(_context: Any, array: Any, index: Any) -> Any:
    """Return sixteen float32 of a contiguous array from a flat index on."""

    def codegen(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(address(target, builder, signature.args[0], arguments[0], arguments[1], _FLOATS), align=4)

    return _LANES(array, types.intp), codegen


@intrinsic
def store(_context: Any, array: Any, index: Any, x: Any) -> Any:
    """Write sixteen float32 to a contiguous array from a flat index on."""

    def codegen(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(target, builder, signature.args[0], arguments[0], arguments[1], _FLOATS)
        builder.store(arguments[2], pointer, align=4)
        return target.get_dummy_value()

    return types.void(array, types.intp, x), codegen


@intrinsic
def store_pairs(_context: Any, array: Any, index: Any, low: Any, high: Any) -> Any:
    """Write the bfloat16 of `low` and of `high` as the halves of sixteen uint32, from a flat index on."""

    def codegen(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(target, builder, signature.args[0], arguments[0], arguments[1], _INTS)
        low, high = (builder.zext(_as_halves(builder, x), _INTS) for x in arguments[2:])
        builder.store(builder.or_(low, builder.shl(high, _ints(16))), pointer, align=4)
        return target.get_dummy_value()

    return types.void(array, types.intp, low, high), codegen


@intrinsic
def interleave(_context: Any, pairs: Any, index: Any, halves: Any, low_at: Any, high_at: Any) -> Any:
    """Write two rows of sixteen bfloat16 as the halves of sixteen uint32, from a flat index on.

    Args:
        halves: uint16; flat indices of both rows in it. An index below zero is a row of zeros.
    """

    def codegen(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pairs, index, halves, *rows = arguments
        found = []
        for row in rows:
            is_there = builder.icmp_signed(">=", row, ir.Constant(_I64, 0))
            place = builder.select(is_there, row, ir.Constant(_I64, 0))
            value = builder.load(address(target, builder, signature.args[2], halves, place, _HALVES), align=2)
            found.append(builder.select(is_there, builder.zext(value, _INTS), _ints(0)))
        pointer = address(target, builder, signature.args[0], pairs, index, _INTS)
        builder.store(builder.or_(found[0], builder.shl(found[1], _ints(16))), pointer, align=4)
        return target.get_dummy_value()

    return types.void(pairs, types.intp, halves, types.intp, types.intp), codegen


def _on_lanes(build: Callable[..., Any], *arguments: Any) -> Any:
    def codegen(_target: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return build(builder, *values)

    return _LANES(*arguments), codegen


@intrinsic
def add(_context: Any, x: Any, y: Any) -> Any:
    """x + y"""
    return _on_lanes(lambda builder, a, b: builder.fadd(a, b), x, y)


@intrinsic
def multiply(_context: Any, x: Any, y: Any) -> Any:
    """x * y"""
    return _on_lanes(lambda builder, a, b: builder.fmul(a, b), x, y)


@intrinsic
def divide(_context: Any, x: Any, y: Any) -> Any:
    """x / y"""
    return _on_lanes(lambda builder, a, b: builder.fdiv(a, b), x, y)


@intrinsic
def multiply_add(_context: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once"""
    return _on_lanes(lambda builder, *values: call(builder, "llvm.fma.v16f32", _FLOATS, values), x, y, z)


def _greater(builder: Any, a: Any, b: Any) -> Any:
    """The greater of a and b; b if one of them is NaN, as the instruction does it."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def greater(_context: Any, x: Any, y: Any) -> Any:
    """The greater of x and y; y if one of them is NaN."""
    return _on_lanes(_greater, x, y)


@intrinsic
def any_greater(_context: Any, x: Any, y: Any) -> Any:
    """Whether x is greater than y in any lane."""

    def codegen(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(builder.fcmp_ordered(">", *arguments), _I16)
        return builder.icmp_unsigned("!=", bits, ir.Constant(_I16, 0))

    return types.boolean(x, y), codegen


@intrinsic
def where_between(_context: Any, value: Any, low: Any, x: Any, high: Any, otherwise: Any) -> Any:
    """`value` where low <= x < high, else `otherwise`."""

    def build(builder: Any, value: Any, low: Any, x: Any, high: Any, otherwise: Any) -> Any:
        inside = builder.and_(builder.fcmp_ordered("<=", low, x), builder.fcmp_ordered("<", x, high))
        return builder.select(inside, value, otherwise)

    return _on_lanes(build, value, low, x, high, otherwise)


_POWERS = (1.0, 0.6930448412895203, 0.2412802129983902, 0.052242446690797806, 0.013426701538264751)
"""Coefficients of 2^x for x in [0, 1], found by least maximum error; 2^0 is exactly 1."""


@intrinsic
def power_of_two(_context: Any, x: Any) -> Any:
    """2^x within 4e-6 of its value, for x of at most 126; below -126, at most 2^-126; NaN stays NaN."""

    def build(builder: Any, x: Any) -> Any:
        if _HAS_SCALE:
            rest = _call_masked(builder, "reduce", x, ir.Constant(_I32, _FLOOR))
        else:
            x = _greater(builder, _floats(-126.0), x)
            whole = call(builder, "llvm.floor.v16f32", _FLOATS, [x])
            rest = builder.fsub(x, whole)
        value = _floats(_POWERS[-1])
        for coefficient in reversed(_POWERS[:-1]):
            value = call(builder, "llvm.fma.v16f32", _FLOATS, [value, rest, _floats(coefficient)])
        if _HAS_SCALE:
            return _call_masked(builder, "scalef", value, x)
        exponent = builder.shl(builder.fptosi(whole, _INTS), _ints(23))
        return builder.bitcast(builder.add(builder.bitcast(value, _INTS), exponent), _FLOATS)

    return _on_lanes(build, x)


def _permuted(builder: Any, table: Any, indices: Any) -> Any:
    """The element of `table` at the lowest four bits of each lane of `indices`."""
    if _HAS_SCALE:
        return call(builder, "llvm.x86.avx512.permvar.sf.512", _FLOATS, [table, indices])
    found, four_bits = ir.Constant(_FLOATS, ir.Undefined), builder.and_(indices, _ints(15))
    for lane in range(LANES):
        place = ir.Constant(_I32, lane)
        found = builder.insert_element(
            found, builder.extract_element(table, builder.extract_element(four_bits, place)), place
        )
    return found


@intrinsic
def look_up(_context: Any, table: Any, codes: Any, index: Any, number: Any) -> Any:
    """Return the elements of `table` that sixteen codes of four bits name.

    Args:
        codes: contiguous uint16, four codes each.
        index: flat index of the first of sixteen numbers.
        number: which code of each, 0 to 3, from the lowest bits on.
    """

    def codegen(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        table, codes, index, number = arguments
        halves = builder.load(address(target, builder, signature.args[1], codes, index, _HALVES), align=2)
        shift = builder.trunc(builder.mul(number, ir.Constant(_I64, 4)), _I32)
        return _permuted(builder, table, builder.lshr(builder.zext(halves, _INTS), _splat(builder, shift, _INTS)))

    return _LANES(table, codes, types.intp, types.intp), codegen


@intrinsic
def store_halves(_context: Any, array: Any, index: Any, x: Any) -> Any:
    """Write sixteen float32 as bfloat16 to a contiguous array of uint16, from a flat index on."""

    def codegen(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(target, builder, signature.args[0], arguments[0], arguments[1], _HALVES)
        builder.store(builder.bitcast(_as_halves(builder, arguments[2]), _HALVES), pointer, align=2)
        return target.get_dummy_value()

    return types.void(array, types.intp, x), codegen


@intrinsic
def total(_context: Any, x: Any) -> Any:
    """Return the sum of all lanes, halves first."""

    def codegen(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        value = arguments[0]
        for size in (8, 4, 2, 1):
            mask = ir.Constant(_INTS, [ir.Constant(_I32, lane ^ size) for lane in range(LANES)])
            value = builder.fadd(value, builder.shuffle_vector(value, value, mask))
        return builder.extract_element(value, ir.Constant(_I32, 0))

    return types.float32(x), codegen


# ------------------------------------------------------------------------------------------- blocks of products
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
            return ir.Constant(_I64, value)

        def sum_at(row: int, vector: int) -> Any:
            place = builder.add(sums_at, builder.add(builder.mul(index(row), width), index(LANES * vector)))
            return address(target, builder, array[0], sums, place, _FLOATS)

        places = [(row, vector) for row in range(num_rows) for vector in range(num_vectors)]
        starts = [builder.load(address(target, builder, array[4], x_at, index(row), _I64)) for row in range(num_rows)]
        entry = builder.block
        given, head, body, end = (builder.append_basic_block(name) for name in ("given", "head", "body", "end"))
        builder.cbranch(is_added, given, head)
        with builder.goto_block(given):
            found = [builder.load(sum_at(*place), align=4) for place in places]
            builder.branch(head)
        builder.position_at_end(head)
        pair = builder.phi(_I64)
        totals = [builder.phi(_FLOATS) for _ in places]
        for block, values in ((entry, [_floats(0.0)] * len(places)), (given, found)):
            pair.add_incoming(index(0), block)
            for total, value in zip(totals, values, strict=True):
                total.add_incoming(value, block)
        builder.cbranch(builder.icmp_signed("<", pair, num_pairs), body, end)
        builder.position_at_end(body)
        y_row = builder.add(y_at, builder.mul(pair, width))
        columns = [
            builder.load(
                address(target, builder, array[6], y, builder.add(y_row, index(LANES * vector)), _INTS), align=4
            )
            for vector in range(num_vectors)
        ]
        step = builder.mul(pair, x_step)
        for row, start in enumerate(starts):
            one = builder.load(address(target, builder, array[3], x, builder.add(start, step), _I32), align=2)
            wide = _splat(builder, one, _INTS)
            for vector in range(num_vectors):
                total = totals[row * num_vectors + vector]
                total.add_incoming(_dot(builder, total, wide, columns[vector]), builder.block)
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


def dot_rows(num_rows: int, num_outputs: int, *, has_bytes: bool = False) -> Any:
    """Make an intrinsic that multiplies rows with rows of a matrix: sixteen sums are kept in registers.

    The intrinsic is `rows(sums, sums_at, x, x_at, y, y_at, num_words)`: for each row r and output n, the sum at the
    flat index sums_at[r * num_outputs + n] is overwritten by the products of row r with row n of the matrix. A word has
    32 bits: two bfloat16, or four bytes, which are unsigned in x and signed in y.

    Args:
        has_bytes: words are four bytes; needs `HAS_BYTE_DOT`.

    Args of the intrinsic:
        sums, sums_at: float32, of bytes int32; int64 [16].
        x, x_at: array whose words are read; its index of each row's first element, int64 [num_rows].
        y, y_at: array whose words are read; its index of each matrix row's first element, int64 [num_outputs].
        num_words: of a row; a multiple of 16.
    """
    assert num_rows * num_outputs == LANES
    dot, lanes, lane = (_byte_dot, _INTS, _I32) if has_bytes else (_dot, _FLOATS, _F32)

    def emit(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, sums_at, x, x_at, y, y_at, num_words = arguments
        array = signature.args

        def number(array_type: Any, numbers: Any, place: int) -> Any:
            return builder.load(address(target, builder, array_type, numbers, ir.Constant(_I64, place), _I64))

        def vectors(array_type: Any, values: Any, starts: list[Any], word: Any) -> list[Any]:
            offset = builder.mul(word, ir.Constant(_I64, 32 // array_type.dtype.bitwidth))
            places = [builder.add(start, offset) for start in starts]
            pointers = [address(target, builder, array_type, values, place, _INTS) for place in places]
            return [builder.load(pointer, align=2) for pointer in pointers]

        x_starts = [number(array[3], x_at, row) for row in range(num_rows)]
        y_starts = [number(array[5], y_at, output) for output in range(num_outputs)]
        entry, head, body, end = builder.block, *(builder.append_basic_block(name) for name in ("head", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        word = builder.phi(_I64)
        word.add_incoming(ir.Constant(_I64, 0), entry)
        totals = [builder.phi(lanes) for _ in range(LANES)]
        for total in totals:
            total.add_incoming(ir.Constant(lanes, [ir.Constant(lane, 0)] * LANES), entry)
        builder.cbranch(builder.icmp_signed("<", word, num_words), body, end)
        builder.position_at_end(body)
        weights = vectors(array[4], y, y_starts, word)
        rows = vectors(array[2], x, x_starts, word)
        for place, total in enumerate(totals):
            row, output = divmod(place, num_outputs)
            total.add_incoming(dot(builder, total, rows[row], weights[output]), builder.block)
        word.add_incoming(builder.add(word, ir.Constant(_I64, LANES)), builder.block)
        builder.branch(head)
        builder.position_at_end(end)
        found = _sum_each(builder, totals, builder.add if has_bytes else builder.fadd)
        for place in range(LANES):
            pointer = address(target, builder, array[0], sums, number(array[1], sums_at, place), lane)
            builder.store(builder.extract_element(found, ir.Constant(_I32, place)), pointer)
        return target.get_dummy_value()

    @intrinsic
    def rows(  # noqa: PLR0913  a kernel's call
        _context: Any, sums: Any, sums_at: Any, x: Any, x_at: Any, y: Any, y_at: Any, num_words: Any
    ) -> Any:
        return types.void(sums, sums_at, x, x_at, y, y_at, types.intp), emit

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
    words = ir.VectorType(_I16, 2 * LANES)
    halves = [
        ir.Constant(words, [ir.Constant(_I16, low)] * LANES + [ir.Constant(_I16, low + 4)] * LANES) for low in (0, 8)
    ]
    twice = ir.Constant(ir.VectorType(_I32, 2 * LANES), [ir.Constant(_I32, lane % LANES) for lane in range(2 * LANES)])

    def emit(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, x, x_at, codes, codes_at, scales, scales_at, table, num_blocks = arguments
        array = signature.args

        def starts(place: int, numbers: Any, count: int) -> list[Any]:
            indices = [ir.Constant(_I64, number) for number in range(count)]
            return [builder.load(address(target, builder, array[place], numbers, index, _I64)) for index in indices]

        def loaded(place: int, values: Any, index: Any, element: ir.Type) -> Any:
            return builder.load(address(target, builder, array[place], values, index, element), align=2)

        x_starts, code_starts = starts(2, x_at, num_rows), starts(4, codes_at, num_outputs)
        scale_starts = starts(6, scales_at, num_outputs)
        levels = loaded(7, table, ir.Constant(_I64, 0), words)
        entry, head, body, end = builder.block, *(builder.append_basic_block(name) for name in ("head", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        block = builder.phi(_I64)
        block.add_incoming(ir.Constant(_I64, 0), entry)
        totals = [builder.phi(_FLOATS) for _ in range(LANES)]
        for one in totals:
            one.add_incoming(_floats(0.0), entry)
        builder.cbranch(builder.icmp_signed("<", block, num_blocks), body, end)
        builder.position_at_end(body)
        at_codes, at_x = (builder.mul(block, ir.Constant(_I64, size)) for size in (LANES, 4 * LANES))
        weights, factors = [], []
        for first, scale_at in zip(code_starts, scale_starts, strict=True):
            found = loaded(3, codes, builder.add(first, at_codes), _HALVES)
            both = builder.shuffle_vector(found, found, twice)
            indices = [builder.lshr(both, shifts) for shifts in halves]
            named = (call(builder, "llvm.x86.avx512.permvar.hi.512", words, [levels, one]) for one in indices)
            weights.append([builder.bitcast(one, _INTS) for one in named])
            bits = builder.zext(loaded(5, scales, builder.add(scale_at, block), _I16), _I32)
            factors.append(_splat(builder, builder.bitcast(builder.shl(bits, ir.Constant(_I32, 16)), _F32), _FLOATS))
        for row, first in enumerate(x_starts):
            places = [builder.add(builder.add(first, at_x), ir.Constant(_I64, more)) for more in (0, 2 * LANES)]
            inputs = [loaded(1, x, place, _INTS) for place in places]
            for output in range(num_outputs):
                products = _floats(0.0)
                for one, weight in zip(inputs, weights[output], strict=True):
                    products = _dot(builder, products, one, weight)
                before = totals[row * num_outputs + output]
                after = call(builder, "llvm.fma.v16f32", _FLOATS, [products, factors[output], before])
                before.add_incoming(after, builder.block)
        block.add_incoming(builder.add(block, ir.Constant(_I64, 1)), builder.block)
        builder.branch(head)
        builder.position_at_end(end)
        pointer = address(target, builder, array[0], sums, ir.Constant(_I64, 0), _FLOATS)
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
        masks = [ir.Constant(_INTS, [ir.Constant(_I32, lane + shift) for lane in low]) for shift in (0, size)]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [add(*(builder.shuffle_vector(a, b, mask) for mask in masks)) for a, b in pairs]
        size //= 2
    return vectors[0]
