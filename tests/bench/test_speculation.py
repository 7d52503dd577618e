"""Tests `stillroom bench pipeline speculation` with a tiny model and a small index."""

from pathlib import Path

import numpy as np
import pytest

from stillroom_bench.experiments import speculative_prefill
from stillroom_bench.experiments.experiment_options import SpeculationOptions
from stillroom_bench.experiments.speculative_prefill import MODES, run_speculation
from stillroom_bench.loads.workloads import RealData
from tests.bench.test_anywhere import TINY


@pytest.mark.slow  # measures every arm
def test_every_arm_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((230, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    texts = tuple(f"keys rotate word{at % 7} cats{at % 3} sleep" for at in range(200))
    real = RealData(texts, tuple(map(str, range(30))), vectors[:200], vectors[200:])
    monkeypatch.setattr(speculative_prefill, "load_real_data", lambda *_: real)
    scope = SpeculationOptions((Path("data/tiny"),), 2600, 4, shares=(0.5, 1.0), num_clients=(1, 2), repeat=2, nbits=6)
    result = run_speculation(scope, tmp_path, shape=TINY)

    groups = ("50% of lists, one client", "100% of lists, one client", "50% of lists, 2 clients")
    assert {f"{group}/{mode}" for group in groups for mode in MODES} <= set(result.samples.values)
    for group in groups:
        samples = result.samples
        assert all(share == 0 for share in samples.of(f"{group}/off", "right_share"))
        off, on = (samples.of(f"{group}/{mode}", "cached_share") for mode in ("off", "on"))
        assert len(off) == len(on) == 2
        for metric in ("ttft_seconds", "exposed_search_seconds", "retrieval_seconds"):
            assert all(seconds > 0 for seconds in samples.of(f"{group}/off", metric))
    one = f"{groups[0]}/on"
    assert all(begun > 0 for begun in result.samples.of(one, "begun_per_question"))
    assert result.ratio(one, "ttft_seconds") is not None
