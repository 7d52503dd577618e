"""Measures the CPU time that other processes and the virtual machine's host take while a benchmark runs."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Cumulative seconds of all CPUs together."""

    total: float
    idle: float
    stolen: float
    """Seconds that the host of this virtual machine gave to others."""
    own: float
    """Seconds of this process and of its ended children."""

    @classmethod
    def now(cls, stat: Path = Path("/proc/stat")) -> "CpuTimes | None":
        """Read the current values; None if the system does not report them."""
        try:
            first = stat.read_text().partition("\n")[0].split()
            fields = [int(field) / os.sysconf("SC_CLK_TCK") for field in first[1:9]]
            user, nice, system, idle, waiting, interrupts, soft_interrupts, stolen = fields
        except (OSError, ValueError):
            return None
        own = sum(os.times()[:4])
        return cls(
            user + nice + system + idle + waiting + interrupts + soft_interrupts + stolen, idle + waiting, stolen, own
        )


def noise_note(before: CpuTimes | None, after: CpuTimes | None) -> list[str]:
    """Return a note for the report, if the system reports CPU times."""
    if before is None or after is None or after.total <= before.total:
        return []
    total = after.total - before.total
    stolen, own = after.stolen - before.stolen, after.own - before.own
    others = max(0.0, total - (after.idle - before.idle) - stolen - own)
    shares = f"{stolen / total:.0%} of its CPU time, and other processes {others / total:.0%}"
    return [f"During the run, the machine's host took {shares}."]
