"""The product's engine, scheduler, knowledge tree and policies on a modelled machine with a clock of its own, for
`stillroom bench simulate` and `stillroom plan`: a `driving.Runtime` whose seconds are those of the cost profile.

What is not modelled is a tier's own code, and, unless the plant says how long it takes, a step's: that is measured
beside, in real seconds.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stillroom.backends.assembly import reuse_of, tree_options
from stillroom.config.settings import ReuseConfig
from stillroom.core.batch import Batch, StepResult
from stillroom.core.clock import VirtualClock
from stillroom.core.prompt import SegmentKind
from stillroom.engine.engine import Engine
from stillroom.kvcache.admission import Reuse
from stillroom.kvcache.blocks.pool import BlockPool
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvstore.modelled import ModelledMover
from stillroom.planner.simulation.driving import drive
from stillroom.planner.simulation.stepped_engine import EnginePolicy, Prompt, SteppedEngine, stepped
from stillroom.runner.modelled_runner import ModelledRunner
from stillroom.scheduler.limits import SchedulerLimits
from stillroom.scheduler.policy import POLICIES as SCHEDULING
from stillroom.scheduler.scheduler import Scheduler
from stillroom.scheduler.sequence_update import SequenceUpdate

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareModel:
    """What a decoder and its machine are to the rest."""

    costs: CostProfile
    bytes_per_token: int
    num_layers: int
    device_bytes: int
    """For KV."""
    max_model_len: int
    max_seqs: int = 4
    """Requests that run at the same time (RAGCache 7.1)."""
    step_tokens: int = 4096
    """Token budget of a step. RAGCache's vLLM computes a prompt in one step, at most its context in all."""
    max_tokens: int = 1
    block_size: int = BLOCK_SIZE
    step_seconds: float = 0.0
    sequence_seconds: float = 0.0
    """See `ModelledRunner`."""
    batch_delay_seconds: float = 0.0
    """See `SchedulerLimits`."""


@dataclass(slots=True)
class SimulatedOutcome:
    """What became of some requests, in their order."""

    seconds: list[float]
    """From the moment a request is due to its first token."""
    response_seconds: list[float]
    """To its last one."""
    wall_seconds: float
    """From the first due to the last answered."""
    num_documents: int = 0
    num_hit_documents: int = 0
    """Whose KV was kept, by RAGCache 7.3's counting: as far as the prefix reaches."""
    num_kept_tokens: int = 0
    num_tokens: int = 0
    scheduling_seconds: list[float] = field(default_factory=list)
    """Real ones, of each step: deciding it, and what follows from its result."""

    @property
    def mean(self) -> float:
        """Mean time to the first token."""
        return float(np.mean(self.seconds))

    @property
    def hit_rate(self) -> float:
        return self.num_hit_documents / max(1, self.num_documents)


class SimulatedRuntime(SteppedEngine):
    """One arm. What it keeps stays from one `ask` to the next."""

    def __init__(self, plant: HardwareModel, system: EnginePolicy, seed: int = 0) -> None:
        super().__init__(plant.max_tokens)
        self._plant, self._system, self._seed = plant, system, seed
        self.clock = VirtualClock()
        self.reset()

    def reset(self) -> None:
        """A fresh engine; what the one before it kept is gone."""
        plant = self._plant
        pool = BlockPool(plant.device_bytes // (plant.bytes_per_token * plant.block_size), plant.block_size)
        limits = SchedulerLimits(
            max_num_seqs=plant.max_seqs,
            max_num_batched_tokens=plant.step_tokens,
            max_model_len=plant.max_model_len,
            batch_delay_s=plant.batch_delay_seconds,
        )
        manager = KVCacheManager(pool, _reuse(plant, self._system.reuse, pool, self.clock))
        self._scheduler = _TimedScheduler(manager, limits, SCHEDULING[self._system.scheduling], self._system.window)
        runner = ModelledRunner(
            plant.costs,
            self.clock,
            num_layers=plant.num_layers,
            seed=self._seed,
            step_seconds=plant.step_seconds,
            sequence_seconds=plant.sequence_seconds,
        )
        self._engine = Engine(self._scheduler, runner, self.clock)
        self._found = [0, 0]  # documents asked for, and kept
        self._dues: list[float] = []

    def step(self) -> tuple[list[tuple[int, list[int]]], list[int]]:
        """Keeps what `ask` tells of it, too."""
        events = self.engine.step()
        if self.engine.pause > 0:  # for company, which may come before
            coming = (due for due in self._dues if due > self.clock.now)
            self._sleep(min(self.engine.pause, next(coming, float("inf")) - self.clock.now))
        for event in events:
            if event.reuse is not None:
                documents = [one for one in event.reuse.segments if one.kind is SegmentKind.CHUNK]
                self._found[0] += len(documents)
                self._found[1] += sum(one.source is not None for one in documents)
        return stepped(events)

    def ask(self, prompts: Sequence[Prompt], dues: Sequence[float] | None = None) -> SimulatedOutcome:
        """Send prompts when they are due, in seconds from now; None: each when the one before is answered."""
        self._found = [0, 0]
        self._scheduler.seconds = []
        self._dues = [self.clock.now + due for due in dues or ()]
        told = drive(self, prompts, dues, self.clock.monotonic, self._sleep)
        return SimulatedOutcome(
            seconds=told["seconds"],
            response_seconds=told["response_seconds"],
            wall_seconds=told["wall_seconds"],
            num_documents=self._found[0],
            num_hit_documents=self._found[1],
            num_kept_tokens=sum(map(sum, told["cached"])),
            num_tokens=sum(len(part) for prompt in prompts for part in prompt),
            scheduling_seconds=self._scheduler.seconds,
        )

    def _sleep(self, seconds: float) -> None:
        """And a nanosecond, or rounding might leave a moment that never comes."""
        self.clock.advance(seconds + 1e-9)


class _TimedScheduler(Scheduler):
    """Notes how long its decisions take, in real seconds."""

    seconds: list[float]

    def schedule(self, now: float = 0.0) -> Batch | None:
        started = time.perf_counter()
        batch = super().schedule(now)
        self.seconds.append(time.perf_counter() - started)
        return batch

    def update(self, batch: Batch, result: StepResult, began: float = 0.0) -> list[SequenceUpdate]:
        started = time.perf_counter()
        updates = super().update(batch, result, began)
        self.seconds[-1] += time.perf_counter() - started
        return updates


def _reuse(plant: HardwareModel, config: ReuseConfig, pool: BlockPool, clock: VirtualClock) -> Reuse | None:
    """As `rag.kv_cache.build_cache` reads the settings, without stores."""
    if not config.keeps_kv:
        return None
    mover = ModelledMover(clock, plant.costs.load_seconds, plant.bytes_per_token)
    options = tree_options(config, plant.bytes_per_token)
    return reuse_of(KnowledgeTree(pool, mover, plant.costs, options, clock.monotonic), config, b"")
