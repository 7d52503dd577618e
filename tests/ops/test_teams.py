"""Threads for parallel kernels end with the thread that they were for."""

from pathlib import Path

import pytest
import torch

from stillroom.ops.thread_pools import in_a_thread_that_ends
from tests.server.fakes import until


def num_system_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


needs_teams = pytest.mark.skipif(
    torch.get_num_threads() < 2 or not Path("/proc/self/task").is_dir(), reason="no teams of threads to count"
)


@needs_teams
def test_what_computes_in_a_thread_that_ends_leaves_no_team() -> None:
    def multiply() -> float:
        return float(
            (torch.ones(600, 600, dtype=torch.float64) @ torch.ones(600, 600, dtype=torch.float64)).add(1).sum()
        )

    in_a_thread_that_ends(multiply)  # what is made once and for all
    before = num_system_threads()
    assert in_a_thread_that_ends(multiply) == 600 * 600 * 601
    until(lambda: num_system_threads() <= before)
    with pytest.raises(ZeroDivisionError):
        in_a_thread_that_ends(lambda: 1 // 0)
