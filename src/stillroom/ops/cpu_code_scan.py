"""Compiled scan of lists of product-quantised codes with tables of bytes (Andre, Kermarrec and Le Scouarnec 2015).

A table of 256 bytes fits into four vector registers, so one step looks up 64 codes. Sums of bytes differ from the exact
scores by a bounded error, so the scan only chooses candidates: every code that may be among the best, and few others.
The caller scores those exactly. Lists are turned once, so that 64 codes of a subquantizer lie together, and then
scanned for every query that probes them. Lists are read at their addresses: in RAM, or in a mapped file. Reference:
tests/ops/test_cpu_code_scan.py.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from stillroom.ops.cpu_compiler import HOST_FEATURES, kernel

# Q queries, D dimensions, N centres, M subquantizers, C centroids of each (256), L lists, P pairs of a list and a
# query, R room for candidates, K candidates of a query

WIDTH = 64
"""Codes of a step."""
HAS_BYTE_TABLES = bool(HOST_FEATURES.get("avx512vbmi") and HOST_FEATURES.get("avx512bw"))
"""Whether one instruction looks up 64 bytes in a table of 128."""
MAX_SUBQUANTIZERS = 256
"""Sums have 16 bits."""
LEAST = np.int32(-(2**31))

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_BYTES, _WORDS, _INTS = ir.VectorType(_I8, 64), ir.VectorType(_I16, 32), ir.VectorType(_I32, 16)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, at: Any, element: ir.Type) -> Any:
    start = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(start, [at]), element.as_pointer())


def _permuted(builder: Any, low: Any, indices: Any, high: Any) -> Any:
    """The bytes of a table of 128 at the lowest seven bits of each of 64 indices."""
    function_type = ir.FunctionType(_BYTES, [_BYTES] * 3)
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [low, indices, high])


@intrinsic
def _sum_block(  # noqa: PLR0913  a kernel's call
    _context: Any, sums: Any, codes: Any, codes_at: Any, step: Any, tables: Any, tables_at: Any, num: Any
) -> Any:
    """Overwrite 64 sums (uint16) by those of the bytes that 64 codes of each of `num` subquantizers name; return the
    greatest.

    Args:
        codes, codes_at, step: flat index of the first code, and the distance between subquantizers.
        tables, tables_at: flat index of the first table of 256 bytes.
    """

    def codegen(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, codes, codes_at, step, tables, tables_at, num = arguments
        array = signature.args
        entry = builder.block
        head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        number = builder.phi(_I64)
        totals = [builder.phi(_WORDS) for _ in range(2)]
        number.add_incoming(ir.Constant(_I64, 0), entry)
        for total in totals:
            total.add_incoming(ir.Constant(_WORDS, [ir.Constant(_I16, 0)] * 32), entry)
        builder.cbranch(builder.icmp_signed("<", number, num), body, end)
        builder.position_at_end(body)
        at = builder.add(codes_at, builder.mul(number, step))
        indices = builder.load(_pointer(target, builder, array[1], codes, at, _BYTES), align=1)
        first = builder.add(tables_at, builder.mul(number, ir.Constant(_I64, 256)))
        parts = [
            builder.load(
                _pointer(target, builder, array[4], tables, builder.add(first, ir.Constant(_I64, 64 * part)), _BYTES),
                align=1,
            )
            for part in range(4)
        ]
        low, high = _permuted(builder, parts[0], indices, parts[1]), _permuted(builder, parts[2], indices, parts[3])
        is_high = builder.icmp_signed("<", indices, ir.Constant(_BYTES, [ir.Constant(_I8, 0)] * 64))
        found = builder.select(is_high, high, low)
        for half, total in enumerate(totals):
            lanes = ir.Constant(ir.VectorType(_I32, 32), [ir.Constant(_I32, 32 * half + i) for i in range(32)])
            wide = builder.zext(builder.shuffle_vector(found, found, lanes), _WORDS)
            total.add_incoming(builder.add(total, wide), body)
        number.add_incoming(builder.add(number, ir.Constant(_I64, 1)), body)
        builder.branch(head)
        builder.position_at_end(end)
        for half, total in enumerate(totals):
            place = _pointer(target, builder, array[0], sums, ir.Constant(_I64, 32 * half), _WORDS)
            builder.store(total, place, align=2)
        greatest = builder.select(builder.icmp_unsigned(">", *totals), *totals)
        reduce = ir.FunctionType(_I16, [_WORDS])
        name = "llvm.vector.reduce.umax.v32i16"
        found = builder.call(cgutils.get_or_insert_function(builder.module, reduce, name), [greatest])
        return builder.zext(found, _I32)

    size = types.intp
    return types.int32(sums, codes, size, size, tables, size, size), codegen


@intrinsic
def _turn_block(_context: Any, address: Any, width: Any, num: Any, turned: Any, at: Any, step: Any) -> Any:
    """Write four consecutive bytes of each of 64 codes so that the first bytes lie together, then the second ones.

    Args:
        address, width: address of the first code's bytes, and the distance between codes.
        num: codes that are there; of others zeros are written.
        turned, at, step: flat index of the first bytes, and the distance to the next ones.
    """

    def codegen(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, width, num, turned, at, step = arguments
        lanes = ir.Constant(_INTS, [ir.Constant(_I32, lane) for lane in range(16)])
        undefined = ir.Constant(_INTS, ir.Undefined)

        def splat(value: Any) -> Any:
            one = builder.insert_element(undefined, builder.trunc(value, _I32), ir.Constant(_I32, 0))
            return builder.shuffle_vector(one, undefined, ir.Constant(_INTS, [ir.Constant(_I32, 0)] * 16))

        def shuffled(first: Any, second: Any, places: list[int]) -> Any:
            order = ir.Constant(ir.VectorType(_I32, 64), [ir.Constant(_I32, place) for place in places])
            return builder.shuffle_vector(first, second, order)

        bool_lanes = ir.VectorType(ir.IntType(1), 16)
        gather_type = ir.FunctionType(_INTS, [_INTS, _I8.as_pointer(), _INTS, bool_lanes, _I32])
        name = "llvm.x86.avx512.mask.gather.dpi.512"
        gather = cgutils.get_or_insert_function(builder.module, gather_type, name)
        base, offsets, count = builder.inttoptr(address, _I8.as_pointer()), splat(width), splat(num)
        quarters = []
        for part in range(4):
            code = builder.add(lanes, ir.Constant(_INTS, [ir.Constant(_I32, 16 * part)] * 16))
            is_there = builder.icmp_signed("<", code, count)
            places = builder.mul(code, offsets)
            zeros = ir.Constant(_INTS, [ir.Constant(_I32, 0)] * 16)
            found = builder.call(gather, [zeros, base, places, is_there, ir.Constant(_I32, 1)])
            one = builder.bitcast(found, _BYTES)
            quarters.append(shuffled(one, one, [4 * (i % 16) + i // 16 for i in range(64)]))
        for byte in range(4):
            pair = [*range(16 * byte, 16 * byte + 16), *range(64 + 16 * byte, 64 + 16 * byte + 16)] * 2
            low, high = (shuffled(quarters[part], quarters[part + 1], pair) for part in (0, 2))
            whole = shuffled(low, high, [*range(32), *range(64, 96)])
            place = builder.add(at, builder.mul(ir.Constant(_I64, byte), step))
            builder.store(whole, _pointer(target, builder, signature.args[3], turned, place, _BYTES), align=1)
        return target.get_dummy_value()

    return types.void(address, types.intp, types.intp, turned, types.intp, types.intp), codegen


def _read(builder: Any, address: Any, number: ir.IntType) -> Any:
    return builder.load(builder.inttoptr(address, number.as_pointer()), align=1)


@intrinsic
def _byte_at(_context: Any, address: Any) -> Any:
    """Return the byte at an address."""
    return types.uint8(types.intp), lambda _target, builder, _signature, arguments: _read(builder, arguments[0], _I8)


@intrinsic
def _row_at(_context: Any, address: Any) -> Any:
    """Return the int64 at an address."""
    return types.int64(types.intp), lambda _target, builder, _signature, arguments: _read(builder, arguments[0], _I64)


@kernel
def centre_products(queries_QD: Any, centres_ND: Any, out_QN: Any) -> None:
    """Write the inner product of each query with each centre, reading each centre once for four queries."""
    num_queries, dimension = queries_QD.shape
    last, last_query = len(centres_ND) - 1, num_queries - 1
    for first in range(0, last + 1, 2):
        second = min(first + 1, last)
        for q0 in range(0, num_queries, 4):
            q1, q2, q3 = min(q0 + 1, last_query), min(q0 + 2, last_query), min(q0 + 3, last_query)
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
            for i in range(dimension):
                x, y = centres_ND[first, i], centres_ND[second, i]
                a0 += x * queries_QD[q0, i]
                a1 += x * queries_QD[q1, i]
                a2 += x * queries_QD[q2, i]
                a3 += x * queries_QD[q3, i]
                b0 += y * queries_QD[q0, i]
                b1 += y * queries_QD[q1, i]
                b2 += y * queries_QD[q2, i]
                b3 += y * queries_QD[q3, i]
            out_QN[q0, first], out_QN[q1, first], out_QN[q2, first], out_QN[q3, first] = a0, a1, a2, a3
            out_QN[q0, second], out_QN[q1, second], out_QN[q2, second], out_QN[q3, second] = b0, b1, b2, b3


@kernel
def _turn(address: Any, size: int, num_subquantizers: int, turned: Any, step: int) -> None:
    """Write the codes of a list so that those of a subquantizer lie together."""
    num_in_fours = num_subquantizers - num_subquantizers % 4 if HAS_BYTE_TABLES else 0
    for start in range(0, size, WIDTH):
        num = min(WIDTH, size - start)
        first = address + start * num_subquantizers
        for m in range(0, num_in_fours, 4):
            _turn_block(first + m, num_subquantizers, num, turned, m * step + start, step)
        for m in range(num_in_fours, num_subquantizers):
            for i in range(num):
                turned[m * step + start + i] = _byte_at(first + i * num_subquantizers + m)


@kernel
def _nth_largest(values: Any, count: int, num: int) -> Any:
    """Return the `num`-th largest of the first `count` values, by quickselect (Hoare 1961)."""
    values = values[:count].copy()
    low, high, wanted = 0, count - 1, num - 1
    while low < high:
        pivot, i, j = values[(low + high) // 2], low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i, j = i + 1, j - 1
        if wanted <= j:
            high = j
        elif wanted >= i:
            low = i
        else:
            break
    return values[wanted]


@kernel
def keep_best(totals: Any, places: Any, count: int, num: int, slack: int) -> Any:
    """Keep the candidates that may be among the best `num`; returns their number, and the least total that they have.

    Precondition: there are at least `num`.
    """
    limit = _nth_largest(totals, count, num) - slack
    num_kept = 0
    for i in range(count):
        if totals[i] >= limit:
            totals[num_kept], places[num_kept, 0], places[num_kept, 1] = totals[i], places[i, 0], places[i, 1]
            num_kept += 1
    return num_kept, limit


@kernel
def _is_allowed(address: int, bits: Any) -> bool:
    """Whether the bit of the row at an address is set; no bits allow every row."""
    if len(bits) == 0:
        return True
    row = _row_at(address)
    return bool(row >> 3 < len(bits) and (bits[row >> 3] >> (row & 7)) & 1 == 1)


@kernel
def scan_lists(  # noqa: C901, PLR0913  a kernel is one function
    lists: Any, pairs: Any, bytes_QMC: Any, bits: Any, candidates: Any, begin: Any, num: int
) -> bool:
    """Add candidates of lists for the queries that probe them.

    A code is a candidate of a query unless at least `num` others surely score better.

    Args:
        lists: addresses of the codes and of the rows [L], their numbers [L], and the first pair of each list [L + 1],
            all int64.
        pairs: query [P], int64, and offset [P], int32: the nearness of the list in steps of the query's table, rounded.
        bytes_QMC: table of each subquantizer, uint8; an exact score is within half a step of each byte's.
        bits: one bit per row, set if it may be a candidate; empty if all may.
        candidates: changed: least total of a candidate [Q], int32, `LEAST` at first; their number [Q], int64; their
            totals [Q, R], int32; their pairs and their numbers in the list [Q, R, 2], int64.
        begin: list, pair and code to continue at [3], int64; zeros at first.
        num: results that are wanted; R exceeds it by at least `WIDTH`.

    Returns:
        Whether all lists were scanned. If not, R is too small: call again with more room, from the `begin` that is
        written.
    """
    addresses_L, row_addresses_L, sizes_L, starts_L = lists
    query_P, offset_P = pairs
    limits_Q, counts_Q, totals_QR, places_QR2 = candidates
    num_subquantizers, room = bytes_QMC.shape[1], totals_QR.shape[1]
    slack = num_subquantizers + 2  # twice the error: half a step for each subquantizer, and for the offset
    sums, flat = np.zeros(WIDTH, np.uint16), bytes_QMC.reshape(bytes_QMC.size)
    longest = 0
    for size in sizes_L:
        longest = max(longest, size)
    step = (longest + WIDTH - 1) // WIDTH * WIDTH
    turned = np.zeros(num_subquantizers * step, np.uint8)
    for number in range(begin[0], len(sizes_L)):
        size = sizes_L[number]
        _turn(addresses_L[number], size, num_subquantizers, turned, step)
        for pair in range(max(starts_L[number], begin[1]), starts_L[number + 1]):
            query, offset = query_P[pair], offset_P[pair]
            limit, count = limits_Q[query], counts_Q[query]
            totals, places = totals_QR[query], places_QR2[query]
            for start in range(begin[2], size, WIDTH):
                if count + WIDTH > room:
                    count, limit = keep_best(totals, places, count, num, slack)
                    if count + WIDTH > room:
                        begin[0], begin[1], begin[2] = number, pair, start
                        limits_Q[query], counts_Q[query] = limit, count
                        return False
                stop = min(WIDTH, size - start)
                greatest = np.int32(65535)
                if HAS_BYTE_TABLES:
                    table = query * num_subquantizers * 256
                    greatest = _sum_block(sums, turned, start, step, flat, table, num_subquantizers)
                else:
                    sums[:] = 0
                    for m in range(num_subquantizers):
                        for i in range(stop):
                            sums[i] += bytes_QMC[query, m, turned[m * step + start + i]]
                if offset + greatest < limit:
                    continue
                for i in range(stop):
                    total = offset + np.int32(sums[i])
                    if total >= limit and _is_allowed(row_addresses_L[number] + 8 * (start + i), bits):
                        totals[count], places[count, 0], places[count, 1] = total, pair, start + i
                        count += 1
            begin[2] = 0
            limits_Q[query], counts_Q[query] = limit, count
    return True


@kernel
def copy_codes(addresses_K: Any, row_addresses_K: Any, codes_KM: Any, rows_K: Any) -> None:
    """Copy codes and rows from their addresses."""
    for number in range(len(addresses_K)):
        rows_K[number] = _row_at(row_addresses_K[number])
        for m in range(codes_KM.shape[1]):
            codes_KM[number, m] = _byte_at(addresses_K[number] + m)


def compile_all() -> None:
    """Compile the kernels. Takes some seconds without a cache."""
    codes, rows, one = np.zeros((1, 4), np.uint8), np.zeros(1, np.int64), np.ones(1, np.int64)
    floats = np.ones((1, 4), np.float32)
    centre_products(floats, floats, np.empty((1, 1), np.float32))
    addresses, row_addresses = np.array([codes.ctypes.data]), np.array([rows.ctypes.data])
    totals, places = np.empty((1, 2 * WIDTH), np.int32), np.empty((1, 2 * WIDTH, 2), np.int64)
    candidates = np.full(1, LEAST, np.int32), np.zeros(1, np.int64), totals, places
    lists, pairs = (addresses, row_addresses, one, np.arange(2)), (rows, np.zeros(1, np.int32))
    tables, bits = np.zeros((1, 4, 256), np.uint8), np.empty(0, np.uint8)
    scan_lists(lists, pairs, tables, bits, candidates, np.zeros(3, np.int64), 1)
    keep_best(totals[0], places[0], 1, 1, 6)
    copy_codes(addresses, row_addresses, codes, rows)
