"""How the kernels of `ops/cpu_*.py` are compiled by numba, and how they read the bits of a bfloat16.

Compiled code is kept on disk where that is possible, so only the first process on a machine waits for the compiler. It
is kept for as long as none of these files changes: numba looks only at the file of a kernel itself, not at those of
what it calls.
"""

import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba
import numpy as np
from filelock import FileLock
from llvmlite import ir
from numba import types
from numba.core.cpu_options import ParallelOptions
from numba.extending import intrinsic
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bits = NDArray[Any]
"""Of any type: those of a bfloat16 are a uint16, of two a uint32."""

SIXTEEN = np.uint32(16)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_turn = threading.RLock()


def _can_keep_code() -> bool:
    """Whether there is a folder to keep compiled code in: beside this file, or the user's cache."""
    try:
        numba.njit(cache=True)(_can_keep_code)
    except RuntimeError:
        return False
    return True


_SOURCES = tuple(
    (file.name, file.stat().st_mtime, file.stat().st_size) for file in sorted(Path(__file__).parent.glob("cpu_*.py"))
)
_FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}  # not ninf and nnan: attention starts from -inf
_OPTIONS: Any = {"fastmath": _FAST, "nogil": True, "cache": _can_keep_code()}
_PARALLEL: Any = ParallelOptions(
    {"prange": True}
    | dict.fromkeys(("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion"), False)
)
"""No dictionary: numba empties one with the first kernel that it compiles, and from then on makes parallel whatever it
can. Not only is that slow: the buffers of such regions may be too small (numba's issue 9769)."""


def kernel(function: _Function, **options: Any) -> _Function:
    """Compiled for one thread."""
    compiled = numba.njit(**_OPTIONS, **options)(function)
    if _OPTIONS["cache"]:
        _keep_safely(compiled._cache._cache_file)
    return compiled  # type: ignore[no-any-return]


def _keep_safely(cache_file: Any) -> None:
    """One process at a time changes what is kept of a kernel: two that compiled it for different types at the same time
    would give their code one name, and the later one's would answer for both."""
    save = cache_file.save

    def save_alone(key: Any, data: Any) -> None:
        with FileLock(f"{cache_file._index_path}.lock"):
            save(key, data)

    cache_file._source_stamp, cache_file.save = _SOURCES, save_alone


def parallel_kernel(function: _Function) -> _Function:
    """Compiled, with its `prange` on `use_threads` threads."""
    return kernel(function, parallel=_PARALLEL)


def in_turn(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """For what calls parallel kernels: where numba has found neither OpenMP nor TBB, one thread at a time, since two
    that are in its own `workqueue` end the process. Elsewhere nobody waits."""

    @wraps(function)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if not _is_workqueue():
            return function(*args, **kwargs)
        with _turn:
            return function(*args, **kwargs)

    return run


def _is_workqueue() -> bool:
    """Also where no parallel kernel has run yet: this one may be the first."""
    try:
        return str(numba.threading_layer()) == "workqueue"
    except ValueError:
        return True


def inlined(function: _Function) -> _Function:
    """Compiled into each kernel that calls it."""
    return kernel(function, inline="always")


@intrinsic
def as_float(_: Any, bits: Any) -> Any:
    """float32 of these 32 bits."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def as_bits(_: Any, value: Any) -> Any:
    """The 32 bits of a float32."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), codegen
