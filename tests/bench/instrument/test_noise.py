"""Tests the shares of CPU time taken by the host and by other processes."""

from stillroom.telemetry.cpu_times import CpuTimes
from stillroom_bench.instrument.noise import noise_note


def test_noise_note_gives_shares_of_elapsed_cpu_time() -> None:
    before = CpuTimes(total=100.0, idle=50.0, stolen=10.0, own=1.0)
    after = CpuTimes(total=200.0, idle=60.0, stolen=30.0, own=51.0)
    assert noise_note(before, after) == [
        "During the run, the machine's host took 20% of its CPU time, and other processes 20%."
    ]
    assert noise_note(None, after) == noise_note(before, None) == noise_note(after, after) == []
