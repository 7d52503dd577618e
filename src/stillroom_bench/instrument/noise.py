"""What else the machine did while a benchmark ran: the only thing that says whether it was quiet."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of all CPUs together, since some moment."""

    total: float
    idle: float
    stolen: float
    """Wanted, and given to others by the host of this virtual machine."""
    own: float
    """Of this process and of those it started that have ended."""

    @classmethod
    def now(cls, stat: Path = Path("/proc/stat")) -> "CpuTimes | None":
        """None where the system does not say."""
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
    """A line for the reader of a report, if the system tells."""
    if before is None or after is None or after.total <= before.total:
        return []
    total = after.total - before.total
    stolen, own = after.stolen - before.stolen, after.own - before.own
    others = max(0.0, total - (after.idle - before.idle) - stolen - own)
    shares = f"{stolen / total:.0%} of its CPU time, and other processes {others / total:.0%}"
    return [f"While it ran, the machine's host took {shares}."]
