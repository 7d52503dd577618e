"""Forecasts of `bench tiered --answers`: the share of first tokens within a target, as `stillroom plan` simulates it.

VectorLiteRAG's rule (Eq. 7 to 10) gives search and model processors of their own and counts no wait for the model. The
plan's simulation runs the engine on a virtual clock beside searches that slow it down. Both are made before the runs
that they are compared with: forecasts draw other requests, arrivals and questions, and no factor comes from those runs.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stillroom.planner.simulation.driving import drive
from stillroom.planner.simulation.search_station import Query, SearchStation, SharedCores
from stillroom.planner.simulation.simulated_runtime import HardwareModel, SimulatedRuntime
from stillroom.planner.simulation.stepped_engine import EnginePolicy
from stillroom.retrieval.tiers.division import Division
from stillroom.retrieval.tiers.partition import Lists, Partition
from stillroom.retrieval.tiers.search_profile import SearchProfile, probed_lists
from stillroom.retrieval.tiers.tiered_ivf import DISK, RAM, TieredLists
from stillroom_bench.experiments.tiered_throughput import SkewedQuestions, Vectors

_NUM_FORECASTS = 5
_FIRST_FORECAST = 500
"""Number of the first repetition that is forecast; measured repetitions are below it."""
_NUM_FOUND = 50


class Requests(Protocol):
    """Prompts and arrival times of a repetition."""

    def prompts(self, repetition: int) -> list[Any]:
        """Return warm-up prompts, then measured prompts."""
        ...

    def arrivals(self, repetition: int) -> list[float]:
        """Return the arrival times of the measured prompts, in seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Overheads:
    """What requests cost beyond search and model alone."""

    request_seconds: float
    """Of a request, alone; at least 0."""
    cores: SharedCores


def measure_cores(
    runtime: Any, prompts: Sequence[Any], tiers: TieredLists, queries: Vectors, nprobe: int
) -> SharedCores:
    """Measure how much searches and the model slow each other down; each factor is at least 1.

    Args:
        runtime: a `DrivenRuntime`; it loses its kept KV.
        prompts: computed once alone and once beside searches that follow each other.
    """

    def search(number: int) -> float:
        began = time.perf_counter()
        tiers.drop_pages()
        tiers.search_batch(queries[number % len(queries)][None], _NUM_FOUND, nprobe, lambda at, scored: None)
        return time.perf_counter() - began

    alone = [search(number) for number in range(len(queries))]
    runtime.reset()
    answers = drive(runtime, prompts, None)["wall_seconds"]
    beside: list[float] = []
    has_ended = threading.Event()

    def search_on() -> None:
        while not has_ended.is_set():
            beside.append(search(len(beside)))

    runtime.reset()
    thread = threading.Thread(target=search_on)
    thread.start()
    try:
        slowed = drive(runtime, prompts, None)["wall_seconds"]
    finally:
        has_ended.set()
        thread.join()
    return SharedCores(max(1.0, float(np.median(beside[:-1] or beside) / np.median(alone))), max(1.0, slowed / answers))


class Forecasts:
    """Simulates the requests of the benchmark for any division of the lists."""

    def __init__(  # noqa: PLR0913  the parts of a machine and its load
        self,
        hardware: HardwareModel,
        policy: EnginePolicy,
        overheads: Overheads,
        profile: SearchProfile,
        requests: Requests,
        questions: SkewedQuestions,
        lists: Any,
        nprobe: int,
    ) -> None:
        self._hardware, self._policy, self._overheads = hardware, policy, overheads
        self._profile, self._requests = profile, requests
        self._questions, self._lists, self._nprobe = questions, lists, nprobe

    def seconds(self, held: Lists) -> NDArray[np.float64]:
        """Return the times to first token, search included, of all forecast requests with these lists in RAM."""
        shard_of = np.full(len(self._profile.sizes), DISK)
        shard_of[held] = RAM
        division = Division(self._profile.sizes, self._profile.bytes_per_vector, Partition(shard_of, 2))
        return np.concatenate([self._one(division, _FIRST_FORECAST + at) for at in range(_NUM_FORECASTS)])

    def _one(self, division: Division, repetition: int) -> NDArray[np.float64]:
        prompts, dues = self._requests.prompts(repetition), self._requests.arrivals(repetition)
        num_warm = len(prompts) - len(dues)
        probed = probed_lists(self._lists, self._questions.draw(len(dues), repetition), self._nprobe)

        def releases(numbers: Sequence[int]) -> NDArray[np.float64]:
            found: NDArray[np.float64] = self._profile.model.release_seconds(division, probed[list(numbers)])
            return found

        runtime = SimulatedRuntime(self._hardware, self._policy)
        runtime.ask(prompts[:num_warm])
        queries = [Query(due, after=self._overheads.request_seconds) for due in dues]
        station = SearchStation(queries, releases, len(dues), self._overheads.cores)
        return np.array(runtime.ask_searched(prompts[num_warm:], station).seconds)


def request_overhead(
    measured: Sequence[float], hardware: HardwareModel, policy: EnginePolicy, prompts: Sequence[Any], num_warm: int
) -> float:
    """Return what sequential requests without search took longer than simulated ones, in the mean; at least 0."""
    runtime = SimulatedRuntime(hardware, policy)
    runtime.ask(prompts[:num_warm])
    return max(0.0, float(np.mean(measured)) - runtime.ask(prompts[num_warm:]).mean)
