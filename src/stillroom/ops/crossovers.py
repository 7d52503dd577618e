"""Remembers which way of computing was faster on this machine, in the user's cache folder.

One measurement may be wrong, for example beside other processes, and a remembered one would be wrong for good. So the
first `_NUM_MEASUREMENTS` processes measure, each uses the median of what is known by then, and later ones do not
measure.
"""

import hashlib
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import numba
import torch
from filelock import FileLock, Timeout

from stillroom.config.places import cache_root
from stillroom.ops.cpu_compiler import STAMP

_NUM_MEASUREMENTS = 5
_PATIENCE_SECONDS = 1.0


def remembered(name: str, measure: Callable[[], float]) -> float:
    """Return the median of this machine's measurements, which are this one and the remembered ones.

    Args:
        name: of what is measured; the same in every process.
        measure: not called if enough measurements are remembered.
    """
    known = _read().get(name, [])
    if len(known) >= _NUM_MEASUREMENTS:
        return statistics.median_low(known)
    value = measure()
    _add(name, value)
    return statistics.median_low([*known, value])


def forget() -> None:
    """Forget this machine's measurements, so that the next processes measure again."""
    with suppress(OSError):
        _file().unlink(missing_ok=True)


@cache
def _file() -> Path:
    """The file for this processor and these versions of the code that is compared."""
    what = (_processor(), platform.machine(), torch.__version__, numba.__version__, STAMP)
    return cache_root() / "crossovers" / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.json"


def _processor() -> list[str]:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return [platform.processor()]


def _read() -> dict[str, list[float]]:
    """All remembered measurements; none if they cannot be read."""
    try:
        found = json.loads(_file().read_bytes())
        return {str(name): [float(value) for value in values] for name, values in found["measured"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _add(name: str, value: float) -> None:
    """Remember a measurement. Does nothing if it cannot be written."""
    file = _file()
    with suppress(OSError, NotImplementedError, Timeout):
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=_PATIENCE_SECONDS):
            measured = _read()
            measured[name] = [*measured.get(name, []), value][:_NUM_MEASUREMENTS]
            content = {"processor": _processor(), "torch": torch.__version__, "measured": measured}
            handle, temporary = tempfile.mkstemp(dir=file.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(content, stream, indent=1)
            os.replace(temporary, file)
