"""Depth of Equation 16, compared with the smallest depth without gaps; timeline, compared with a ticking clock."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.kvcache.chunk_reuse.layer_preloading import Timeline, preload_depth, preload_schedule, timeline

ticks = st.integers(1, 9)


def even(num_layers: int, load: float, compute: float, depth: int, *, is_eager: bool = False) -> Timeline:
    return timeline([load] * num_layers, [compute] * num_layers, depth, is_eager=is_eager)


def gap_seconds(times: Timeline) -> float:
    """Seconds between layers in which nothing is computed."""
    return sum(start - end for start, end in zip(times.started[1:], times.finished, strict=False))


def test_figure_19() -> None:
    """Five layers that take twice as long to load as to compute: with three loaded ahead no layer waits."""
    assert preload_depth(5, prefill_seconds=5.0, load_seconds=10.0) == 3
    times = even(5, 2, 1, 3)
    assert times.loaded == (2.0, 4.0, 6.0, 8.0, 10.0)
    assert times.started == (6.0, 7.0, 8.0, 9.0, 10.0)
    assert gap_seconds(times) == 0
    assert gap_seconds(even(5, 2, 1, 2)) == 2


@pytest.mark.parametrize(
    ("num_layers", "prefill_s", "load_s", "depth"),
    [(1, 1.0, 9.0, 1), (30, 2.0, 2.0, 1), (30, 5.0, 1.0, 1), (30, 1.0, 0.0, 1), (30, 0.0, 1.0, 30), (5, 0.3, 0.4, 2)],
)
def test_depths(num_layers: int, prefill_s: float, load_s: float, depth: int) -> None:
    assert preload_depth(num_layers, prefill_s, load_s) == depth


@given(st.integers(1, 12), ticks, ticks)
def test_equation_16_gives_the_smallest_depth_without_gaps(num_layers: int, load: int, compute: int) -> None:
    depth = preload_depth(num_layers, num_layers * compute, num_layers * load)
    without_gaps = [
        other for other in range(1, num_layers + 1) if gap_seconds(even(num_layers, load, compute, other)) == 0
    ]
    assert depth == without_gaps[0]


@given(st.integers(1, 12), ticks, ticks, st.integers(1, 12))
def test_no_depth_makes_even_layers_finish_sooner(num_layers: int, load: int, compute: int, depth: int) -> None:
    eager = even(num_layers, load, compute, depth, is_eager=True).finished[-1]
    assert eager == max(num_layers * load + compute, load + num_layers * compute)
    assert even(num_layers, load, compute, depth).finished[-1] >= eager


@pytest.mark.parametrize(
    ("num_layers", "depth", "loads"),
    [(5, 3, [[0, 1, 2, 3], [4], [], [], []]), (3, 1, [[0, 1], [2], []]), (2, 9, [[0, 1], []]), (1, 1, [[0]])],
)
def test_algorithm_2_begins_each_load_once(num_layers: int, depth: int, loads: list[list[int]]) -> None:
    steps = preload_schedule(num_layers, depth)
    assert [list(step.loads) for step in steps] == loads
    assert [step.layer for step in steps] == list(range(num_layers))


@given(st.integers(1, 12), st.integers(1, 12))
def test_algorithm_2_as_written_loads_the_same(num_layers: int, depth: int) -> None:
    begun: list[int] = []
    for i, step in enumerate(preload_schedule(num_layers, depth), 1):
        wanted = [j for j in range(i, min(i + depth, num_layers) + 1) if j not in begun]
        assert [layer + 1 for layer in step.loads] == wanted
        begun += wanted
        assert step.layer + 1 in begun


def tick_by_tick(loads: list[int], computes: list[int], depth: int, *, is_eager: bool) -> Timeline:
    """A channel, a processor and a buffer of depth + 1 layers, checked once per tick."""
    loaded: list[float] = []
    started: list[float] = []
    finished: list[float] = []
    load_end: int | None = None
    for now in count():
        if len(started) > len(finished) and now == started[-1] + computes[len(finished)]:
            finished.append(now)
        if now == load_end:
            loaded.append(now)
            load_end = None
        if len(finished) == len(loads):
            break
        if load_end is None and len(loaded) < len(loads) and len(loaded) - len(finished) <= depth:
            load_end = now + loads[len(loaded)]
        is_open = is_eager or bool(started) or len(loaded) >= min(depth, len(loads))
        if is_open and len(started) == len(finished) < len(loaded):
            started.append(now)
    return Timeline(tuple(loaded), tuple(started), tuple(finished))


@given(st.lists(st.tuples(ticks, ticks), min_size=1, max_size=8), st.integers(1, 9), st.booleans())
def test_the_timeline_equals_a_ticking_clock(layers: list[tuple[int, int]], depth: int, is_eager: bool) -> None:
    loads, computes = [load for load, _ in layers], [compute for _, compute in layers]
    expected = tick_by_tick(loads, computes, depth, is_eager=is_eager)
    assert timeline(loads, computes, depth, is_eager=is_eager) == expected
