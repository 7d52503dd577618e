"""Tests the shared link against a slow twin, and the network tier against hand-computed times."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.cluster.routers import CostRouter, RoundRobin
from stillroom.core.kv import Link
from stillroom.planner.simulation.cluster_simulation import (
    ClusterOutcome,
    ClusterSetup,
    ClusterSimulation,
    NetworkModel,
)
from stillroom.planner.simulation.network_tier import SharedLink
from stillroom.planner.simulation.stepped_engine import EnginePolicy
from tests.planner.simulation.test_cluster_simulation import ANYWHERE, EXACT, FIRST, HARDWARE, corpus, prompt, traffic

FAST = NetworkModel(Link(0.0, 1000.0), 1000.0)
ONE_TOKEN = replace(HARDWARE, max_tokens=1)


def setup(network: NetworkModel | None, policy: EnginePolicy = EXACT, num_engines: int = 2) -> ClusterSetup:
    without_host = replace(policy, reuse=replace(policy.reuse, host_bytes=0))
    return ClusterSetup(hardware=ONE_TOKEN, policy=without_host, num_engines=num_engines, network=network)


def run(one: ClusterSetup, chunks: Sequence[tuple[int, ...]], dues: list[float]) -> ClusterOutcome:
    return ClusterSimulation(one, RoundRobin(), corpus()).run([prompt(*some) for some in chunks], dues)


def test_transfers_of_the_same_time_share_the_link() -> None:
    link = SharedLink(10.0, 8.0)

    assert link.reserve(0.0, 16.0) == 2.0, "at the rate of its port"
    assert link.reserve(0.0, 20.0) == 2.0 + (20 - 2 * 2) / 8, "2 a second until the first is done"
    assert link.reserve(1.0, 0.0) == 1.0
    assert link.reserve(3.0, 2.0) == 4.0
    assert link.reserve(9.0, 8.0) == 10.0


@settings(max_examples=40)
@given(
    transfers=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=12),
    port=st.sampled_from([1.0, 2.0, 4.0]),
)
def test_link_equals_a_slow_twin_that_fills_time_slots(transfers: list[tuple[int, int]], port: float) -> None:
    """The twin has slots of 1/8 s; a transfer ends in the same slot."""
    link, slot = SharedLink(4.0, port), 0.125
    taken = np.zeros(4000)
    for start, num_bytes in transfers:
        end = link.reserve(float(start), float(num_bytes))
        at, left = int(start / slot), float(num_bytes)
        while left > 1e-9:
            moved = min(left, port * slot, 4.0 * slot - taken[at])
            taken[at] += moved
            left -= moved
            at += 1
        assert end == pytest.approx(at * slot, abs=slot + 1e-6)
        assert link.rate_at((start + end) / 2) <= 4.0 + 1e-9


def test_engine_loads_what_another_computed_and_stored() -> None:
    """The first engine stores 112 tokens while it is idle; the second loads them and computes the question's 8."""
    found = run(setup(FAST), [(0, 1), (0, 1)], [0.0, 10.0])
    without = run(setup(None), [(0, 1), (0, 1)], [0.0, 10.0])

    assert found.seconds == pytest.approx([FIRST - 0.016, 1 + 0.08 + 0.112])
    assert without.seconds == pytest.approx([FIRST - 0.016] * 2)
    assert (found.num_stored_bytes, found.num_loaded_bytes) == (112, 112)
    assert found.reused == [0, 112]


def test_slow_tier_is_not_used() -> None:
    found = run(setup(NetworkModel(Link(0.0, 20.0), 20.0)), [(0, 1), (0, 1)], [0.0, 100.0])

    assert found.seconds[1] == pytest.approx(FIRST - 0.016)
    assert found.num_loaded_bytes == 0


def test_engines_that_load_at_the_same_time_share_the_bandwidth_of_the_tier() -> None:
    dues = [0.0, 10.0, 10.0, 10.0]
    chunks = [(0, 1)] * 4
    wide = run(setup(replace(FAST, bytes_per_second=3000.0), num_engines=4), chunks, dues)
    narrow = run(setup(FAST, num_engines=4), chunks, dues)

    assert wide.seconds[1:] == pytest.approx([1.08 + 0.112] * 3)
    assert narrow.seconds[1:] == pytest.approx([1.08 + 0.112, 1.08 + 0.224, 1.08 + 0.336])


def test_chunk_is_placed_from_the_tier_at_another_position() -> None:
    without_query_pass = replace(ANYWHERE, reuse=replace(ANYWHERE.reuse, token_selector="first"))
    found = run(setup(FAST, without_query_pass), [(0, 1), (2, 1)], [0.0, 10.0])

    assert found.reused[1] == 16 + 40, "the system prompt, and chunk 1 without the tokens that are recomputed"
    assert found.num_loaded_bytes == 16 + 48


def test_cost_router_counts_what_every_engine_can_load() -> None:
    """Busy with an answer, the holder loses the request to an idle engine that loads the KV."""
    one = setup(FAST)
    prompts = [prompt(0, 1), prompt(0, 1), prompt(0, 1)]
    router = CostRouter(one.costs, load_factor=4.0)
    found = ClusterSimulation(one, router, corpus()).run(prompts, [0.0, 10.0, 10.01])

    assert found.engine[1] == found.engine[0]
    assert found.engine[2] != found.engine[1]


@pytest.mark.parametrize("policy", [EXACT, ANYWHERE], ids=["exact", "anywhere"])
def test_tier_makes_no_request_disappear_and_runs_are_repeatable(policy: EnginePolicy) -> None:
    prompts, dues = traffic(60, 2.0)
    one = setup(NetworkModel(Link(0.001, 400.0), 800.0), policy, num_engines=3)
    found, again = (ClusterSimulation(one, CostRouter(one.costs), corpus()).run(prompts, dues) for _ in range(2))

    assert found == again
    assert all(0 < first <= last for first, last in zip(found.seconds, found.response_seconds, strict=True))
    assert found.num_loaded_bytes > 0
