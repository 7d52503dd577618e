"""Simulates several engines behind fronts: the product's engines and router on one virtual time line.

Each engine has its own clock, which runs ahead of the time line to the end of the step that it has begun; what the step
sends, fronts see at that time. Everything depends on the arguments alone. With one engine the times equal those of
`SimulatedRuntime.ask`. Not modelled: the network between fronts and engines, and the search.
"""

import heapq
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, cast

from stillroom.cluster.engine_belief import EngineBelief
from stillroom.cluster.front_beliefs import FrontBeliefs
from stillroom.cluster.placing import by_hash
from stillroom.cluster.prediction import EngineCosts, predict
from stillroom.cluster.routed_request import RoutedRequest, routed_request
from stillroom.cluster.routers import MAX_AGE_SECONDS, Router
from stillroom.core.kv import Link, Tier
from stillroom.errors import UsageError
from stillroom.planner.simulation.network_tier import NetworkTier
from stillroom.planner.simulation.simulated_corpus import PreparingPrompt, SimulatedCorpus
from stillroom.planner.simulation.simulated_node import SimulatedNode, StepResult
from stillroom.planner.simulation.simulated_runtime import HardwareModel, SimulatedRuntime
from stillroom.planner.simulation.stepped_engine import EnginePolicy, Prompt

_RESULT, _CHANGE, _REPORT, _ARRIVAL = range(4)
"""Order of events of the same moment."""
_UNBOUNDED = 2**60
"""Bytes of the network tier."""


@dataclass(frozen=True, slots=True)
class NodeChange:
    """An engine that is lost (killed), or added without kept KV."""

    at_seconds: float
    kind: Literal["lose", "add"]
    engine: int
    """Number of the engine; added ones are numbered on from the others."""


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """A KV tier that all engines share."""

    port: Link
    """Of each engine."""
    bytes_per_second: float
    """Of the tier, for all engines together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSetup:
    """A cluster of equal engines."""

    hardware: HardwareModel
    policy: EnginePolicy
    num_engines: int
    num_fronts: int = 1
    """Requests go to the fronts in turn."""
    report_seconds: float = 0.0
    """Each engine reports to every front once in so many seconds, so beliefs are at most so old. 0: before every
    decision."""
    changes: tuple[NodeChange, ...] = ()
    detection_seconds: float = 0.05
    """From the loss of an engine until fronts send its requests to others (a failed stream; docs/cluster.md)."""
    network: NetworkModel | None = None
    """Takes the place of the engines' disks."""
    num_prepared_copies: int = 1
    """Engines that prepare each document before the first request, with `reuse.mode = "prepared"`: the first ones in
    the order of hash of the document's first chunk."""
    seed: int = 0

    @property
    def engine(self) -> tuple[HardwareModel, EnginePolicy]:
        """An engine's hardware and policy; its disk is the network tier, if there is one."""
        if self.network is None:
            return self.hardware, self.policy
        costs = self.hardware.costs
        links = {**costs.links, Tier.DISK: self.network.port}
        hardware = replace(self.hardware, costs=replace(costs, links=links))
        return hardware, replace(self.policy, reuse=replace(self.policy.reuse, disk_bytes=_UNBOUNDED))

    @property
    def costs(self) -> EngineCosts:
        """Costs from which requests are predicted."""
        reuse = self.policy.reuse
        shares = {"anywhere": reuse.recompute_ratio, "prepared": 0.0}
        return EngineCosts(
            profile=self.engine[0].costs,
            bytes_per_token=self.hardware.bytes_per_token,
            recompute_share=shares.get(reuse.mode),
            has_query_pass=reuse.token_selector in ("question", "question_mean"),
        )


@dataclass(slots=True)
class ClusterOutcome:
    """Simulated results of requests, in their order."""

    seconds: list[float]
    """From arrival to the first token."""
    response_seconds: list[float]
    """From arrival to the last token."""
    engine: list[int]
    """The engine that answered."""
    reused: list[int]
    """Prompt tokens whose KV was kept."""
    num_tokens: list[int]
    """Of the prompt."""
    num_rerouted: int = 0
    """Requests that were sent again because their engine was lost."""
    wall_seconds: float = 0.0
    copies: float = 0.0
    """Engines that hold a piece of a prompt, or a prepared one, at the end: mean over those that some engine holds."""
    num_loaded_bytes: int = 0
    """From the network tier."""
    num_stored_bytes: int = 0


@dataclass(slots=True)
class _Request:
    prompt: Prompt
    due: float
    routed: RoutedRequest
    front: int
    has_first_token: bool = False


@dataclass(order=True, slots=True)
class _Event:
    at_seconds: float
    order: int
    number: int
    run: Callable[[float], None] = field(compare=False)


class ClusterSimulation:
    """One run of a cluster under one router."""

    def __init__(
        self,
        setup: ClusterSetup,
        router: Router,
        corpus: SimulatedCorpus | None = None,
        documents: Sequence[PreparingPrompt] = (),
    ) -> None:
        """
        Args:
            corpus: the chunks of the prompts, which reuse at any position must know.
            documents: prepared by the engines that are there at the start; time begins when the last one is done.

        Raises:
            UsageError: a change names an engine that cannot change so, engines report too rarely, or the hardware
                delays batches.
        """
        if setup.hardware.batch_delay_seconds:
            raise UsageError("a simulated cluster has no batch delay; set batch_delay_seconds to 0")
        if not 0.0 <= setup.report_seconds < MAX_AGE_SECONDS:
            raise UsageError(
                f"report_seconds={setup.report_seconds:g} must be below {MAX_AGE_SECONDS:g}, after which a silent "
                "engine is taken for dead"
            )
        self._setup, self._router, self._costs = setup, router, setup.costs
        self._corpus = corpus or SimulatedCorpus(())
        network = setup.network
        self._network = None if network is None else NetworkTier(network.port, network.bytes_per_second)
        places_computed = setup.policy.reuse.mode != "prepared"
        self._fronts = [FrontBeliefs(places_computed=places_computed) for _ in range(setup.num_fronts)]
        self._nodes: list[SimulatedNode] = []
        self._events: list[_Event] = []
        self._num_events = self._num_open = 0
        self._requests: list[_Request] = []
        for _ in range(setup.num_engines):
            self._add(0.0)
        self._check_changes()
        self._prepare(documents)

    def run(self, prompts: Sequence[Prompt], dues: Sequence[float]) -> ClusterOutcome:
        """Send every prompt at its arrival time, and wait until all are answered. A simulation runs once.

        Args:
            dues: seconds from the start, ascending.
        """
        assert not self._requests and len(prompts) == len(dues)
        self._outcome = _empty_outcome(prompts)
        for number, prompt in enumerate(prompts):
            due = self._began + dues[number]
            pieces = self._nodes[0].runtime.pieces_of(prompt)
            front, own_number = number % len(self._fronts), number // len(self._fronts)
            routed = routed_request(own_number, pieces, sum(map(len, prompt)))
            self._requests.append(_Request(prompt, due, routed, front))
            self._schedule(due, _ARRIVAL, partial(self._send, number))
        self._num_open = len(prompts)
        for change in self._setup.changes:
            self._schedule(self._began + change.at_seconds, _CHANGE, partial(self._change, change))
        while self._num_open:
            node = min(
                (node for node in self._nodes if node.can_run),
                key=lambda node: (node.now, node.engine_id),
                default=None,
            )
            if node is not None and (not self._events or node.now < self._events[0].at_seconds):
                self._run(node)
            else:
                event = heapq.heappop(self._events)
                event.run(event.at_seconds)
        self._outcome.copies = self._copies()
        if self._network is not None:
            self._outcome.num_loaded_bytes = self._network.num_loaded_bytes
            self._outcome.num_stored_bytes = self._network.num_stored_bytes
        return self._outcome

    def _copies(self) -> float:
        kept = [node.runtime.kept_contents() for node in self._nodes if node.is_alive]
        return sum(map(len, kept)) / max(1, len(set().union(*kept)))

    def _prepare(self, documents: Sequence[PreparingPrompt]) -> None:
        """Prepare each document on its engines."""
        engines = self._fronts[0].at(0.0)
        shares: dict[str, list[PreparingPrompt]] = {one.engine_id: [] for one in engines}
        for document in documents:
            tokens = tuple(segment.token_ids for segment in document.prompt.segments)
            first_chunk = self._nodes[0].runtime.pieces_of(tokens)[1].content
            for one in by_hash(first_chunk, engines)[: self._setup.num_prepared_copies]:
                shares[one.engine_id].append(document)
        for node in self._nodes:
            node.prepare(shares[node.engine_id])
        self._began = max(node.now for node in self._nodes)
        for node in self._nodes:
            node.runtime.sleep_until(self._began)

    def _schedule(self, at_seconds: float, order: int, run: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, _Event(at_seconds, order, self._num_events, run))

    # Requests

    def _send(self, number: int, now: float) -> None:
        """Choose an engine for a request and send it there."""
        request = self._requests[number]
        front = self._fronts[request.front]
        if not self._setup.report_seconds:
            for node in self._nodes:
                self._report(node, now)
        chosen = self._router.choose(request.routed, self._beliefs(front, now))
        work_seconds = predict(request.routed, chosen.held, self._costs).seconds
        front.on_sent(chosen.engine_id, request.routed, work_seconds, now)
        self._outcome.engine[number] = engine = int(chosen.engine_id)
        self._nodes[engine].submit(number, request.prompt, work_seconds, now)

    def _beliefs(self, front: FrontBeliefs, now: float) -> list[EngineBelief]:
        """Return what a front believes of its engines, each of which can load from the network tier."""
        engines = front.at(now)
        if self._network is None:
            return engines
        names = self._network.names
        return [replace(one, held=ChainMap(cast(dict[bytes, Tier], one.held), names)) for one in engines]

    def _run(self, node: SimulatedNode) -> None:
        result = node.run()
        if result is not None:
            self._schedule(result.at_seconds, _RESULT, partial(self._deliver, node, result))

    def _deliver(self, node: SimulatedNode, result: StepResult, now: float) -> None:
        """Let fronts see what an engine sends at the end of a step, unless the engine was lost meanwhile."""
        if not node.is_alive:
            return
        node.on_sent(result)
        outcome = self._outcome
        for number, cached in result.firsts:
            request = self._requests[number]
            self._fronts[request.front].on_first_token(node.engine_id, request.routed.number, now)
            if not request.has_first_token:
                request.has_first_token = True
                outcome.seconds[number] = now - request.due
                outcome.reused[number] = sum(cached)
        for number in result.ended:
            request = self._requests[number]
            self._fronts[request.front].on_end(node.engine_id, request.routed.number, now)
            outcome.response_seconds[number] = now - request.due
            outcome.wall_seconds = now - self._began
        self._num_open -= len(result.ended)

    # Engines

    def _report(self, node: SimulatedNode, now: float) -> None:
        if node.is_alive:
            report = node.report(now)
            for front in self._fronts:
                front.on_report(node.engine_id, report)

    def _report_again(self, node: SimulatedNode, now: float) -> None:
        self._report(node, now)
        if node.is_alive:
            self._schedule(now + self._setup.report_seconds, _REPORT, partial(self._report_again, node))

    def _change(self, change: NodeChange, now: float) -> None:
        if change.kind == "add":
            self._add(now)
            return
        self._nodes[change.engine].lose()
        self._schedule(now + self._setup.detection_seconds, _CHANGE, partial(self._detect, change.engine))

    def _detect(self, engine: int, now: float) -> None:
        """Send the requests of a lost engine to others, each from its beginning."""
        for index, front in enumerate(self._fronts):
            for own_number in front.lose_engine(self._nodes[engine].engine_id):
                self._outcome.num_rerouted += 1
                self._send(own_number * len(self._fronts) + index, now)

    def _add(self, now: float) -> None:
        setup = self._setup
        runtime = SimulatedRuntime(*setup.engine, setup.seed, self._corpus, self._network)
        runtime.clock.advance(now)
        node = SimulatedNode(f"{len(self._nodes):04d}", runtime)
        self._nodes.append(node)
        for front in self._fronts:
            front.add_engine(node.engine_id, now)
        if setup.report_seconds:  # engines report in turn, not all at the same moment
            share = len(self._nodes) / max(len(self._nodes), setup.num_engines)
            self._schedule(now + share * setup.report_seconds, _REPORT, partial(self._report_again, node))

    def _check_changes(self) -> None:
        alive = set(range(self._setup.num_engines))
        num_engines = self._setup.num_engines
        for change in sorted(self._setup.changes, key=lambda change: change.at_seconds):
            if change.kind == "lose" and alive <= {change.engine}:
                raise UsageError(f"the last engine is lost after {change.at_seconds:g} s; keep one")
            if change.engine not in alive if change.kind == "lose" else change.engine != num_engines:
                raise UsageError(f"engine {change.engine} cannot be the one to {change.kind}; {num_engines} were added")
            if change.kind == "lose":
                alive.remove(change.engine)
            else:
                alive.add(change.engine)
                num_engines += 1


def _empty_outcome(prompts: Sequence[Prompt]) -> ClusterOutcome:
    count = len(prompts)
    lengths = [sum(map(len, prompt)) for prompt in prompts]
    return ClusterOutcome([0.0] * count, [0.0] * count, [0] * count, [0] * count, lengths)
