"""Interpolation of the cost profile; load-or-recompute, compared with trying every cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.ids import BlockId
from stillroom.core.kv import Link, NodeKey, Tier
from stillroom.kvcache.lease_admission import plan_reuse
from stillroom.kvcache.tree.cost_model import CostProfile, linear_profile
from stillroom.kvcache.tree.node import Node, WindowedCount

PROFILE = CostProfile((0, 100), (10, 20, 40), ((1.0, 2.0, 4.0), (3.0, 6.0, 12.0)))


@pytest.mark.parametrize(
    ("cached", "new", "seconds"),
    [(0, 10, 1.0), (100, 20, 6.0), (50, 10, 2.0), (0, 30, 3.0), (50, 15, 3.0), (0, 80, 8.0), (200, 10, 5.0), (0, 0, 0)],
)
def test_times_between_grid_points_are_bilinear(cached: int, new: int, seconds: float) -> None:
    assert PROFILE.prefill_seconds(cached, new) == pytest.approx(seconds)


@given(st.integers(0, 9000), st.integers(1, 9000))
def test_a_time_is_never_negative(cached: int, new: int) -> None:
    assert PROFILE.prefill_seconds(cached, new) > 0


def test_loading_takes_its_latency_and_its_bytes() -> None:
    profile = linear_profile(0.0, 1e-3, 0.0, {Tier.DISK: Link(0.5, 1000)})
    assert profile.load_seconds(Tier.DISK, 2000) == 2.5
    assert profile.load_seconds(Tier.HOST, 2000) == 0.0


def node(tier: Tier, num_tokens: int) -> Node:
    one = Node(
        NodeKey(b""),
        None,
        content=b"",
        first_position=0,
        num_tokens=num_tokens,
        chunk_id=None,
        frequency=WindowedCount(1.0, 0.0),
        cost_alone=1.0,
        cost_here=1.0,
    )
    one.tiers = (tier,)
    if tier is Tier.DEVICE:
        one.block_ids = [BlockId(0)]
    return one


@given(
    st.lists(st.tuples(st.sampled_from(Tier), st.integers(1, 300)), max_size=6),
    st.integers(1, 300),
    st.floats(1e-6, 1e-1),
    st.floats(1e-6, 1e-1),
)
def test_plan_reuse_takes_the_fastest_cut(path: list[tuple[Tier, int]], rest: int, host: float, disk: float) -> None:
    path.sort()  # a parent is never in a slower tier
    nodes = [node(tier, num_tokens) for tier, num_tokens in path]
    num_tokens = rest + sum(one.num_tokens for one in nodes)
    links = {Tier.HOST: Link(host, 1e6), Tier.DISK: Link(disk, 1e5)}
    profile = linear_profile(1e-3, 1e-4, 1e-7, links)
    num_nodes = plan_reuse(nodes, num_tokens, profile, 10)

    def seconds(cut: int) -> float:
        cached = sum(one.num_tokens for one in nodes[:cut])
        loads = sum(
            profile.load_seconds(tier, one.num_tokens * 10)
            for one, (tier, _) in zip(nodes[:cut], path, strict=False)
            if tier is not Tier.DEVICE
        )
        return loads + profile.prefill_seconds(cached, num_tokens - cached)

    allowed = range(sum(tier is Tier.DEVICE for tier, _ in path), len(nodes) + 1)
    assert num_nodes in allowed
    assert seconds(num_nodes) <= min(map(seconds, allowed)) * (1 + 1e-9)
    assert plan_reuse(nodes, num_tokens, profile, 10, always_loads=True) == len(nodes)


def test_windowed_count_decays() -> None:
    count = WindowedCount(10.0, 0.0)
    for at in (0.0, 1.0, 2.0):
        count.add(at)
    assert count.value(9.0) == 3.0
    assert count.value(15.0) == pytest.approx(1.5)
    assert count.value(20.0) == 0.0
    count.add(100.0)
    assert count.value(100.0) == 1.0
