"""What a sequence adds to a step, on a clock that a made runner moves."""

from typing import cast

import pytest
import torch

from stillroom.core.batch import Batch, StepResult
from stillroom.core.clock import VirtualClock
from stillroom.kvstore.device import DeviceStore, KVShape
from stillroom.rag.calibration import Bench, sequence_seconds
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
    bench = Bench(cast(TorchRunner, runner), device, num_blocks, 64, 64, clock)

    assert sequence_seconds(bench) == pytest.approx(expected)
    assert set(runner.sizes) == {1, most}, "no more than there are slots for"


def test_where_there_is_room_for_one_only() -> None:
    clock = VirtualClock()
    device = DeviceStore(KVShape(1, 1, 2, torch.float32), 1, 1, torch.device("cpu"))
    assert sequence_seconds(Bench(cast(TorchRunner, MadeRunner(clock)), device, 1, 64, 64, clock)) == 0.0
