"""Tests `stillroom bench neighbours` on a tiny shape."""

import os
from pathlib import Path

import pytest
import torch

from stillroom.errors import UsageError
from stillroom_bench.quality.neighbours import run_neighbours
from stillroom_bench.quality.quality_options import NeighboursOptions
from stillroom_bench.quality.runtime import Shape

TINY = Shape(97, 32, 48, 2, 4, 2, 8)


@pytest.mark.slow  # waits until the processes are noticed
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_run_measures_both_numbers_of_threads_alone_and_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    try:
        result = run_neighbours(NeighboursOptions(length=8, num_requests=2, repeat=1), tmp_path, shape=TINY)
    finally:
        torch.set_num_threads(before)
    arms = {f"{threads} threads/{where}" for threads in ("fixed", "adaptive") for where in ("alone", "beside")}
    assert set(result.samples.values) == arms
    assert result.ratio("adaptive threads/beside", "first_token_seconds") is not None
    assert result.samples.of("adaptive threads/beside", "noticed_seconds")[0] < 2
    assert [row["first token"] for row in result.tables["adaptive against fixed"]] == ["alone", "beside"]


def test_one_thread_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(UsageError, match="two threads"):
        run_neighbours(NeighboursOptions(), tmp_path, shape=TINY)
