"""The engine's thread follows the load between its steps, and other threads keep their number."""

import logging
import threading
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from stillroom.backends import thread_control
from stillroom.backends.thread_chooser import WINDOW_SECONDS, ThreadChooser
from stillroom.backends.thread_control import BeforeLoading, ThreadControl
from stillroom.config.settings import Dtype, RuntimeConfig
from stillroom.core.clock import VirtualClock
from stillroom.core.ids import RequestId
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom.telemetry.cpu_times import CpuTimes
from tests.engine.harness import engine_on, random_segments, request
from tests.fakes import random_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def unchanged_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Load:
    """CPU times of two CPUs on a virtual clock."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.times = CpuTimes(total=0.0, idle=0.0, stolen=0.0, own=0.0)
        self.num_reads = 0

    def read(self) -> CpuTimes:
        self.num_reads += 1
        return self.times

    def run(self, seconds: float, busy: float) -> None:
        self.clock.advance(seconds)
        total, idle = self.times.total + 2 * seconds, self.times.idle + (2 - busy) * seconds
        self.times = CpuTimes(total, idle, stolen=0.0, own=0.0)


def test_control_lowers_and_raises_torch_threads(caplog: pytest.LogCaptureFixture) -> None:
    load = Load()
    control = ThreadControl(ThreadChooser(2, 2, 2), load.clock, load.read)
    control.apply()
    with caplog.at_level(logging.INFO):
        control.adjust()
        load.run(1.0, busy=2.0)
        control.adjust()
        assert control.count == torch.get_num_threads() == 1
        assert run_in_short_lived_thread(torch.get_num_threads) == 2, "threads that start later keep all cores"
        load.run(2.0, busy=0.0)
        control.adjust()
        assert control.count == torch.get_num_threads() == 2
    assert [record.getMessage() for record in caplog.records] == [
        "computing with 1 of 2 threads; other processes want 2.0 of 2 CPUs",
        "computing with 2 of 2 threads; other processes want 0.0 of 2 CPUs",
    ]


def test_control_reads_at_most_once_in_a_window() -> None:
    load = Load()
    control = ThreadControl(ThreadChooser(2, 2, 2), load.clock, load.read)
    for _ in range(100):
        load.run(WINDOW_SECONDS / 50, busy=0.0)
        control.adjust()
    assert load.num_reads <= 3


def test_a_system_without_cpu_times_keeps_its_threads() -> None:
    control = ThreadControl(ThreadChooser(2, 2, 2), VirtualClock(), lambda: None)
    control.adjust()
    assert control.count == 2


def loaded(monkeypatch: pytest.MonkeyPatch, busy: float, config: RuntimeConfig | None = None) -> ThreadControl:
    """Return the control after loading for two seconds and measuring that one thread is fastest."""
    load = Load()
    monkeypatch.setattr(thread_control, "read_cpu_times", load.read)
    torch.set_num_threads(2)
    before = BeforeLoading(load.clock.monotonic(), load.read(), 2)
    load.run(2.0, busy=busy)
    torch.set_num_threads(1)
    return before.control(config or RuntimeConfig(), load.clock, CPU)


def test_a_number_measured_beside_others_may_rise_later(monkeypatch: pytest.MonkeyPatch) -> None:
    control = loaded(monkeypatch, busy=1.5)
    assert control.count == 1 and control.is_adaptive


def test_a_number_measured_alone_is_the_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    control = loaded(monkeypatch, busy=0.01)
    assert control.count == 1 and not control.is_adaptive


def test_a_configured_number_never_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    control = loaded(monkeypatch, 1.5, RuntimeConfig(num_threads=1))
    assert control.count == 1 and not control.is_adaptive


def test_control_changes_only_the_calling_thread() -> None:
    load = Load()
    control = ThreadControl(ThreadChooser(2, 2, 1), load.clock, load.read)
    torch.set_num_threads(2)
    applied, found, checked = threading.Event(), list[int](), threading.Event()

    def engine() -> None:
        control.apply()
        found.append(torch.get_num_threads())
        applied.set()
        checked.wait(30)

    thread = threading.Thread(target=engine)
    thread.start()
    assert applied.wait(30)
    assert found == [1] and torch.get_num_threads() == 2
    checked.set()
    thread.join()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_do_not_depend_on_the_number_of_threads(tmp_path: Path, dtype: Dtype) -> None:
    random_checkpoint(tmp_path, "Llama", num_hidden_layers=2)
    segments = [random_segments(np.random.default_rng(seed), 60, [40, 23]) for seed in range(3)]

    def tokens(*counts: int) -> list[tuple[RequestId, int | None]]:
        engine, number = engine_on(tmp_path, dtype=dtype, max_num_batched_tokens=50), cycle(counts)
        for name, one in enumerate(segments):
            engine.submit(request(str(name), one, max_tokens=10))
        found = []
        while engine.has_work:
            torch.set_num_threads(next(number))
            found += [(event.request_id, event.token_id) for event in engine.step()]
        return found

    assert tokens(1) == tokens(2) == tokens(1, 2)
