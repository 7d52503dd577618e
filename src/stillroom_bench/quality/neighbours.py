"""`stillroom bench neighbours`: the time to the first token beside processes that keep every core busy.

One engine answers the same prompts alone and beside such processes, with a fixed number of threads and with the number
that follows the load (`backends/thread_control.py`).
"""

import contextlib
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.backends.engine_building import build_engine
from stillroom.backends.thread_chooser import ThreadChooser
from stillroom.backends.thread_control import ThreadControl, read_cpu_times
from stillroom.config.settings import RuntimeConfig
from stillroom.core.clock import SystemClock
from stillroom.core.ids import RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.events import TokenEvent
from stillroom.errors import UsageError
from stillroom.models.causal_model import CausalModel
from stillroom.models.loader import load_own_decoder
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom_bench.instrument.bench_report import BenchResult, format_value
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, Samples, run_arms
from stillroom_bench.instrument.statistics import ratio_of_medians
from stillroom_bench.quality.quality_options import NeighboursOptions
from stillroom_bench.quality.runtime import Shape, write_checkpoint

FIXED, ADAPTIVE = "fixed", "adaptive"
QUIET, BESIDE = "alone", "beside"

_SETTLE_SECONDS = 2.0
"""Time between the start of the other processes and the first prompt; as long without them."""
_RETURN_SECONDS = 70.0
"""Longest wait until all threads are used again."""
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
"""Keeps a core busy until the parent has ended."""


@dataclass(slots=True)
class _Serving:
    """A running engine whose threads `control` sets."""

    options: NeighboursOptions
    num_threads: int
    num_cpus: int
    vocab_size: int
    clock: SystemClock
    control: ThreadControl = field(init=False)
    engine: AsyncEngine = field(init=False)

    def measure(self, threads: str, where: str, repetition: int) -> Metrics:
        """Return the times of one run of an arm."""
        is_adaptive = threads == ADAPTIVE
        self._use(is_adaptive)
        with self._processes() if where == BESIDE else contextlib.nullcontext():
            began = self.clock.monotonic()
            noticed = self._seconds_until(lambda: self.control.count < self.num_threads, _SETTLE_SECONDS)
            time.sleep(max(0.0, began + _SETTLE_SECONDS - self.clock.monotonic()))
            seconds = [self._first_token(repetition, number) for number in range(self.options.num_requests)]
        found = {"first_token_seconds": statistics.median(seconds), "slowest_first_token_seconds": max(seconds)}
        if is_adaptive and where == BESIDE:
            found["noticed_seconds"] = noticed
            found["returned_seconds"] = self._seconds_until(
                lambda: self.control.count == self.num_threads, _RETURN_SECONDS
            )
        return found

    def _use(self, is_adaptive: bool) -> None:
        num_cpus = self.num_cpus if is_adaptive else self.num_threads
        chooser = ThreadChooser(self.num_threads, num_cpus, self.num_threads)
        control = ThreadControl(chooser, self.clock, read_cpu_times if is_adaptive else None)
        self.control = control
        self.engine.run(lambda _: control.apply())
        self.engine.run(lambda _: control.adjust())  # the first reading

    @contextlib.contextmanager
    def _processes(self) -> Iterator[None]:
        """Run processes that keep every core busy."""
        number = self.options.num_processes or self.num_cpus
        processes = [subprocess.Popen([sys.executable, "-I", "-S", "-c", _SPIN]) for _ in range(number)]
        try:
            yield
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()

    def _seconds_until(self, holds: Callable[[], bool], limit: float) -> float:
        """Return the seconds until a condition holds, at most `limit`."""
        began = self.clock.monotonic()
        while not holds() and self.clock.monotonic() - began < limit:
            time.sleep(0.01)
        return self.clock.monotonic() - began

    def _first_token(self, repetition: int, number: int) -> float:
        """Return the seconds to the first token of a prompt that is the same in every arm."""
        rng = np.random.default_rng([self.options.seed, repetition + 100, number])  # warm-up repetitions are negative
        tokens = tuple(rng.integers(4, self.vocab_size, self.options.length).tolist())
        request = Request(
            request_id=RequestId(f"{repetition} {number}"),
            prompt=SegmentedPrompt((Segment(SegmentKind.QUESTION, tokens),)),
            sampling=SamplingParams(max_tokens=1),
        )
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        began = self.clock.monotonic()
        self.engine.submit(request, events.put)
        event = events.get()
        assert event.error is None
        return event.at - began


def run_neighbours(
    options: NeighboursOptions,
    work_dir: Path,
    *,
    shape: Shape | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Run the benchmark.

    Args:
        work_dir: folder that keeps checkpoints between runs.

    Raises:
        UsageError: there is one thread only, or the system does not report CPU times.
    """
    environment = record_environment()
    if environment.num_threads < 2 or read_cpu_times() is None:
        raise UsageError("the number of threads follows the load only with two threads or more, on Linux")
    shape, clock = shape or Shape(), SystemClock()

    def load() -> CausalModel:
        folder = options.model or write_checkpoint(work_dir, shape, "bfloat16", options.seed)
        return load_own_decoder(folder, device="cpu", dtype="bfloat16")

    decoder = run_in_short_lived_thread(load)
    inner = run_in_short_lived_thread(lambda: build_engine(decoder, RuntimeConfig(), clock)[0])
    serving = _Serving(options, environment.num_threads, environment.num_cpus, decoder.spec.vocab_size, clock)
    with AsyncEngine(inner, before_step=lambda: serving.control.adjust()) as serving.engine:
        arms = [_arm(serving, threads, where) for threads in (FIXED, ADAPTIVE) for where in (QUIET, BESIDE)]
        samples = run_arms(
            arms, repeat=options.repeat, on_run=lambda name, at: on_progress(f"{name}, run {at}"), only_own=True
        )
    return BenchResult(
        "stillroom bench neighbours",
        environment,
        {
            "model": str(options.model or "random weights"),
            "length": options.length,
            "requests": options.num_requests,
            "processes": options.num_processes or environment.num_cpus,
            "repeat": options.repeat,
            "seed": options.seed,
        },
        samples,
        QUIET,
        tables={"adaptive against fixed": [_row(samples, where) for where in (QUIET, BESIDE)]},
    )


def _arm(serving: _Serving, threads: str, where: str) -> Arm:
    return Arm(f"{threads} threads/{where}", lambda at: serving.measure(threads, where, at))


def _row(samples: Samples, where: str) -> dict[str, Any]:
    metric = "first_token_seconds"
    fixed, adaptive = (samples.of(f"{threads} threads/{where}", metric) for threads in (FIXED, ADAPTIVE))
    return {
        "first token": where,
        FIXED: format_value(metric, statistics.median(fixed)),
        ADAPTIVE: format_value(metric, statistics.median(adaptive)),
        "ratio": str(ratio_of_medians(adaptive, fixed)),
    }
