"""Elements of caches and activations for the compiled kernels, float32 or the bits of bfloat16 as uint16; and exp."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from stillroom.ops.cpu_compiler import SIXTEEN, as_bits, as_float, kernel

_BIAS, _MANTISSA = np.int32(127), np.int32(23)


def read(value: Any) -> Any:
    """Return an element of a cache, float32 or the bits of a bfloat16, as float32."""
    raise NotImplementedError  # implemented by the overload in compiled code


@overload(read)
def _compiled_read(value: Any) -> Any:
    if value == types.uint16:

        def read_bfloat16(value: Any) -> Any:
            return as_float(np.uint32(value) << SIXTEEN)

        return read_bfloat16

    def read_float32(value: Any) -> Any:
        return value

    return read_float32


def write(row: Any, index: Any, value: Any) -> Any:
    """Store a float32 in a row of a cache; a bfloat16 is rounded to nearest, ties to even."""
    raise NotImplementedError  # implemented by the overload in compiled code


@overload(write)
def _compiled_write(row: Any, index: Any, value: Any) -> Any:
    if row.dtype != types.uint16:

        def write_float32(row: Any, index: Any, value: Any) -> None:
            row[index] = value

        return write_float32

    def write_bfloat16(row: Any, index: Any, value: Any) -> None:
        bits = as_bits(value)
        row[index] = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> SIXTEEN) & np.uint32(1))) >> SIXTEEN)

    return write_bfloat16


@kernel
def exp(x: Any) -> Any:
    """exp in float32 within 2 ulp, in operations that the compiler vectorises (Cephes' expf)."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * as_float(np.uint32((np.int32(n) + _BIAS) << _MANTISSA))
