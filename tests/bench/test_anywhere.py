"""Time to first token with placed chunks: a tiny model, every tier, and questions that go on for a while."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stillroom.bench.anywhere import FULL, Scope, run_anywhere
from stillroom.bench.runtime import Shape

TINY = Shape(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
SCOPE = Scope(
    num_chunks=3,
    chunk_tokens=20,
    question_tokens=8,
    ratios=(0.0, 0.25),
    num_lasting=24,
    num_documents=8,
    dtype="float32",
    repeat=2,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The model is tiny: two threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_tier_and_ratio_is_measured(tmp_path: Path) -> None:
    said: list[str] = []
    result = run_anywhere(SCOPE, tmp_path, shape=TINY, on_progress=said.append)
    arms = {f"from {tier}, {ratio} computed again" for tier in ("device", "host", "disk") for ratio in ("0%", "25%")}
    assert set(result.samples.values) == {FULL, *arms}
    assert all(len(result.samples.of(arm, "ttft_seconds")) == 2 for arm in (FULL, *arms))
    assert set(result.samples.of("from disk, 25% computed again", "recomputed_tokens")) == {15.0}
    assert set(result.samples.of("from host, 0% computed again", "recomputed_tokens")) == {0.0}
    rows = result.tables["Shuffled questions, by hundreds"]
    assert [row["questions"] for row in rows] == ["to 24"]
    assert float(rows[0]["tokens not computed"].rstrip("%")) > 30
    assert any("shuffled" in line for line in said)
