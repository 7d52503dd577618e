"""Tests `stillroom bench convergence` on a few hundred vectors."""

from pathlib import Path

import numpy as np
import pytest

from stillroom_bench.experiments import convergence
from stillroom_bench.experiments.convergence import first_final, run_convergence
from stillroom_bench.experiments.experiment_options import ConvergenceOptions
from stillroom_bench.loads.workloads import RealData


@pytest.mark.parametrize(
    ("lists", "first", "expected"),
    [
        ([[1, 2]], 2, 1),
        ([[], [1], [1, 2]], 1, 2),
        ([[], [1], [1, 2]], 2, 3),
        ([[1, 2], [2, 1], [1, 2]], 1, 3),
        ([[1, 2], [1, 3], [1, 3]], 2, 2),
        ([[1, 2, 9], [1, 2, 8], [1, 2, 7]], 2, 1),
    ],
)
def test_head_is_final_from_the_list_after_which_it_no_longer_changes(
    lists: list[list[int]], first: int, expected: int
) -> None:
    assert first_final(lists, first) == expected


@pytest.mark.slow  # measures every arm
def test_every_index_and_arm_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((230, 384)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    texts = tuple(f"keys rotate word{at % 7} cats{at % 3} sleep" for at in range(200))
    questions = tuple(f"word{at % 7} cats number{at}" for at in range(30))
    real = RealData(texts, questions, vectors[:200], vectors[200:])
    monkeypatch.setattr(convergence, "load_real_data", lambda *_: real)
    said: list[str] = []
    result = run_convergence(ConvergenceOptions((Path("data/tiny"),), 2600, 4, repeat=1), tmp_path, said.append)
    assert set(result.samples.values) == {
        *(f"{kind}/{arm}" for kind in ("flat", "hnsw", "ivf_pq") for arm in ("plain", "4 stages")),
        "hnsw/walk without a pause",
    }
    assert list(result.tables) == ["dense, 2,600 vectors", "hybrid, 200 documents"]
    for table in result.tables.values():
        assert [(row["index"], row["first"]) for row in table] == [
            (kind, first) for kind in ("flat", "hnsw", "ivf_pq") for first in (1, 3, 5)
        ]
        for row in table:
            shares = [row[name] for name in row if name.startswith("final after")]
            assert shares == sorted(shares) and 0 < row["mean share of stages"] <= 1
            assert row["last list is the plain search's"] == 1.0
    assert said and not list(tmp_path.iterdir()), "temporary files are removed"
