"""Vectors of sixteen float32 for the compiled kernels, and products of bfloat16 that are summed in float32.

LLVM vectorises plain loops, but it does not find a processor's bfloat16 products. Functions that begin with `emit`, and
the other plain ones, build LLVM's instructions, as `cpu_blocks` does; intrinsics are called in kernels. On a processor
without such products (AVX-512 bf16) the same operations are made of float32 ones; results differ by rounding.
tests/ops/test_cpu_vectors.py computes each operation with numpy.
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

IS_ONE_REGISTER = bool(HOST_FEATURES.get("avx512f"))
"""Whether a register of this processor holds sixteen float32; else blocks of many sums are slower than plain loops."""
HAS_DOT = bool(HOST_FEATURES.get("avx512bf16"))
"""Whether one instruction of this processor multiplies pairs of bfloat16 and adds them to float32."""
HAS_BYTE_DOT = bool(HOST_FEATURES.get("avx512vnni"))
"""Whether one instruction multiplies four bytes with four and adds the products to an int32."""

_HAS_SCALE = bool(HOST_FEATURES.get("avx512f") and HOST_FEATURES.get("avx512dq"))
"""Whether one instruction splits off a float's fraction, and another multiplies by a power of two."""
_FLOOR = 9
"""Operand of the first: round down, raise nothing."""

I8, I16, I32, I64, F32 = *(ir.IntType(width) for width in (8, 16, 32, 64)), ir.FloatType()
FLOATS, INTS, HALVES = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(I16, LANES)


class Lanes(types.Type):  # type: ignore[misc]
    """Sixteen float32 in one register: the type of a variable in a kernel."""

    def __init__(self) -> None:
        super().__init__("Lanes")


LANES_TYPE = Lanes()


@register_model(Lanes)
class _LanesModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, declared: Any) -> None:
        super().__init__(manager, declared, FLOATS)


def ints(value: int) -> ir.Constant:
    return ir.Constant(INTS, [ir.Constant(I32, value)] * LANES)


def floats(value: float) -> ir.Constant:
    return ir.Constant(FLOATS, [ir.Constant(F32, value)] * LANES)


def call(builder: Any, name: str, result: ir.Type, arguments: Sequence[Any]) -> Any:
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def emit_splat(builder: Any, value: Any, vector: ir.VectorType) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, undefined, ints(0))


def address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, element: ir.Type) -> Any:
    """Return where an element of a contiguous array lies, counted flat, as a pointer to `element`."""
    start = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(start, [index]), element.as_pointer())


def _call_masked(builder: Any, name: str, x: Any, y: Any) -> Any:
    """Call an AVX-512 instruction for all lanes, with the rounding that is set."""
    mask, rounding = ir.Constant(I16, -1), ir.Constant(I32, 4)
    return call(builder, f"llvm.x86.avx512.mask.{name}.ps.512", FLOATS, [x, y, x, mask, rounding])


def _as_halves(builder: Any, floats: Any) -> Any:
    """Round to bfloat16, to nearest, ties to even; returns 16 bits a lane."""
    if HAS_DOT:
        return call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", HALVES, [floats])
    bits = builder.bitcast(floats, INTS)
    odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    return builder.trunc(builder.lshr(builder.add(builder.add(bits, ints(0x7FFF)), odd), ints(16)), HALVES)


def emit_dot(builder: Any, total: Any, x: Any, y: Any) -> Any:
    """total + products of the two bfloat16 in each lane of x and y."""
    if HAS_DOT:
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, x, y])
    halves = [(builder.shl(v, ints(16)), builder.and_(v, ints(-65536))) for v in (x, y)]
    for a, b in zip(*halves, strict=True):
        factors = [builder.bitcast(half, FLOATS) for half in (a, b)]
        total = call(builder, "llvm.fma.v16f32", FLOATS, [*factors, total])
    return total


def emit_byte_dot(builder: Any, total: Any, x: Any, y: Any) -> Any:
    """total + products of the four unsigned bytes in each lane of x with the signed bytes of y, int32."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", INTS, [total, x, y])


@intrinsic
def splat(_context: Any, value: Any) -> Any:
    """Return a float32 in every lane."""

    def codegen(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return emit_splat(builder, arguments[0], FLOATS)

    return LANES_TYPE(types.float32), codegen


@intrinsic
def load(_context: Any, array: Any, index: Any) -> Any:
    """Return sixteen float32 of a contiguous array from a flat index on."""

    def codegen(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(address(target, builder, signature.args[0], arguments[0], arguments[1], FLOATS), align=4)

    return LANES_TYPE(array, types.intp), codegen


@intrinsic
def store(_context: Any, array: Any, index: Any, x: Any) -> Any:
    """Write sixteen float32 to a contiguous array from a flat index on."""

    def codegen(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(target, builder, signature.args[0], arguments[0], arguments[1], FLOATS)
        builder.store(arguments[2], pointer, align=4)
        return target.get_dummy_value()

    return types.void(array, types.intp, x), codegen


@intrinsic
def store_pairs(_context: Any, array: Any, index: Any, low: Any, high: Any) -> Any:
    """Write the bfloat16 of `low` and of `high` as the halves of sixteen uint32, from a flat index on."""

    def codegen(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(target, builder, signature.args[0], arguments[0], arguments[1], INTS)
        low, high = (builder.zext(_as_halves(builder, x), INTS) for x in arguments[2:])
        builder.store(builder.or_(low, builder.shl(high, ints(16))), pointer, align=4)
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
            is_there = builder.icmp_signed(">=", row, ir.Constant(I64, 0))
            place = builder.select(is_there, row, ir.Constant(I64, 0))
            value = builder.load(address(target, builder, signature.args[2], halves, place, HALVES), align=2)
            found.append(builder.select(is_there, builder.zext(value, INTS), ints(0)))
        pointer = address(target, builder, signature.args[0], pairs, index, INTS)
        builder.store(builder.or_(found[0], builder.shl(found[1], ints(16))), pointer, align=4)
        return target.get_dummy_value()

    return types.void(pairs, types.intp, halves, types.intp, types.intp), codegen


def fetch_line(builder: Any, place: Any) -> None:
    """Fetch the 64 bytes around an address, a pointer to bytes, into the second cache."""
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, *(ir.Constant(I32, value) for value in (0, 2, 1))])


def _on_lanes(build: Callable[..., Any], *arguments: Any) -> Any:
    def codegen(_target: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return build(builder, *values)

    return LANES_TYPE(*arguments), codegen


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
    return _on_lanes(lambda builder, *values: call(builder, "llvm.fma.v16f32", FLOATS, values), x, y, z)


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
        bits = builder.bitcast(builder.fcmp_ordered(">", *arguments), I16)
        return builder.icmp_unsigned("!=", bits, ir.Constant(I16, 0))

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
            rest = _call_masked(builder, "reduce", x, ir.Constant(I32, _FLOOR))
        else:
            x = _greater(builder, floats(-126.0), x)
            whole = call(builder, "llvm.floor.v16f32", FLOATS, [x])
            rest = builder.fsub(x, whole)
        value = floats(_POWERS[-1])
        for coefficient in reversed(_POWERS[:-1]):
            value = call(builder, "llvm.fma.v16f32", FLOATS, [value, rest, floats(coefficient)])
        if _HAS_SCALE:
            return _call_masked(builder, "scalef", value, x)
        exponent = builder.shl(builder.fptosi(whole, INTS), ints(23))
        return builder.bitcast(builder.add(builder.bitcast(value, INTS), exponent), FLOATS)

    return _on_lanes(build, x)


def _permuted(builder: Any, table: Any, indices: Any) -> Any:
    """The element of `table` at the lowest four bits of each lane of `indices`."""
    if _HAS_SCALE:
        return call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, [table, indices])
    found, four_bits = ir.Constant(FLOATS, ir.Undefined), builder.and_(indices, ints(15))
    for lane in range(LANES):
        place = ir.Constant(I32, lane)
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
        halves = builder.load(address(target, builder, signature.args[1], codes, index, HALVES), align=2)
        shift = builder.trunc(builder.mul(number, ir.Constant(I64, 4)), I32)
        return _permuted(builder, table, builder.lshr(builder.zext(halves, INTS), emit_splat(builder, shift, INTS)))

    return LANES_TYPE(table, codes, types.intp, types.intp), codegen


@intrinsic
def store_halves(_context: Any, array: Any, index: Any, x: Any) -> Any:
    """Write sixteen float32 as bfloat16 to a contiguous array of uint16, from a flat index on."""

    def codegen(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = address(target, builder, signature.args[0], arguments[0], arguments[1], HALVES)
        builder.store(builder.bitcast(_as_halves(builder, arguments[2]), HALVES), pointer, align=2)
        return target.get_dummy_value()

    return types.void(array, types.intp, x), codegen


@intrinsic
def total(_context: Any, x: Any) -> Any:
    """Return the sum of all lanes, halves first."""

    def codegen(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        value = arguments[0]
        for size in (8, 4, 2, 1):
            mask = ir.Constant(INTS, [ir.Constant(I32, lane ^ size) for lane in range(LANES)])
            value = builder.fadd(value, builder.shuffle_vector(value, value, mask))
        return builder.extract_element(value, ir.Constant(I32, 0))

    return types.float32(x), codegen
