"""Tests the simulated cluster against single engines, hand-computed times, and what must not depend on anything."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from stillroom.cluster.routers import BoundedHash, CostRouter, LeastLoaded, PrefixThreshold, RoundRobin, Router
from stillroom.config.settings import PrepareConfig, ReuseConfig
from stillroom.core.ids import ChunkId
from stillroom.core.kv import Link, Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.errors import UsageError
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.planner.simulation.arrivals import arrivals
from stillroom.planner.simulation.cluster_simulation import (
    ClusterOutcome,
    ClusterSetup,
    ClusterSimulation,
    NodeChange,
)
from stillroom.planner.simulation.simulated_corpus import PreparingPrompt, SimulatedCorpus
from stillroom.planner.simulation.simulated_runtime import HardwareModel, SimulatedRuntime
from stillroom.planner.simulation.stepped_engine import EnginePolicy, Prompt

COSTS = linear_profile(1.0, 0.01, 0.0, {Tier.HOST: Link(0.0, 1000.0), Tier.DISK: Link(0.0, 400.0)})
HARDWARE = HardwareModel(
    costs=COSTS, bytes_per_token=1, num_layers=2, device_bytes=960, max_model_len=400, max_tokens=3
)
EXACT = EnginePolicy(reuse=ReuseConfig(policy="lru", host_bytes=500, disk_bytes=0))
ON_DISK = EnginePolicy(reuse=ReuseConfig(host_bytes=300, disk_bytes=100_000), scheduling="cache_first")
ANYWHERE = EnginePolicy(reuse=ReuseConfig(mode="anywhere", host_bytes=500, disk_bytes=0, audit_share=0.0))
PREPARED = EnginePolicy(
    reuse=ReuseConfig(mode="prepared", host_bytes=2_000, disk_bytes=0, audit_share=0.0),
    prepare=PrepareConfig(bits=16, host_bytes=2_000),
)
OFF = EnginePolicy(reuse=ReuseConfig(mode="off"))
SYSTEM, QUESTION = (1,) * 16, (2,) * 8
FIRST = 1 + 1.2 + 0.016
"""Seconds to the first token of two chunks on a new engine: 1 s, 0.01 s a token, and copying the system prompt to the
host."""
CHUNKS = [tuple(range(100 * number, 100 * number + 48)) for number in range(1, 13)]


def corpus() -> SimulatedCorpus:
    """One document for each chunk."""
    return SimulatedCorpus([[Segment(SegmentKind.CHUNK, tokens, ChunkId(1 + at))] for at, tokens in enumerate(CHUNKS)])


def prompt(*chunks: int) -> Prompt:
    return (SYSTEM, *(CHUNKS[chunk] for chunk in chunks), QUESTION)


def documents() -> list[PreparingPrompt]:
    """What to prepare: each chunk behind the system prompt."""
    found = []
    for at, tokens in enumerate(CHUNKS):
        chunk = Segment(SegmentKind.CHUNK, tokens, ChunkId(1 + at))
        system, question = Segment(SegmentKind.SYSTEM, SYSTEM), Segment(SegmentKind.QUESTION, (3,))
        found.append(PreparingPrompt(SegmentedPrompt((system, chunk, question)), frozenset({ChunkId(1 + at)})))
    return found


def traffic(count: int, per_second: float, seed: int = 0) -> tuple[list[Prompt], list[float]]:
    rng = np.random.default_rng(seed)
    shares = 1.0 / np.arange(1, len(CHUNKS) + 1)
    prompts = [
        prompt(*rng.choice(len(CHUNKS), size=3, replace=False, p=shares / shares.sum()).tolist()) for _ in range(count)
    ]
    return prompts, arrivals(count, per_second, [seed])


def run(setup: ClusterSetup, router: Router, prompts: Sequence[Prompt], dues: Sequence[float]) -> ClusterOutcome:
    return ClusterSimulation(setup, router, corpus()).run(prompts, dues)


def cost_router(setup: ClusterSetup) -> CostRouter:
    return CostRouter(setup.costs)


@pytest.mark.parametrize("policy", [OFF, EXACT, ON_DISK, ANYWHERE], ids=["off", "exact", "disk", "anywhere"])
@pytest.mark.parametrize("report_seconds", [0.0, 0.7])
def test_one_engine_equals_the_simulation_of_one_engine(policy: EnginePolicy, report_seconds: float) -> None:
    prompts, dues = traffic(40, 0.5)
    setup = ClusterSetup(hardware=HARDWARE, policy=policy, num_engines=1, num_fronts=2, report_seconds=report_seconds)
    found = run(setup, cost_router(setup), prompts, dues)
    alone = SimulatedRuntime(HARDWARE, policy, documents=corpus()).ask(prompts, dues)

    assert found.seconds == alone.seconds
    assert found.response_seconds == alone.response_seconds
    assert sum(found.reused) == alone.num_kept_tokens
    assert (policy is OFF) == (alone.num_kept_tokens == 0)


def test_engines_under_round_robin_equal_engines_simulated_apart() -> None:
    """The slow twin: each engine alone, with its own share of the requests."""
    prompts, dues = traffic(40, 1.5)
    setup = ClusterSetup(hardware=HARDWARE, policy=ANYWHERE, num_engines=4)
    found = run(setup, RoundRobin(), prompts, dues)

    for engine in range(4):
        alone = SimulatedRuntime(HARDWARE, ANYWHERE, documents=corpus()).ask(prompts[engine::4], dues[engine::4])
        assert found.seconds[engine::4] == alone.seconds
        assert found.response_seconds[engine::4] == alone.response_seconds


def test_one_prepared_engine_equals_the_simulation_of_one_engine() -> None:
    prompts, dues = traffic(40, 0.5)
    setup = ClusterSetup(hardware=HARDWARE, policy=PREPARED, num_engines=1)
    found = ClusterSimulation(setup, cost_router(setup), corpus(), documents()).run(prompts, dues)
    alone = SimulatedRuntime(HARDWARE, PREPARED, documents=corpus())
    assert alone.prepare(documents()) == len(CHUNKS)

    assert found.seconds == pytest.approx(alone.ask(prompts, dues).seconds)


@pytest.mark.parametrize("num_copies", [1, 2, 4])
def test_prepared_chunk_is_found_by_its_first_question_where_it_was_prepared(num_copies: int) -> None:
    """A question about one chunk, on idle engines: the holder computes the question only, without repair."""
    setup = ClusterSetup(hardware=HARDWARE, policy=PREPARED, num_engines=4, num_prepared_copies=num_copies)
    prompts, dues = [prompt(chunk) for chunk in range(len(CHUNKS))], [10.0 * at for at in range(len(CHUNKS))]

    def run_under(router: Router) -> ClusterOutcome:
        return ClusterSimulation(setup, router, corpus(), documents()).run(prompts, dues)

    assert run_under(cost_router(setup)).reused == [16 + 48] * len(CHUNKS)
    by_turns = run_under(RoundRobin()).reused
    assert by_turns.count(16 + 48) == len(CHUNKS) if num_copies == 4 else by_turns.count(16 + 48) < len(CHUNKS)
    assert all(one in (0, 16, 16 + 48) for one in by_turns)


def test_router_does_not_expect_to_place_what_a_prompt_computed() -> None:
    """With `prepared` the second prompt, whose chunks another prompt has computed in another order, may go anywhere."""
    setup = ClusterSetup(hardware=HARDWARE, policy=PREPARED, num_engines=2)
    found = run(setup, cost_router(setup), [prompt(0, 1), prompt(1, 0)], [0.0, 20.0])

    assert found.reused == [0, 16], "the system prompt only"


def test_copies_count_the_engines_that_hold_a_piece() -> None:
    setup = ClusterSetup(hardware=HARDWARE, policy=EXACT, num_engines=2)
    found = run(setup, RoundRobin(), [prompt(0, 1), prompt(0, 2)], [0.0, 20.0])

    assert found.copies == pytest.approx(6 / 4), "two engines have the system prompt and chunk 0"


def test_run_depends_on_its_arguments_alone() -> None:
    prompts, dues = traffic(30, 1.5)
    setup = ClusterSetup(hardware=HARDWARE, policy=ANYWHERE, num_engines=3, num_fronts=2, report_seconds=0.5)

    assert run(setup, cost_router(setup), prompts, dues) == run(setup, cost_router(setup), prompts, dues)


@pytest.mark.parametrize(("second", "engine"), [((0, 1), 0), ((2, 3), 1)])
def test_cost_router_sends_a_prompt_to_the_engine_that_holds_it_or_else_to_the_idle_one(
    second: tuple[int, ...], engine: int
) -> None:
    """The second request comes while the first engine is still busy with the first one's answer."""
    setup = ClusterSetup(hardware=replace(HARDWARE, max_tokens=2), policy=EXACT, num_engines=2)
    found = run(setup, CostRouter(setup.costs), [prompt(0, 1), prompt(*second)], [0.0, 2.3])
    first = found.engine[0]

    assert found.seconds[0] == pytest.approx(FIRST)
    assert found.engine[1] == (first if engine == 0 else 1 - first)


def test_front_learns_from_reports_what_another_front_sent() -> None:
    """The second prompt begins like the first, which another front sent, and alone it would go to another engine."""
    setup = ClusterSetup(hardware=replace(HARDWARE, max_tokens=1), policy=EXACT, num_engines=8, num_fronts=2)
    router = CostRouter(setup.costs, load_factor=math.inf)
    homes = {chunk: run(setup, router, [prompt(0, chunk)], [0.0]).engine[0] for chunk in range(1, len(CHUNKS))}
    other = next(chunk for chunk in homes if homes[chunk] != homes[1])
    prompts, dues = [prompt(0, 1), prompt(0, other)], [0.0, 4.0]

    assert run(setup, router, prompts, dues).engine == [homes[1], homes[1]]
    assert run(replace(setup, report_seconds=1.0), router, prompts, dues).engine == [homes[1], homes[1]]
    assert run(replace(setup, report_seconds=9.9), router, prompts, [0.0, 0.1]).engine == [homes[1], homes[other]]


def test_lost_engine_s_requests_are_answered_by_others_from_the_beginning() -> None:
    """Killed at 1.0 s, before the first token at 2.2 s; noticed at 1.5 s."""
    setup = ClusterSetup(
        hardware=replace(HARDWARE, max_tokens=1),
        policy=EXACT,
        num_engines=2,
        changes=(NodeChange(1.0, "lose", 0),),
        detection_seconds=0.5,
    )
    found = run(setup, RoundRobin(), [prompt(0, 1), prompt(0, 1), prompt(2, 3)], [0.0, 0.1, 1.2])

    assert found.engine == [1, 1, 1]
    assert found.num_rerouted == 2, "also the one that was sent to it before that was noticed"
    assert found.seconds[1] == pytest.approx(FIRST)
    assert found.seconds[0] == pytest.approx(0.1 + 2.2 + 1 + 0.08 + 1.2, abs=0.2), "with the third, behind the second"


def test_loss_after_the_first_token_keeps_its_time() -> None:
    setup = ClusterSetup(
        hardware=replace(HARDWARE, max_tokens=3),
        policy=EXACT,
        num_engines=2,
        changes=(NodeChange(2.5, "lose", 0),),
        detection_seconds=0.5,
    )
    found = run(setup, RoundRobin(), [prompt(0, 1)], [0.0])

    assert found.seconds == pytest.approx([FIRST])
    assert found.response_seconds == pytest.approx([3.0 + FIRST + 2.02]), "the answer begins again on the other engine"


def test_added_engine_takes_requests_and_holds_nothing() -> None:
    prompts, dues = traffic(80, 2.0)
    setup = ClusterSetup(hardware=HARDWARE, policy=EXACT, num_engines=1)
    alone = run(setup, cost_router(setup), prompts, dues)
    grown = run(replace(setup, changes=(NodeChange(10.0, "add", 1),)), cost_router(setup), prompts, dues)
    served = [due for due, engine in zip(dues, grown.engine, strict=True) if engine == 1]

    assert min(served) >= 10.0 and len(served) > 10
    assert np.mean(grown.seconds) < np.mean(alone.seconds)


@pytest.mark.parametrize("router", [RoundRobin(), LeastLoaded(), PrefixThreshold(), BoundedHash()])
def test_every_request_is_answered_once_whatever_is_lost(router: Router) -> None:
    prompts, dues = traffic(40, 2.0)
    changes = (NodeChange(5.0, "lose", 1), NodeChange(9.0, "add", 3), NodeChange(14.0, "lose", 0))
    setup = ClusterSetup(hardware=HARDWARE, policy=ANYWHERE, num_engines=3, num_fronts=2, changes=changes)
    found = run(setup, router, prompts, dues)

    assert all(0 < first <= last for first, last in zip(found.seconds, found.response_seconds, strict=True))
    assert not {one for due, one in zip(dues, found.engine, strict=True) if due > 14.1} & {0, 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((NodeChange(1.0, "lose", 0), NodeChange(2.0, "lose", 1)), "the last engine is lost after 2 s"),
        ((NodeChange(1.0, "lose", 2),), "engine 2 cannot be the one to lose"),
        ((NodeChange(1.0, "add", 5),), "engine 5 cannot be the one to add"),
    ],
)
def test_impossible_changes_are_refused(changes: tuple[NodeChange, ...], message: str) -> None:
    setup = ClusterSetup(hardware=HARDWARE, policy=EXACT, num_engines=2, changes=changes)
    with pytest.raises(UsageError, match=message):
        ClusterSimulation(setup, RoundRobin())


def test_reports_slower_than_the_limit_of_silence_are_refused() -> None:
    setup = ClusterSetup(hardware=HARDWARE, policy=EXACT, num_engines=2, report_seconds=30.0)
    with pytest.raises(UsageError, match="report_seconds=30 must be below 10"):
        ClusterSimulation(setup, RoundRobin())
