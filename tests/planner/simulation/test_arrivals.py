"""Arrival times from traces and from a Poisson process."""

from pathlib import Path

import numpy as np
import pytest

from stillroom.errors import UsageError
from stillroom.planner.simulation.arrivals import arrivals, arrivals_of


def azure(folder: Path, *seconds: str) -> Path:
    path = folder / "azure.csv"
    rows = [f"2023-11-16 18:15:{second},374,44" for second in seconds]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def mooncake(folder: Path, *milliseconds: int) -> Path:
    path = folder / "mooncake.jsonl"
    path.write_text("".join(f'{{"timestamp": {one}, "input_length": 5}}\n' for one in milliseconds))
    return path


def test_without_a_trace_arrivals_are_poisson() -> None:
    assert arrivals_of(None)(20, 2.0, [1, 2]) == arrivals(20, 2.0, [1, 2])


def test_trace_keeps_its_bursts_at_another_rate(tmp_path: Path) -> None:
    draw = arrivals_of(azure(tmp_path, "01.0000000", "01.5000000", "05.2500000", "09.0000000"))
    assert draw(3, 0.75, [0]) == pytest.approx([0.0, 0.25, 2.125]), "three in four seconds, at twice their speed"
    bursts = arrivals_of(mooncake(tmp_path, 0, 0, 0, 3000, 3000))
    assert bursts(4, 0.5, [0]) == pytest.approx([0.0, 0.0, 0.0, 8.0])


def test_seed_chooses_the_stretch_of_the_trace(tmp_path: Path) -> None:
    moments = np.cumsum(np.arange(1, 60))
    draw = arrivals_of(mooncake(tmp_path, *moments.tolist()))
    assert draw(10, 1.0, [1]) == draw(10, 1.0, [1]) != draw(10, 1.0, [2])
    for seed in range(20):
        gaps = np.diff(draw(10, 1.0, [seed]))
        assert (np.diff(gaps) > 0).all(), "the order of the trace is kept"
        assert gaps.sum() < 10.0


def test_files_that_are_not_traces_are_refused(tmp_path: Path) -> None:
    for text in ("TIMESTAMP,ContextTokens\nyesterday,3\n", "when,ContextTokens\n2023-11-16 18:15:46.68,3\n"):
        path = tmp_path / "broken.csv"
        path.write_text(text)
        with pytest.raises(UsageError, match="broken.csv is not a trace"):
            arrivals_of(path)
    with pytest.raises(UsageError, match="not a trace"):
        arrivals_of(azure(tmp_path, "01.0").rename(tmp_path / "azure.jsonl"))
    with pytest.raises(UsageError, match="not sorted by time"):
        arrivals_of(mooncake(tmp_path, 2, 1))
    draw = arrivals_of(mooncake(tmp_path, 1, 1, 1, 5))
    with pytest.raises(UsageError, match="4 requests, too few for 4"):
        draw(4, 1.0, [0])
    with pytest.raises(UsageError, match="same time"):
        for seed in range(20):
            draw(2, 1.0, [seed])


@pytest.mark.shared
@pytest.mark.parametrize("name", ["azure_conv.csv", "azure_code.csv", "mooncake_conversation.jsonl"])
def test_recorded_traces_are_burstier_than_poisson(shared: Path, name: str) -> None:
    draw = arrivals_of(shared / "data" / "traces" / name)
    dues = draw(200, 3.0, [0])
    assert len(dues) == 200 and dues[0] == 0.0 and dues[-1] <= 200 / 3 + 1e-9
    gaps, steady = np.diff(dues), np.diff(arrivals(200, 3.0, [0]))
    assert gaps.min() >= 0.0 and gaps.std() > steady.std(), "burstier than a Poisson process"
