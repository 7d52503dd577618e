"""Reads the CPU time that this process, other processes and the virtual machine's host have used."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Cumulative seconds of several CPUs together."""

    total: float
    idle: float
    stolen: float
    """Seconds that the host of this virtual machine gave to others."""
    own: float
    """Seconds of this process and of its ended children."""

    @classmethod
    def now(cls, stat: Path = _STAT, cpus: Collection[int] | None = None) -> "CpuTimes | None":
        """Read the current values; None if the system does not report them.

        Args:
            cpus: numbers of the CPUs to count; None counts all.
        """
        names = {"cpu"} if cpus is None else {f"cpu{number}" for number in cpus}
        try:
            lines = [line.split() for line in stat.read_text().splitlines() if line.startswith("cpu")]
            found = [[int(field) for field in line[1:9]] for line in lines if line[0] in names]
            tick = os.sysconf("SC_CLK_TCK")
            user, nice, system, idle, waiting, interrupts, soft_interrupts, stolen = (
                sum(column) / tick for column in zip(*found, strict=True)
            )
        except (OSError, ValueError):
            return None
        if len(found) != len(names):
            return None
        own = sum(os.times()[:4])
        return cls(
            user + nice + system + idle + waiting + interrupts + soft_interrupts + stolen, idle + waiting, stolen, own
        )

    @property
    def others(self) -> float:
        """Seconds of all other processes, of the kernel, and of the machine's host."""
        return self.total - self.idle - self.own
