"""Tests the shares of CPU time taken by the host and by other processes."""

import os
from pathlib import Path

from stillroom_bench.instrument.noise import CpuTimes, noise_note


def test_noise_note_gives_shares_of_elapsed_cpu_time() -> None:
    before = CpuTimes(total=100.0, idle=50.0, stolen=10.0, own=1.0)
    after = CpuTimes(total=200.0, idle=60.0, stolen=30.0, own=51.0)
    assert noise_note(before, after) == [
        "During the run, the machine's host took 20% of its CPU time, and other processes 20%."
    ]
    assert noise_note(None, after) == noise_note(before, None) == noise_note(after, after) == []


def test_cpu_times_are_read_from_proc_stat(tmp_path: Path) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    stat.write_text("cpu  " + " ".join(str(one * tick) for one in (1, 2, 3, 40, 5, 6, 7, 8, 0, 0)) + "\ncpu0 1 2\n")
    found = CpuTimes.now(stat)
    assert found is not None and (found.total, found.idle, found.stolen) == (72.0, 45.0, 8.0) and found.own > 0
    stat.write_text("nothing")
    assert CpuTimes.now(stat) is None and CpuTimes.now(tmp_path / "missing") is None
