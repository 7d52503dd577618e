"""Limits that a process of ours takes on before it reads a file of others."""

import contextlib
import resource
from pathlib import Path

_NEARLY = 8 << 20
"""What may be left of the memory of a process that has run out: a large request fails before a small one."""


def limit_memory(num_bytes: int) -> None:
    """Forbid core files, and memory beyond what is used now and `num_bytes`, on systems with /proc."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def has_used_memory(pid: int | None = None) -> bool:
    """Whether a process, by default this one, has come within 8 MiB of its limit; False where /proc does not tell."""
    folder = Path(f"/proc/{'self' if pid is None else pid}")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = (folder / "status").read_text().splitlines()
        limits = (folder / "limits").read_text().splitlines()
        peak = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmPeak:"))
        limit = next(line.split()[3] for line in limits if line.startswith("Max address space"))
        return peak >= int(limit) - _NEARLY
    return False
