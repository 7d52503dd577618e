"""The queue before the index, by hand and against a slow twin that goes moment by moment."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.planner.search_queue import released


class Each:
    """Queries of a batch one after the other."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds

    def __call__(self, batch: Sequence[int]) -> NDArray[np.float64]:
        return np.cumsum([self.seconds[number] for number in batch])


def test_one_at_a_time() -> None:
    assert released([0.0, 1.0, 10.0], Each([3.0, 2.0, 1.0])) == [3.0, 5.0, 11.0]


def test_those_who_wait_are_searched_together_and_released_by_themselves() -> None:
    assert released([0.0, 1.0, 2.0], Each([3.0, 2.0, 1.0]), max_batch=2) == [3.0, 5.0, 6.0]
    assert released([2.0, 0.0], Each([1.0, 5.0])) == [6.0, 5.0], "in the order of time"


def test_who_finds_the_index_idle_is_searched_for_alone() -> None:
    seen = []

    def at_once(batch: Sequence[int]) -> NDArray[np.float64]:
        seen.append(list(batch))
        return np.full(len(batch), 2.0)

    assert released([0.0, 0.0, 1.0, 9.0], at_once, max_batch=8) == [2.0, 4.0, 4.0, 11.0]
    assert seen == [[0], [1, 2], [3]]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_against_moment_by_moment(queries: list[tuple[int, int]], max_batch: int) -> None:
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
    assert released(ready, Each(takes), max_batch) == pytest.approx([expected[at] for at in range(len(queries))])
