"""Records the machine, versions and command of a benchmark with its result."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = ("stillroom", "torch", "numpy", "faiss-cpu", "tantivy", "sentence-transformers", "transformers", "scipy")


@dataclass(frozen=True, slots=True)
class Environment:
    """Machine and software of a run."""

    command: str
    commit: str
    """Ends in `+changes` if tracked files are modified; `unknown` outside a checkout."""
    python: str
    versions: dict[str, str]
    processor: str
    num_cpus: int
    """CPUs this process may use."""
    num_threads: int
    """Threads of numerical libraries, as `OMP_NUM_THREADS` sets them, else the number of CPUs."""
    memory_bytes: int
    system: str


def record_environment(argv: list[str] | None = None) -> Environment:
    """Record the current environment.

    Args:
        argv: command line; None takes that of this process.
    """
    arguments = list(sys.argv if argv is None else argv)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Environment(
        command=" ".join([Path(arguments[0]).name, *arguments[1:]]),
        commit=_commit(),
        python=platform.python_version(),
        versions={name: version for name in _PACKAGES if (version := _version(name))},
        processor=_processor(),
        num_cpus=cpus,
        num_threads=_num_threads() or cpus,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.machine()}",
    )


def device_name(device: str) -> str:
    """Return a GPU's name; `cpu` for the processor, which the environment names."""
    import torch

    return device if device == "cpu" else torch.cuda.get_device_name(device)


def _num_threads() -> int:
    """Return the threads of the outermost level in `OMP_NUM_THREADS`; 0 if it is not set."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


_INSTRUCTIONS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}
"""The widest of these flags decides about the speed of kernels; a virtual machine's model name hides it."""


def _processor(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model of the processor, with its widest vector or matrix instructions in brackets."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        lines = []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = f"{fields.get('flags', '')} {fields.get('Features', '')}".split()
    widest = next((text for flag, text in _INSTRUCTIONS.items() if flag in flags), "")
    return f"{name} ({widest})" if widest else name
