"""Limits that a process of ours takes on before it reads a file of others."""

import contextlib
import resource
from pathlib import Path


def limit_memory(num_bytes: int) -> None:
    """Forbid core files, and memory beyond what is used now and `num_bytes`, on systems with /proc."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
