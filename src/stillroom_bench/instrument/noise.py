"""Measures the CPU time that other processes and the virtual machine's host take while a benchmark runs."""

from stillroom.telemetry.cpu_times import CpuTimes


def noise_note(before: CpuTimes | None, after: CpuTimes | None) -> list[str]:
    """Return a note for the report, if the system reports CPU times."""
    if before is None or after is None or after.total <= before.total:
        return []
    total, stolen = after.total - before.total, after.stolen - before.stolen
    others = max(0.0, after.others - before.others - stolen)
    shares = f"{stolen / total:.0%} of its CPU time, and other processes {others / total:.0%}"
    return [f"During the run, the machine's host took {shares}."]
