"""Calibration with a simulated runner and clock: cost of a sequence, and the disk on which loads are measured."""

import os
from pathlib import Path
from typing import cast

import pytest
import torch

from stillroom.backends.calibration import CalibrationTarget, quick_profile, sequence_seconds
from stillroom.core.batch import Batch, StepResult
from stillroom.core.clock import VirtualClock
from stillroom.core.kv import Tier
from stillroom.kvstore.device import DeviceStore, KVShape
from stillroom.runner.torch_runner import TorchRunner


class SimulatedRunner:
    """A step takes 2 s and half a second per sequence; the first one takes 100 s more."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.sizes: list[int] = []

    def execute(self, batch: Batch) -> StepResult:
        self.clock.advance(2.0 + 0.5 * len(batch.sequences) + (0.0 if self.sizes else 100.0))
        self.sizes.append(len(batch.sequences))
        assert len({int(entry.slots[0]) for entry in batch.sequences}) == len(batch.sequences)
        return StepResult({})


@pytest.mark.parametrize(("num_blocks", "expected", "most"), [(4, 0.5, 8), (1, 0.5, 4)])
def test_sequence_seconds_is_the_cost_of_one_more_sequence(num_blocks: int, expected: float, most: int) -> None:
    clock = VirtualClock()
    runner = SimulatedRunner(clock)
    device = DeviceStore(KVShape(1, 1, 2, torch.float32), num_blocks, 4, torch.device("cpu"))
    target = CalibrationTarget(cast(TorchRunner, runner), device, num_blocks, 64, 64, clock)

    assert sequence_seconds(target) == pytest.approx(expected)
    assert set(runner.sizes) == {1, most}, "at most one sequence per slot"


def test_sequence_seconds_is_zero_with_room_for_one_sequence() -> None:
    clock = VirtualClock()
    device = DeviceStore(KVShape(1, 1, 2, torch.float32), 1, 1, torch.device("cpu"))
    assert (
        sequence_seconds(CalibrationTarget(cast(TorchRunner, SimulatedRunner(clock)), device, 1, 64, 64, clock)) == 0.0
    )


class TickingClock(VirtualClock):
    """Advances by a millisecond at each reading."""

    def monotonic(self) -> float:
        self.advance(1e-3)
        return self.now


def links(folder: Path | None, now: float = 0.0) -> set[Tier]:
    clock = TickingClock(now)
    device = DeviceStore(KVShape(1, 1, 2, torch.float32), 8, 4, torch.device("cpu"))
    target = CalibrationTarget(cast(TorchRunner, SimulatedRunner(clock)), device, 8, 64, 64, clock)
    return set(quick_profile(target, folder).links)


def test_loads_are_measured_on_the_disk_that_stores_kv(tmp_path: Path) -> None:
    """In an unwritable folder a temporary one is used; without a folder only the host is measured."""
    assert links(tmp_path / "kb" / "kv") == {Tier.HOST, Tier.DISK}
    assert links(Path("/proc/self/kv")) == {Tier.HOST, Tier.DISK}
    assert links(None) == {Tier.HOST}
    assert not any(tmp_path.iterdir())


def test_scratch_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (".stillroom-calibrate-a", ".stillroom-calibrate-b", "calibrate-c"))
    for folder in (old, new, other):
        folder.mkdir()
        (folder / "writer.lock").touch()
    for folder in (old, other):
        os.utime(folder, (0, 0))
    links(tmp_path, now=new.stat().st_mtime)
    assert set(tmp_path.iterdir()) == {new, other}
