"""Decayed counts of accesses and exchanges of lists, against worked examples and brute force."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.errors import CorruptKnowledgeBaseError
from stillroom.retrieval.tiers.hot_lists import DriftRules, HotLists, ListHeat
from stillroom.retrieval.tiers.partition import best_lists


@given(
    queries=st.lists(st.sets(st.integers(0, 5), min_size=1), max_size=40),
    half_life=st.sampled_from([0.05, 0.5, 3.0, 100.0]),
)
def test_counts_decay_with_the_half_life(queries: list[set[int]], half_life: float) -> None:
    """The shortest half-lives also cover the rescaling of counts."""
    heat = ListHeat(6, half_life)
    for lists in queries:
        heat.record(np.array(sorted(lists)))
    expected = np.zeros(6)
    for age, lists in enumerate(reversed(queries)):
        expected[list(lists)] += 0.5 ** (age / half_life)
    np.testing.assert_allclose(heat.counts(), expected, rtol=1e-9, atol=1e-12)


def test_stored_counts_continue_to_decay() -> None:
    heat = ListHeat(2, 1.0, np.array([8.0, 0.0]))
    heat.record(np.array([1]))
    heat.record(np.array([1]))
    assert heat.counts().tolist() == [2.0, 1.5]


@given(counts=st.lists(st.floats(0, 9), min_size=1, max_size=7), num_bytes=st.integers(0, 40), data=st.data())
def test_the_best_lists_are_the_hottest_that_fit(counts: list[float], num_bytes: int, data: Any) -> None:
    sizes = np.array(data.draw(st.lists(st.integers(0, 12), min_size=len(counts), max_size=len(counts))))
    expected, left = [], num_bytes
    for number in sorted(range(len(counts)), key=lambda one: (-counts[one], one)):
        if sizes[number] <= left:
            expected.append(number)
            left -= int(sizes[number])
    assert sorted(best_lists(np.array(counts), sizes, num_bytes).tolist()) == sorted(expected)


class FakeTiers:
    """Fake of `TieredLists`: sizes of lists, and which are in RAM."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = np.array(sizes)
        self.file = type("File", (), {"sizes": self._sizes})
        self.is_in_ram = np.zeros(len(sizes), dtype=bool)
        self.device_of = np.full(len(sizes), -1)
        self.steps: list[int] = []
        self.most_bytes = 0
        self.is_damaged = False

    @property
    def ram_bytes(self) -> int:
        return int(self._sizes[self.is_in_ram].sum())

    def list_bytes(self) -> Any:
        return self._sizes

    def exchange(self, out: Any, into: Any) -> None:
        if self.is_damaged:
            raise CorruptKnowledgeBaseError("damaged")
        assert self.is_in_ram[list(out)].all() and not self.is_in_ram[list(into)].any()
        is_in_ram = self.is_in_ram.copy()
        is_in_ram[list(out)] = False
        is_in_ram[list(into)] = True
        self.is_in_ram = is_in_ram
        self.steps.append(len(into))
        self.most_bytes = max(self.most_bytes, self.ram_bytes)


def hot_lists(tiers: FakeTiers, num_bytes: int, rules: DriftRules, counts: Any = None) -> HotLists:
    return HotLists(tiers, num_bytes, rules, lambda job: job(), counts)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=4, max_size=12),
    num_bytes=st.integers(0, 60),
    topics=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_the_budget_holds_at_every_step_and_the_best_lists_win(
    sizes: list[int], num_bytes: int, topics: list[int], seed: int
) -> None:
    tiers = FakeTiers(sizes)
    hot = hot_lists(tiers, num_bytes, DriftRules(window=10, half_life=20, margin=0.0, num_lists=2))
    hot.start()
    rng = np.random.default_rng(seed)
    for topic in topics:
        for _ in range(50):
            hot.record(rng.permutation(len(sizes))[:2] if rng.random() < 0.3 else np.array([topic % len(sizes)]))
    hot.start(hit_rate=-1.0)
    assert tiers.most_bytes <= num_bytes and all(step <= 2 for step in tiers.steps)
    assert tiers.is_in_ram[best_lists(hot.counts(), np.array(sizes), num_bytes)].all()


def test_small_loss_of_hit_rate_starts_no_exchange() -> None:
    tiers = FakeTiers([1] * 10)
    hot = hot_lists(tiers, 5, DriftRules(window=10, half_life=1e9, margin=0.2), np.array([9.0] * 5 + [8.9] * 5))
    hot.start()
    assert np.flatnonzero(tiers.is_in_ram).tolist() == [0, 1, 2, 3, 4] and hot.num_exchanged == 0
    for number in itertools.islice(itertools.cycle([0, 1, 5, 6, 7]), 10):
        hot.record(np.array([number]))
    assert hot.hit_rate == pytest.approx(0.4) and (hot.num_hits, hot.num_probes) == (4, 10)
    assert hot.num_exchanged == 0, "0.4 is less than 0.2 below the best hit rate, about 0.5"
    for _ in range(10):
        hot.record(np.array([9]))
    assert hot.hit_rate == 0.0 and tiers.is_in_ram[9] and hot.num_exchanged > 0


def test_without_exchanging_the_first_choice_stays() -> None:
    tiers = FakeTiers([1, 1])
    hot = hot_lists(tiers, 1, DriftRules(window=2, half_life=1, is_exchanging=False))
    hot.start()
    assert [hot.record(np.array([1])) for _ in range(4)] == [False, True, False, True]
    assert tiers.is_in_ram.tolist() == [True, False] and hot.hit_rate == 0.0


def test_one_exchange_at_a_time_and_one_that_fails_is_not_the_last() -> None:
    tiers = FakeTiers([1, 1])
    jobs: list[Callable[[], None]] = []
    hot = HotLists(tiers, 1, DriftRules(window=1, half_life=1), jobs.append)  # type: ignore[arg-type]
    hot.record(np.array([1]))
    hot.record(np.array([1]))
    assert len(jobs) == 1
    tiers.is_damaged = True
    jobs.pop()()
    assert not tiers.is_in_ram.any()
    tiers.is_damaged = False
    hot.record(np.array([1]))
    jobs.pop()()
    assert tiers.is_in_ram.tolist() == [False, True]


def test_failing_exchange_is_logged_once_and_fails_no_search(caplog: pytest.LogCaptureFixture) -> None:
    tiers = FakeTiers([1, 1])
    hot = hot_lists(tiers, 1, DriftRules(window=1, half_life=1))
    tiers.list_bytes = lambda: (_ for _ in ()).throw(RuntimeError("out of memory"))  # type: ignore[method-assign]
    hot.record(np.array([1]))
    hot.record(np.array([1]))
    assert [record.exc_text is not None for record in caplog.records] == [True]
    assert "out of memory" in caplog.text and hot.num_probes == 2
    del tiers.list_bytes
    hot.record(np.array([1]))
    assert tiers.is_in_ram.tolist() == [False, True]


def test_worked_example_of_the_docs_page() -> None:
    """docs/tiered-index.md: four lists of 500 bytes, room for two, half-life and window of one and three questions."""
    tiers = FakeTiers([500] * 4)
    hot = hot_lists(tiers, 1000, DriftRules(window=3, half_life=1.0))
    hot.start()
    assert np.flatnonzero(tiers.is_in_ram).tolist() == [0, 1]
    seen = []
    for probed in ([0, 1], [0, 2], [2, 3]):
        hot.record(np.array(probed))
        seen.append(hot.counts().tolist())
    assert seen == [[1, 1, 0, 0], [1.5, 0.5, 1, 0], [0.75, 0.25, 1.5, 1]]
    assert hot.hit_rate == 0.5 and np.flatnonzero(tiers.is_in_ram).tolist() == [2, 3]
