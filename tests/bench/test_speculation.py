"""Tests `stillroom bench pipeline speculation` with a tiny model and a small index."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stillroom_bench.experiments import speculation_corpus
from stillroom_bench.experiments.experiment_options import SpeculationOptions
from stillroom_bench.experiments.speculative_prefill import MODES, run_speculation
from stillroom_bench.loads.workloads import RealData
from tests.bench.test_anywhere import TINY


def use_small_data(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((230, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    texts = tuple(f"keys rotate word{at % 7} cats{at % 3} sleep" for at in range(200))
    real = RealData(texts, tuple(map(str, range(30))), vectors[:200], vectors[200:])
    monkeypatch.setattr(speculation_corpus, "load_real_data", lambda *_: real)


@pytest.mark.slow  # measures every arm
def test_every_arm_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_data(monkeypatch)
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
    limits = result.tables["What overlap can gain"]
    assert [row["lists searched"] for row in limits] == list(groups[:2])
    for row in limits:
        search, model, whole = row["search, ms"], row["model, ms"], row["search, ms"] + row["model, ms"]
        assert row["least ratio of times to first token"] == pytest.approx(max(search, search / 4 + model) / whole)


@pytest.mark.slow  # measures three arms
def test_filtered_search_of_an_index_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_data(monkeypatch)
    plain_scope = SpeculationOptions((Path("data/tiny"),), 2600, 4, shares=(1.0,), repeat=1, nbits=6, one_thread=False)
    scope = replace(plain_scope, on_disk=True, allowed=0.5, k=3, document_tokens=20)
    corpus = speculation_corpus.SearchedCorpus(scope.datasets, tmp_path, scope, lambda _: None)
    for query in corpus.questions(4, [0]):
        corpus.forget_pages()
        lists = [[one.chunk.ordinal for one in found.results] for found in corpus.search(query, 1.0, 4)]
        plain = [[one.chunk.ordinal for one in found.results] for found in corpus.search(query, 1.0, 1)]
        assert lists[-1] == plain[0] and len(lists[-1]) == 3
        assert corpus.allowed is not None and corpus.allowed.has(lists[-1]).all()
    corpus.close()
    result = run_speculation(scope, tmp_path, shape=TINY)
    assert set(result.samples.values) == {f"100% of lists, one client/{mode}" for mode in MODES}
    assert not list(tmp_path.glob("*.lists"))
