"""Runs the product's engine, scheduler, knowledge tree and policies on modelled hardware with a virtual clock.

Used by `stillroom plan` and `stillroom bench simulate`. Seconds come from a cost profile. The code of the tiers is not
modelled. Scheduling costs virtual time only if `HardwareModel.step_seconds` says so; its real time is measured.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stillroom.backends.assembly import reuse_of, tree_options
from stillroom.core.batch import Batch, StepResult
from stillroom.core.clock import VirtualClock
from stillroom.core.ids import RequestId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.errors import PreparedFullError
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.lease_admission import Reuse
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.pieces import Piece
from stillroom.kvstore.modelled import ModelledMover
from stillroom.planner.simulation.driving import drive
from stillroom.planner.simulation.network_tier import NetworkMover, NetworkTier
from stillroom.planner.simulation.search_station import SearchStation
from stillroom.planner.simulation.simulated_corpus import PreparingPrompt, SimulatedCorpus
from stillroom.planner.simulation.stepped_engine import EnginePolicy, Prompt, SteppedEngine, segmented, step_outcome
from stillroom.runner.modelled_runner import ModelledRunner
from stillroom.scheduler.limits import SchedulerLimits
from stillroom.scheduler.policy import POLICIES as SCHEDULING
from stillroom.scheduler.scheduler import Scheduler
from stillroom.scheduler.sequence_update import SequenceUpdate

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareModel:
    """Costs and sizes of a decoder on a machine."""

    costs: CostProfile
    bytes_per_token: int
    narrow_size: Callable[[int, int], int] | None = None
    """As in `TreeOptions`."""
    num_layers: int
    device_bytes: int
    """Device memory for KV blocks."""
    max_model_len: int
    max_seqs: int = 4
    """Most requests that run at the same time (RAGCache 7.1)."""
    step_tokens: int = 4096
    """Token budget of a step. RAGCache's vLLM computes a prompt in one step."""
    max_tokens: int = 1
    block_size: int = BLOCK_SIZE
    step_seconds: float = 0.0
    sequence_seconds: float = 0.0
    """As in `ModelledRunner`."""
    batch_delay_seconds: float = 0.0
    """As in `SchedulerLimits`."""


@dataclass(slots=True)
class SimulatedOutcome:
    """Simulated times of requests, in their order."""

    seconds: list[float]
    """From arrival to the first token."""
    response_seconds: list[float]
    """From arrival to the last token."""
    wall_seconds: float
    """From the first arrival to the last answer."""
    num_documents: int = 0
    num_hit_documents: int = 0
    """Documents whose KV was reused, counted as in RAGCache 7.3: as far as the prefix reaches."""
    num_kept_tokens: int = 0
    num_tokens: int = 0
    scheduling_seconds: list[float] = field(default_factory=list)
    """Real seconds of each step's `schedule` and `update`."""

    @property
    def mean(self) -> float:
        """Mean time to the first token."""
        return float(np.mean(self.seconds))

    @property
    def hit_rate(self) -> float:
        return self.num_hit_documents / max(1, self.num_documents)


class SimulatedRuntime(SteppedEngine):
    """A simulated engine. Kept KV stays from one `ask` to the next."""

    def __init__(
        self,
        hardware: HardwareModel,
        policy: EnginePolicy,
        seed: int = 0,
        documents: Sequence[Sequence[Segment]] | SimulatedCorpus = (),
        network: NetworkTier | None = None,
    ) -> None:
        """
        Args:
            documents: chunks of each in order, for `prepare` and for reuse at any position.
            network: takes the place of the disk.
        """
        super().__init__(hardware.max_tokens)
        self._hardware, self._policy, self._seed = hardware, policy, seed
        self._corpus = documents if isinstance(documents, SimulatedCorpus) else SimulatedCorpus(documents)
        self._network = network
        self.clock = VirtualClock()
        self.reset()

    def reset(self) -> None:
        """Build a new engine without kept KV."""
        hardware = self._hardware
        pool = BlockPool(hardware.device_bytes // (hardware.bytes_per_token * hardware.block_size), hardware.block_size)
        limits = SchedulerLimits(
            max_num_seqs=hardware.max_seqs,
            max_num_batched_tokens=hardware.step_tokens,
            max_model_len=hardware.max_model_len,
            batch_delay_s=hardware.batch_delay_seconds,
            preparing_tokens=hardware.step_tokens,  # no question comes while documents are prepared
        )
        self._manager = manager = KVCacheManager(pool, _reuse(hardware, self._policy, pool, self._mover()))
        self._changed: set[bytes] = set()
        self._scheduler = _TimedScheduler(manager, limits, SCHEDULING[self._policy.scheduling], self._policy.window)
        self._scheduler.seconds = []
        self._runner = ModelledRunner(
            hardware.costs,
            self.clock,
            num_layers=hardware.num_layers,
            seed=self._seed,
            step_seconds=hardware.step_seconds,
            sequence_seconds=hardware.sequence_seconds,
        )
        self._engine = Engine(self._scheduler, self._runner, self.clock)
        self._engine.follow("", self._corpus)
        self._found = [0, 0]  # documents: all, and those whose KV was reused
        self._dues: list[float] = []
        self._search: SearchStation | None = None
        self._search_began = 0.0

    def step(self) -> tuple[list[tuple[int, list[int]]], list[int]]:
        """Run one step and count its documents for `ask`."""
        events = self.engine.step()
        if self.engine.pause > 0:  # the batch delay, or until the next arrival
            self._sleep(max(0.0, min(self.engine.pause, self._next_arrival() - self.clock.now)))
        for event in events:
            if event.reuse is not None:
                documents = [one for one in event.reuse.segments if one.kind is SegmentKind.CHUNK]
                self._found[0] += len(documents)
                self._found[1] += sum(one.source is not None for one in documents)
        return step_outcome(events)

    def ask(self, prompts: Sequence[Prompt], dues: Sequence[float] | None = None) -> SimulatedOutcome:
        """Submit prompts at their arrival times in seconds from now; None: each when the previous one is answered."""
        self._begin_asking()
        self._dues = [self.clock.now + due for due in dues or ()]
        timings = drive(self, prompts, dues, self.clock.monotonic, self._sleep)
        return self._outcome(prompts, timings)

    def ask_searched(self, prompts: Sequence[Prompt], search: SearchStation) -> SimulatedOutcome:
        """Submit each prompt when its search, which runs on the same cores, has found its chunks. Seconds count from
        the arrival of the question.

        Args:
            search: a new one, whose queries are those of `prompts`.
        """
        self._begin_asking()
        self._search, self._search_began = search, self.clock.now
        self._runner.stretch = lambda seconds: search.beside(self._search_now, seconds)
        sent, num_sent = [0.0] * len(prompts), 0
        timings: dict[str, Any] = {key: [0.0] * len(prompts) for key in ("seconds", "response_seconds")}
        timings["cached"] = [[0, 0, 0] for _ in prompts]
        while num_sent < len(prompts) or self.has_work:
            search.idle_until(self._search_now)
            while search.found:
                found, number = search.found.popleft()
                sent[number], num_sent = found - search.search_seconds[number], num_sent + 1
                self.submit(number, prompts[number])
            if not self.has_work:
                self._sleep(search.idle_until_found() - self._search_now)
                continue
            firsts, ended = self.step()
            for number, kept in firsts:
                timings["seconds"][number], timings["cached"][number] = self._search_now - sent[number], kept
            for number in ended:
                timings["response_seconds"][number] = self._search_now - sent[number]
        timings["wall_seconds"] = self._search_now
        self._search, self._runner.stretch = None, None
        return self._outcome(prompts, timings)

    @property
    def _search_now(self) -> float:
        """Seconds since the workload of `ask_searched` began."""
        return self.clock.now - self._search_began

    def _begin_asking(self) -> None:
        self._found = [0, 0]
        self._scheduler.seconds = []
        self._dues = []

    def _outcome(self, prompts: Sequence[Prompt], timings: dict[str, Any]) -> SimulatedOutcome:
        return SimulatedOutcome(
            seconds=timings["seconds"],
            response_seconds=timings["response_seconds"],
            wall_seconds=timings["wall_seconds"],
            num_documents=self._found[0],
            num_hit_documents=self._found[1],
            num_kept_tokens=sum(map(sum, timings["cached"])),
            num_tokens=sum(len(part) for prompt in prompts for part in prompt),
            scheduling_seconds=self._scheduler.seconds,
        )

    def watch_changes(self) -> None:
        """Start to remember which KV is kept, for `take_changes`."""
        if self._manager.reuse is not None:
            self._changed = self._manager.reuse.tree.watch_changes()

    def take_changes(self) -> dict[bytes, Tier | None]:
        """Return the keys and contents whose kept KV changed since the last call, with the fastest tier that holds
        them; None: no tier. With `prepared` a content is held where a copy in its document's context is."""
        names, reuse = sorted(self._changed), self._manager.reuse
        self._changed.clear()
        if reuse is None:
            return {}
        only_prepared = self._policy.reuse.mode == "prepared"
        return {name: reuse.tree.tier_of(name, only_prepared=only_prepared) for name in names}

    def kept_contents(self) -> set[bytes]:
        """Return the contents of all kept KV."""
        reuse = self._manager.reuse
        return set() if reuse is None else {node.content for node in reuse.tree if node.tier is not None}

    def pieces_of(self, prompt: Prompt) -> tuple[Piece, ...]:
        """Return the pieces by which the engine keeps a prompt's KV; none if it keeps no KV."""
        reuse = self._manager.reuse
        return () if reuse is None else reuse.keys.pieces(self.segments_of(prompt))

    def sleep_until(self, moment: float) -> None:
        """Advance the clock of an idle engine. No effect if the moment has passed."""
        if self.clock.now < moment:
            self._sleep(moment - self.clock.now)

    def prepare(self, prompts: Sequence[PreparingPrompt]) -> int:
        """Prepare documents while no question comes; return how many of the prompts fit into the budget."""
        ended: list[Exception | None] = []

        def on_end(error: Exception | None, *, is_computed: bool) -> None:
            ended.append(error)

        for number, one in enumerate(prompts):
            request = Request(
                request_id=RequestId(f"prepare-{number}"),
                prompt=one.prompt,
                sampling=SamplingParams(max_tokens=1),
                prepares=one.prepares,
            )
            self.engine.prepare(request, on_end)
            while len(ended) == number:
                if self.engine.has_work:
                    self.step()
                else:
                    self.do_idle_work()
            if isinstance(ended[-1], PreparedFullError):
                return number
            if ended[-1] is not None:
                raise ended[-1]
        return len(prompts)

    def segments_of(self, prompt: Sequence[Sequence[int]]) -> SegmentedPrompt:
        """Mark the parts of a prompt, and name its chunks."""
        segments = segmented(prompt).segments
        named = (replace(one, chunk_id=self._corpus.chunk_id_of(one.token_ids)) for one in segments[1:-1])
        return SegmentedPrompt((segments[0], *named, segments[-1]))

    def find_in_network(self, prompt: Prompt) -> None:
        """Let the tree know the records of the network tier that a prompt may use."""
        reuse, network = self._manager.reuse, self._network
        if reuse is None or network is None:
            return
        for piece in self.pieces_of(prompt):
            for name in (piece.key, piece.content):
                if reuse.tree.tier_of(name) is None:
                    path = network.path_to(name, self.clock.now)
                    reuse.tree.restore(record for record in path if reuse.tree.get(record.key) is None)

    def _next_arrival(self) -> float:
        """Return when the next prompt may come, at the earliest."""
        if self._search is not None:
            return self._search_began + self._search.next_change()
        return next((due for due in self._dues if due > self.clock.now), float("inf"))

    def _mover(self) -> ModelledMover:
        hardware = self._hardware
        if self._network is None:
            return ModelledMover(self.clock, hardware.costs.load_seconds, hardware.bytes_per_token)
        return NetworkMover(self.clock, hardware.costs.load_seconds, hardware.bytes_per_token, self._network)

    def _sleep(self, seconds: float) -> None:
        """Advance the clock; the extra nanosecond keeps rounding from stopping just before the target."""
        self.clock.advance(seconds + 1e-9)


class _TimedScheduler(Scheduler):
    """Measures the real seconds of its decisions."""

    seconds: list[float]

    def schedule(self, now: float = 0.0) -> Batch | None:
        started = time.perf_counter()
        batch = super().schedule(now)
        self.seconds.append(time.perf_counter() - started)
        return batch

    def update(self, batch: Batch, result: StepResult, began: float = 0.0, ended: float = 0.0) -> list[SequenceUpdate]:
        started = time.perf_counter()
        updates = super().update(batch, result, began, ended)
        self.seconds[-1] += time.perf_counter() - started
        return updates


def _reuse(hardware: HardwareModel, policy: EnginePolicy, pool: BlockPool, mover: ModelledMover) -> Reuse | None:
    """Build the knowledge tree as `backends.assembly` does, without stores."""
    config = policy.reuse
    if not config.keeps_kv:
        return None
    options = tree_options(config, hardware.bytes_per_token, prepare=policy.prepare, narrow_size=hardware.narrow_size)
    return reuse_of(KnowledgeTree(pool, mover, hardware.costs, options, mover.clock.monotonic), config, b"")
