"""The whole index benchmark on a corpus of a few hundred vectors: what it measures, not how long it takes."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from stillroom.bench import index, index_whole
from stillroom.bench.index import run_index
from stillroom.bench.peers_ann import PEERS
from stillroom.bench.report import BenchResult, to_markdown
from stillroom.bench.search_arms import ann_recall, latency_metrics
from stillroom.bench.workloads import RealData
from stillroom.core.ids import ChunkId
from stillroom.errors import UsageError


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random vectors in the place of embedded data sets, and few queries."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((230, 384)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    texts = tuple(f"keys rotate word{at % 7} cats{at % 3} sleep" for at in range(200))
    questions = tuple(f"word{at % 7} cats number{at}" for at in range(30))
    real = RealData(texts, questions, vectors[:200], vectors[200:])
    monkeypatch.setattr(index, "load_real_data", lambda *_: real)
    monkeypatch.setattr(index_whole, "_NUM_EMBEDDED", 2)


def run(tmp_path: Path, **options: object) -> BenchResult:
    return run_index([Path("data/tiny")], tmp_path, sizes=(300, 150), repeat=1, **options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("tiny")
def test_everything_is_measured(tmp_path: Path) -> None:
    said: list[str] = []
    result = run(tmp_path, peers=("faiss", "bm25s"), on_progress=said.append)
    arms = result.samples.values
    assert {"150 flat", "300 flat", "300 hnsw m=16 ef=100", "300 hnsw m=8 ef=25", "300 ivf_pq nprobe=8"} < set(arms)
    assert {"300 faiss m=16 ef=100", "BM25 300 stillroom", "hybrid 300 flat", "embed one query"} < set(arms)
    assert arms["300 flat"]["ann_recall_at_10"] == [1.0]
    assert set(arms["300 flat"]) == set(latency_metrics([1.0])) | {"ann_recall_at_10"}
    ours, theirs = (arms[f"300 {name} m=16 ef=200"]["ann_recall_at_10"] for name in ("hnsw", "faiss"))
    assert ours == theirs, "the same graph"
    assert [row["vectors"] for row in result.tables["tuner"]] == [150, 181, 218, 262, 300]
    assert {row["index"] for row in result.tables["building 150"]} == {"flat", "hnsw m=16", "ivf_pq", "faiss m=16"}
    assert all(row["index MiB"] > 0 for row in result.tables["BM25 at rest"])
    assert result.parameters["datasets"] == ["tiny"] and result.parameters["sizes"] == [150, 300]
    assert "building flat over 150 vectors" in said
    assert "## tuner" in to_markdown(result)
    assert not list(tmp_path.iterdir()), "what was made for the run is gone"


@pytest.mark.usefixtures("tiny")
def test_a_peer_that_is_not_installed_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    gone = {"hnswlib", "usearch", "bm25s"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in gone else find(name, *rest))
    result = run(tmp_path, peers=[name for name in PEERS if name != "faiss"])
    assert len(result.notes) == 3 and all("not installed" in note for note in result.notes)
    assert not [arm for arm in result.samples.values if "hnswlib" in arm or "bm25s" in arm]


@pytest.mark.usefixtures("tiny")
def test_impossible_wishes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown peers annoy; known are faiss"):
        run(tmp_path, peers=("annoy",))
    with pytest.raises(UsageError, match="fewer than 100"):
        run_index([], tmp_path, sizes=(50,))


def test_recall_of_rankings_and_of_arrays() -> None:
    truth = np.array([[1, 2], [3, 4]])
    assert ann_recall([[(ChunkId(2), 0.9), (ChunkId(7), 0.8)], np.array([4, 3])], truth) == 0.75
