"""Elements of caches and activations for the compiled kernels: float32, or the bits of a bfloat16 as a uint16."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from stillroom.ops.cpu_compiler import SIXTEEN, as_bits, as_float


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
