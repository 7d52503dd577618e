"""What a sequence adds to a step, on a clock that a made runner moves; and where loads are measured."""

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


class MadeRunner:
    """Takes 2 s for a step and half a second for each sequence; the first step ever takes long."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.sizes: list[int] = []

    def execute(self, batch: Batch) -> StepResult:
        self.clock.advance(2.0 + 0.5 * len(batch.sequences) + (0.0 if self.sizes else 100.0))
        self.sizes.append(len(batch.sequences))
        assert len({int(entry.slots[0]) for entry in batch.sequences}) == len(batch.sequences)
        return StepResult({})


@pytest.mark.parametrize(("num_blocks", "expected", "most"), [(4, 0.5, 8), (1, 0.5, 4)])
def test_what_a_sequence_adds_to_a_step(num_blocks: int, expected: float, most: int) -> None:
    clock = VirtualClock()
    runner = MadeRunner(clock)
    device = DeviceStore(KVShape(1, 1, 2, torch.float32), num_blocks, 4, torch.device("cpu"))
    bench = CalibrationTarget(cast(TorchRunner, runner), device, num_blocks, 64, 64, clock)

    assert sequence_seconds(bench) == pytest.approx(expected)
    assert set(runner.sizes) == {1, most}, "no more than there are slots for"


def test_where_there_is_room_for_one_only() -> None:
    clock = VirtualClock()
    device = DeviceStore(KVShape(1, 1, 2, torch.float32), 1, 1, torch.device("cpu"))
    assert sequence_seconds(CalibrationTarget(cast(TorchRunner, MadeRunner(clock)), device, 1, 64, 64, clock)) == 0.0


class TickingClock(VirtualClock):
    """Whoever looks at it has taken a millisecond."""

    def monotonic(self) -> float:
        self.advance(1e-3)
        return self.now


def links(folder: Path | None, now: float = 0.0) -> set[Tier]:
    clock = TickingClock(now)
    device = DeviceStore(KVShape(1, 1, 2, torch.float32), 8, 4, torch.device("cpu"))
    bench = CalibrationTarget(cast(TorchRunner, MadeRunner(clock)), device, 8, 64, 64, clock)
    return set(quick_profile(bench, folder).links)


def test_loads_are_measured_where_kv_is_kept(tmp_path: Path) -> None:
    """Also where nobody can write, and only from the host where nothing is kept on disk."""
    assert links(tmp_path / "kb" / "kv") == {Tier.HOST, Tier.DISK}
    assert links(Path("/proc/self/kv")) == {Tier.HOST, Tier.DISK}
    assert links(None) == {Tier.HOST}
    assert not any(tmp_path.iterdir())


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (".stillroom-calibrate-a", ".stillroom-calibrate-b", "calibrate-c"))
    for folder in (old, new, other):
        folder.mkdir()
        (folder / "writer.lock").touch()
    for folder in (old, other):
        os.utime(folder, (0, 0))
    links(tmp_path, now=new.stat().st_mtime)
    assert set(tmp_path.iterdir()) == {new, other}
