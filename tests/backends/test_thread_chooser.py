"""The number of threads follows the CPU time of other processes: simulated machines, and what always holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.backends.thread_chooser import (
    QUIET_SECONDS,
    TRIAL_CREDIT,
    TRIAL_SHARE,
    WINDOW_SECONDS,
    ThreadChooser,
)
from stillroom.telemetry.cpu_times import CpuTimes

RETURN_SECONDS = TRIAL_CREDIT / TRIAL_SHARE + QUIET_SECONDS + 2.0
"""Longest return to all threads with a reading a second: after the debt, a window of both loads, and a quiet time."""


class Machine:
    """CPUs that share their time equally among the threads that want to run."""

    def __init__(self, num_cpus: int, most: int | None = None) -> None:
        self.num_cpus = num_cpus
        self.chooser = ThreadChooser(most or num_cpus, num_cpus, most or num_cpus)
        self.now = 0.0
        self.times = CpuTimes(total=0.0, idle=0.0, stolen=0.0, own=0.0)
        self.chooser.observe(self.now, self.times)

    def run(self, seconds: float, *, num_spinning: float, is_computing: bool = True) -> int:
        """Let time pass, then read; returns the number of threads."""
        own = self.chooser.count if is_computing else 0
        each = seconds * min(1.0, self.num_cpus / max(num_spinning + own, 1))
        before, total = self.times, seconds * self.num_cpus
        idle = max(0.0, total - each * (num_spinning + own))
        self.times = CpuTimes(before.total + total, before.idle + idle, 0.0, before.own + each * own)
        self.now += seconds
        return self.chooser.observe(self.now, self.times)


@pytest.mark.parametrize("is_computing", [True, False])
def test_two_spinning_processes_on_two_cores_leave_one_thread_at_once(is_computing: bool) -> None:
    machine = Machine(2)
    assert machine.run(WINDOW_SECONDS, num_spinning=2, is_computing=is_computing) == 1
    assert all(machine.run(1.0, num_spinning=2) == 1 for _ in range(100))


@pytest.mark.parametrize("num_cpus", [2, 3, 4, 8, 16, 64])
def test_threads_leave_the_cores_that_others_use(num_cpus: int) -> None:
    for num_spinning in range(1, num_cpus):
        machine = Machine(num_cpus)
        found = [machine.run(1.0, num_spinning=num_spinning) for _ in range(10)]
        assert found == [num_cpus - num_spinning] * 10


@pytest.mark.parametrize("num_cpus", [2, 3, 4, 8, 16, 64])
def test_one_thread_computes_when_others_take_all_cores(num_cpus: int) -> None:
    machine = Machine(num_cpus)
    assert [machine.run(1.0, num_spinning=num_cpus) for _ in range(20)] == [1] * 20


def test_one_slow_step_changes_nothing() -> None:
    """A step that takes long for another reason than other processes, such as a long prompt or a slow disk."""
    machine = Machine(2)
    machine.run(1.0, num_spinning=0)
    assert machine.run(30.0, num_spinning=0) == 2


def test_a_short_burst_changes_nothing() -> None:
    machine = Machine(2)
    assert machine.run(0.1, num_spinning=2) == 2
    assert machine.run(0.9, num_spinning=0) == 2


def test_all_threads_are_used_again_soon_after_the_others_have_gone() -> None:
    machine = Machine(2)
    machine.run(1.0, num_spinning=2)
    gone = machine.now
    while machine.run(WINDOW_SECONDS, num_spinning=0) == 1:
        assert machine.now - gone < QUIET_SECONDS + WINDOW_SECONDS


def test_others_that_come_and_go_are_tried_rarely() -> None:
    """Runs at the full number, while others are there, take at most their share of the time."""
    machine = Machine(2)
    lost = 0.0
    for number in range(20_000):
        before = machine.chooser.count
        is_there = number % 8 >= 5
        after = machine.run(WINDOW_SECONDS, num_spinning=2 if is_there else 0)
        lost += WINDOW_SECONDS if after < before else 0.0
    assert 0 < lost <= TRIAL_CREDIT + TRIAL_SHARE * machine.now + WINDOW_SECONDS


@given(
    most=st.integers(1, 8),
    unused=st.integers(0, 8),
    times=st.lists(st.tuples(st.floats(0.001, 20.0), st.floats(0.0, 20.0)), max_size=60),
)
def test_the_number_stays_allowed_and_returns_in_bounded_time(
    most: int, unused: int, times: list[tuple[float, float]]
) -> None:
    machine = Machine(most + unused, most)
    for seconds, num_spinning in times:
        assert 1 <= machine.run(seconds, num_spinning=num_spinning) <= most
    gone = machine.now
    while machine.chooser.count < most:
        machine.run(1.0, num_spinning=0)
        assert machine.now - gone <= RETURN_SECONDS


@given(st.lists(st.tuples(st.floats(0.001, 3.0), st.booleans()), max_size=200))
def test_time_lost_by_trials_is_bounded(phases: list[tuple[float, bool]]) -> None:
    machine = Machine(2)
    lost = 0.0
    for seconds, is_beside in phases:
        began, before = machine.now - _since_reading(machine), machine.chooser.count
        if machine.run(seconds, num_spinning=2 * is_beside) < before:
            lost += machine.now - began
        assert lost <= TRIAL_CREDIT + TRIAL_SHARE * machine.now + 3.0 + WINDOW_SECONDS


def _since_reading(machine: Machine) -> float:
    """Seconds since the reading that the next window begins with."""
    assert machine.chooser._last is not None
    return machine.now - machine.chooser._last[0]
