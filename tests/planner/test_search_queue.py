"""The queue of the index, by worked examples and against a step-by-step simulation."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.planner.simulation.search_station import Query, Releases, SearchStation


class Each:
    """A batch takes its queries one after the other."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds

    def __call__(self, batch: Sequence[int]) -> NDArray[np.float64]:
        return np.cumsum([self.seconds[number] for number in batch])


def search_completions(ready: Sequence[float], releases: Releases, max_batch: int = 1) -> list[float]:
    """Return when each query has its result, if no model computes."""
    station = SearchStation([Query(due) for due in ready], releases, max_batch)
    found = [0.0] * len(ready)
    for _ in ready:
        moment, number = (station.idle_until_found(), station.found.popleft()[1])
        found[number] = moment
    return found


def test_queries_are_searched_one_at_a_time() -> None:
    assert search_completions([0.0, 1.0, 10.0], Each([3.0, 2.0, 1.0])) == pytest.approx([3.0, 5.0, 11.0])


def test_waiting_queries_are_batched_and_released_separately() -> None:
    assert search_completions([0.0, 1.0, 2.0], Each([3.0, 2.0, 1.0]), max_batch=2) == pytest.approx([3.0, 5.0, 6.0])
    assert search_completions([2.0, 0.0], Each([1.0, 5.0])) == pytest.approx([6.0, 5.0]), "in order of arrival"


def test_query_that_finds_the_server_idle_is_searched_alone() -> None:
    seen = []

    def at_once(batch: Sequence[int]) -> NDArray[np.float64]:
        seen.append(list(batch))
        return np.full(len(batch), 2.0)

    assert search_completions([0.0, 0.0, 1.0, 9.0], at_once, max_batch=8) == pytest.approx([2.0, 4.0, 4.0, 11.0])
    assert seen == [[0], [1, 2], [3]]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_completions_equal_a_step_by_step_simulation(queries: list[tuple[int, int]], max_batch: int) -> None:
    ready, takes = [float(at) for at, _ in queries], [float(seconds) for _, seconds in queries]
    waiting = sorted(range(len(queries)), key=lambda number: ready[number])
    expected, busy_until, now = {}, 0, 0
    while waiting:
        if now >= busy_until and ready[waiting[0]] <= now:
            batch = [number for number in waiting if ready[number] <= now][:max_batch]
            at = now
            for number in batch:
                at += int(takes[number])
                expected[number] = float(at)
                waiting.remove(number)
            busy_until = at
        now += 1
    assert search_completions(ready, Each(takes), max_batch) == pytest.approx(
        [expected[at] for at in range(len(queries))]
    )
