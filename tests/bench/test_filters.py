"""Tests `stillroom bench filters` on few vectors."""

from pathlib import Path

import numpy as np
import pytest

from stillroom.errors import UsageError
from stillroom.retrieval.index import hnsw
from stillroom_bench.loads.workloads import RealData
from stillroom_bench.quality import filters
from stillroom_bench.quality.filters import KINDS, SHARES, WAYS, run_filters
from stillroom_bench.quality.quality_options import FilterOptions


def test_every_index_filter_and_strategy_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.random.default_rng(0).standard_normal((1100, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    questions = tuple(f"question {at}" for at in range(10))
    real = RealData(tuple(f"text {at}" for at in range(1090)), questions, vectors[:1090], vectors[1090:])
    monkeypatch.setattr(filters, "load_real_data", lambda *_: real)
    monkeypatch.setattr(filters, "_MIN_SIZE", 1000)
    rule = hnsw.COMPARED_PER_CANDIDATE
    result = run_filters(FilterOptions((Path("data/tiny"),), size=1500, repeat=1), tmp_path)
    assert rule == hnsw.COMPARED_PER_CANDIDATE
    names = {
        f"{index} {kind} {share:.1%} {way}"
        for index in ("hnsw", "ivf_pq")
        for kind in KINDS
        for share in SHARES
        for way in WAYS
        if share >= 0.01 or way != "approximate"
    }
    assert set(result.samples.values) == names | {"hnsw unfiltered", "ivf_pq unfiltered"}
    for row in result.tables["hnsw, random"][1:]:
        assert row["compare recall"] == 1.0 and row["chosen recall"] > 0.9
    with pytest.raises(UsageError, match="--size 999 is below"):
        run_filters(FilterOptions((Path("data/tiny"),), size=999, repeat=1), tmp_path)
