"""Thread pools of parallel kernels end with the thread that started them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stillroom.ops.thread_pools import run_in_short_lived_thread
from tests.server.fakes import until


def num_system_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


needs_teams = pytest.mark.skipif(
    torch.get_num_threads() < 2 or not Path("/proc/self/task").is_dir(), reason="no teams of threads to count"
)


@needs_teams
def test_short_lived_thread_leaves_no_thread_pool() -> None:
    def multiply() -> float:
        return float(
            (torch.ones(600, 600, dtype=torch.float64) @ torch.ones(600, 600, dtype=torch.float64)).add(1).sum()
        )

    run_in_short_lived_thread(multiply)  # starts the threads that stay
    before = num_system_threads()
    assert run_in_short_lived_thread(multiply) == 600 * 600 * 601
    until(lambda: num_system_threads() <= before)
    with pytest.raises(ZeroDivisionError):
        run_in_short_lived_thread(lambda: 1 // 0)


@pytest.mark.slow  # loads models in another process
@pytest.mark.skipif(torch.get_num_threads() > 1, reason="the tests that need two threads run by themselves")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="no second core")
def test_tests_that_count_threads_pass_with_two() -> None:
    """`make test` gives each worker one thread, with which there are no thread pools to count."""
    tests = Path(__file__).parents[1]
    files = [
        tests / "ops" / "test_thread_pools.py",
        tests / "retrieval" / "test_thread_pools.py",
        tests / "rag" / "test_threads.py",
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "(team or leaves_no_thread_pool) and not with_two",
        *map(str, files),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, cwd=tests.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout
