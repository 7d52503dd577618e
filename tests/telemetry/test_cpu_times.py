"""Tests reading CPU times of the machine, as a whole and of some CPUs."""

import os
from pathlib import Path

from stillroom.telemetry.cpu_times import CpuTimes

TICK = os.sysconf("SC_CLK_TCK")


def line(name: str, *seconds: int) -> str:
    return f"{name} " + " ".join(str(one * TICK) for one in seconds) + "\n"


def test_cpu_times_are_read_from_proc_stat(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(line("cpu ", 1, 2, 3, 40, 5, 6, 7, 8, 0, 0) + line("cpu0", 1, 2) + "intr 5\n")
    found = CpuTimes.now(stat)
    assert found is not None and (found.total, found.idle, found.stolen) == (72.0, 45.0, 8.0) and found.own > 0
    assert found.others == 72.0 - 45.0 - found.own
    stat.write_text("nothing")
    assert CpuTimes.now(stat) is None and CpuTimes.now(tmp_path / "missing") is None


def test_cpu_times_count_only_the_given_cpus(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    lines = [line(f"cpu{number}", number, 0, 0, 100, 0, 0, 0, 0) for number in (0, 1, 2, 10)]
    stat.write_text(line("cpu ", 13, 0, 0, 400, 0, 0, 0, 0) + "".join(lines))
    found = CpuTimes.now(stat, {1, 10})
    assert found is not None and (found.total, found.idle) == (211.0, 200.0)
    assert CpuTimes.now(stat, {1, 3}) is None, "a CPU without a line"
