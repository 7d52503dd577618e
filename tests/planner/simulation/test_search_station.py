"""Searches and steps on the same cores: worked examples, and against a simulation in small steps of time."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.planner.simulation.search_station import Query, Releases, SearchStation, SharedCores

BESIDE = SharedCores(search_slowdown=2.0, step_slowdown=1.5)


def each(seconds: Sequence[float]) -> Releases:
    """One after the other."""

    def releases(batch: Sequence[int]) -> NDArray[np.float64]:
        return np.cumsum([seconds[number] for number in batch])

    return releases


def test_a_step_and_a_search_slow_each_other_down_only_while_both_run() -> None:
    station = SearchStation([Query(1.0)], each([2.0]), cores=BESIDE)

    # alone until 1; then both: the search needs 4 s, and the step's other 2 s take 3
    assert station.beside(0.0, 3.0) == pytest.approx(4.0)
    # 1.5 of the search's 2 s are done
    assert station.idle_until_found() == pytest.approx(4.5)
    assert station.search_seconds.tolist() == pytest.approx([3.5])
    assert station.beside(5.0, 3.0) == pytest.approx(3.0)


def test_embedding_and_the_rest_of_a_search_share_the_cores_too_and_need_no_server() -> None:
    queries = [Query(0.0, 1.0, 0.5), Query(0.0, 1.0, 0.5), Query(0.0, after=0.25, is_searched=False)]
    station = SearchStation(queries, each([2.0, 1.0, 9.0]), cores=BESIDE)

    assert station.beside(0.0, 2.0) == pytest.approx(3.0)  # 1.5 s of the work of each are done
    station.idle_until(9.0)

    assert [number for _, number in station.found] == [2, 0, 1]
    assert [moment for moment, _ in station.found] == pytest.approx([0.5, 5.0, 6.0])


def test_cores_of_their_own_change_nothing() -> None:
    station = SearchStation([Query(0.5)], each([1.0]))

    assert station.beside(0.0, 7.0) == pytest.approx(7.0)
    assert station.found[0][0] == pytest.approx(1.5)


@pytest.mark.parametrize("due", [4e4, 3e6, 1e9])
def test_searches_and_steps_end_late_in_a_long_workload_too(due: float) -> None:
    """There the clock's next number is further than a tiny rest of a search, which once was waited for without end."""
    thirds = [1 / 3, 0.0023141926, 1 / 7]
    queries = [Query(due + number / 9, 0.001 / (3 + number), 0.0007) for number in range(3)]
    station = SearchStation(queries, each(thirds), cores=BESIDE)

    station.idle_until_found()
    station.beside(station.now, 0.1 / 3)
    station.idle_until(due + 9.0)
    assert len(station.found) == 3


def in_small_steps(
    queries: Sequence[tuple[int, int]], steps: Sequence[tuple[int, int]], cores: SharedCores
) -> tuple[list[float], list[float]]:
    """Return when each query is found and each step ends, by advancing a thousandth of a second at a time.

    Args:
        queries: due and seconds of each, due in order.
        steps: earliest begin and seconds of each, one after the other.
    """
    tick = 1e-3
    work, left = [float(seconds) for _, seconds in queries], [float(seconds) for _, seconds in steps]
    found, ended, now = [0.0] * len(queries), list[float](), 0.0
    while not all(found) or len(ended) < len(steps):
        searching = next((n for n, (due, _) in enumerate(queries) if not found[n] and due <= now + tick / 2), None)
        at = len(ended)
        is_computing = at < len(steps) and steps[at][0] <= now + tick / 2
        now += tick
        if is_computing:
            left[at] -= tick / (cores.step_slowdown if searching is not None else 1.0)
        if searching is not None:
            work[searching] -= tick / (cores.search_slowdown if is_computing else 1.0)
            if work[searching] <= tick / 2:
                found[searching] = now
        if is_computing and left[at] <= tick / 2:
            ended.append(now)
    return found, ended


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=4).map(sorted),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=3).map(sorted),
    st.sampled_from([SharedCores(), BESIDE, SharedCores(1.0, 3.0), SharedCores(4.0, 1.0)]),
)
def test_moments_equal_a_simulation_in_small_steps(
    queries: list[tuple[int, int]], steps: list[tuple[int, int]], cores: SharedCores
) -> None:
    station = SearchStation([Query(float(due)) for due, _ in queries], each([float(s) for _, s in queries]), 1, cores)
    now, ended = 0.0, []
    for begin, seconds in steps:
        now = max(now, float(begin))
        now += station.beside(now, float(seconds))
        ended.append(now)
    station.idle_until(1e3)
    found, expected = in_small_steps(queries, steps, cores)

    moments = sorted((number, moment) for moment, number in station.found)
    assert [moment for _, moment in moments] == pytest.approx(found, abs=0.05)
    assert ended == pytest.approx(expected, abs=0.05)
