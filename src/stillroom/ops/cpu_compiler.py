"""Compiles the kernels of `ops/cpu_*.py` with numba, and gives them access to the bits of a float32.

Compiled code is cached on disk if possible, so only the first process on a machine waits for the compiler. Each kernel
is compiled once for each combination of types (of weights, KV and activations), not for each model or shape. The cache
is invalidated when any of these files changes; numba itself checks only the file of a kernel, not those that it calls.
"""

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import llvmlite.binding
import numba
import numpy as np
from filelock import FileLock
from llvmlite import ir
from numba import types
from numba.core import event
from numba.core.cpu_options import ParallelOptions
from numba.extending import intrinsic
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bits = NDArray[Any]
"""Bits of any type: a bfloat16 is a uint16, two bfloat16 are a uint32."""

SIXTEEN = np.uint32(16)

HOST_FEATURES = llvmlite.binding.get_host_cpu_features()
_REQUEST = (158, 0x1023, 18)
"""Linux's call `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)` on x86-64."""


def _can_use_tiles() -> bool:
    """Whether the processor multiplies tiles of bfloat16 (Intel AMX), and Linux lets this process use them."""
    needed = ("amx-tile", "amx-bf16", "avx512bf16")
    if sys.platform != "linux" or not all(HOST_FEATURES.get(name) for name in needed):
        return False
    with suppress(OSError, AttributeError):
        return int(ctypes.CDLL(None).syscall(*map(ctypes.c_long, _REQUEST))) == 0
    return False


HAS_TILES = _can_use_tiles()
"""Whether kernels may use `cpu_tiles`; permission is asked for when this module is imported, as torch does later."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_kernel_lock = threading.RLock()
logger = logging.getLogger(__name__)


class CompilerNotice(event.Listener):  # type: ignore[misc]  # numba has no types
    """Says that kernels are being compiled, when that has taken more than a second, and then how many are ready."""

    _TOLD_AFTER_SECONDS = 1.0
    _SECONDS_BETWEEN_LINES = 5.0

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._begun: list[float] = []
        self._seconds = 0.0
        self._num_ready = 0
        self._told_at: float | None = None

    def on_start(self, compiling: Any) -> None:
        began = self._now()
        if not self._begun:  # kernels that a kernel calls are compiled within it
            logger.debug("compiling %s", compiling.data["dispatcher"].py_func.__name__)
        self._begun.append(began)
        if self._seconds > self._TOLD_AFTER_SECONDS and self._told_at is None:
            self._told_at = began
            logger.warning(
                "compiling kernels for this processor, once for each type of weights: up to eight, half a minute of "
                "one core or more"
            )

    def on_end(self, compiled: Any) -> None:
        began, ended = self._begun.pop(), self._now()
        if self._begun:
            return
        self._seconds += ended - began
        self._num_ready += 1
        if self._told_at is not None and ended - self._told_at >= self._SECONDS_BETWEEN_LINES:
            self._told_at = ended
            name = compiled.data["dispatcher"].py_func.__name__
            logger.warning("%d kernels are compiled, the last is %s (%.0f s)", self._num_ready, name, self._seconds)


event.register("numba:compile", CompilerNotice())


def _can_cache_code() -> bool:
    """Whether compiled code can be written beside this file or into the user's cache."""
    try:
        numba.njit(cache=True)(_can_cache_code)
    except RuntimeError:
        return False
    return True


SOURCES = tuple(
    (file.name, file.stat().st_mtime, file.stat().st_size) for file in sorted(Path(__file__).parent.glob("cpu_*.py"))
)
"""Name, time of change and size of each file of kernels."""
STAMP = (SOURCES, HAS_TILES)
"""On what compiled code and measured times depend, besides the processor."""
_FAST = {"reassoc", "contract", "arcp", "nsz", "afn"}  # not ninf and nnan: attention starts from -inf
_OPTIONS: Any = {"fastmath": _FAST, "nogil": True, "cache": _can_cache_code()}
_PARALLEL: Any = ParallelOptions(
    {"prange": True}
    | dict.fromkeys(("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion"), False)
)
"""No dictionary: numba empties a dictionary with the first kernel that it compiles, and then parallelises all that it
can. That is slow, and the buffers of such regions may be too small (numba's issue 9769)."""


def kernel(function: _Function, **options: Any) -> _Function:
    """Compile a kernel for one thread."""
    compiled = numba.njit(**_OPTIONS, **options)(function)
    if _OPTIONS["cache"]:
        _lock_cache_writes(compiled._cache._cache_file)
    return compiled  # type: ignore[no-any-return]


def _lock_cache_writes(cache_file: Any) -> None:
    """Let one process at a time write a kernel's cache.

    Two processes that compiled a kernel for different types at the same time would give both results the same name.
    """
    save = cache_file.save

    def save_locked(key: Any, data: Any) -> None:
        with FileLock(f"{cache_file._index_path}.lock"):
            save(key, data)

    cache_file._source_stamp, cache_file.save = STAMP, save_locked


def parallel_kernel(function: _Function) -> _Function:
    """Compile a kernel whose `prange` loops run on `use_threads` threads."""
    return kernel(function, parallel=_PARALLEL)


def serialised(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Let one thread at a time run a function that calls parallel kernels, if numba uses its `workqueue`.

    Two threads in `workqueue` end the process. With OpenMP or TBB the lock is not taken.
    """

    @wraps(function)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if not _is_workqueue():
            return function(*args, **kwargs)
        with _kernel_lock:
            return function(*args, **kwargs)

    return run


def _is_workqueue() -> bool:
    """Whether numba uses `workqueue`, or may choose it with the first parallel kernel."""
    try:
        return str(numba.threading_layer()) == "workqueue"
    except ValueError:
        return True


def inlined(function: _Function) -> _Function:
    """Compile a function into each kernel that calls it."""
    return kernel(function, inline="always")


@intrinsic
def as_float(_: Any, bits: Any) -> Any:
    """Return the float32 of 32 bits."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def as_bits(_: Any, value: Any) -> Any:
    """Return the 32 bits of a float32."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), codegen
