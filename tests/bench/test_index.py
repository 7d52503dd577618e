"""Tests `stillroom bench index` on a few hundred vectors."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stillroom.core.ids import ChunkId
from stillroom.errors import UsageError
from stillroom_bench.instrument.bench_report import BenchResult, to_markdown
from stillroom_bench.loads.workloads import RealData
from stillroom_bench.quality import index, index_whole
from stillroom_bench.quality.index import run_index
from stillroom_bench.quality.peers_ann import PEERS, bm25_peer, graph_peers
from stillroom_bench.quality.quality_options import IndexOptions
from stillroom_bench.quality.search_arms import ann_recall, latency_metrics


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace embedded data sets by random vectors with few queries."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((230, 384)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    texts = tuple(f"keys rotate word{at % 7} cats{at % 3} sleep" for at in range(200))
    questions = tuple(f"word{at % 7} cats number{at}" for at in range(30))
    real = RealData(texts, questions, vectors[:200], vectors[200:])
    monkeypatch.setattr(index, "load_real_data", lambda *_: real)
    monkeypatch.setattr(index_whole, "_NUM_EMBEDDED", 2)
    for name, values in (("_SWEPT_M", (8,)), ("_EF_SEARCH", (25, 200)), ("_NPROBE", (8,))):
        monkeypatch.setattr(index, name, values)


def run(tmp_path: Path, peers: tuple[str, ...] = (), say: Callable[[str], None] = lambda _: None) -> BenchResult:
    return run_index(IndexOptions((Path("data/tiny"),), (300, 150), peers, repeat=1), tmp_path, say)


@pytest.mark.slow  # measures every arm
@pytest.mark.usefixtures("tiny")
def test_every_index_size_and_table_is_measured(tmp_path: Path) -> None:
    said: list[str] = []
    result = run(tmp_path, peers=("faiss",), say=said.append)
    arms = result.samples.values
    assert {"150 flat", "300 flat", "300 hnsw m=16 ef=200", "300 hnsw m=8 ef=25", "300 ivf_pq nprobe=8"} < set(arms)
    assert {"300 faiss m=16 ef=200", "BM25 300 stillroom", "hybrid 300 flat", "embed one query"} < set(arms)
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
    assert not list(tmp_path.iterdir()), "temporary files are removed"


def test_missing_peer_library_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    gone = {"hnswlib", "usearch", "bm25s"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in gone else find(name, *rest))
    graphs, notes = graph_peers(PEERS)
    assert list(graphs) == ["faiss"]
    assert notes == [
        f"{name} is not installed, so it is left out; pip install {name}" for name in ("hnswlib", "usearch")
    ]
    peer, notes = bm25_peer(PEERS)
    assert peer is None and "pip install bm25s" in notes[0]
    assert bm25_peer(["faiss"]) == (None, [])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["faiss", "hnswlib", "usearch"])
def test_peer_graph_finds_true_neighbours(name: str) -> None:
    graphs, notes = graph_peers([name])
    if notes:
        pytest.skip(notes[0])
    vectors = np.random.default_rng(0).standard_normal((500, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    peer = graphs[name]()
    peer.build(vectors, 16, 100, 0)
    truth = np.argsort(-(vectors @ vectors.T), axis=1)[:, :10]
    search = peer.searcher(10, 200)
    assert ann_recall([search(vector) for vector in vectors[:50]], truth[:50]) > 0.98
    assert peer.num_bytes() > vectors.nbytes


@pytest.mark.slow
def test_bm25s_ranks_matching_documents_first(tmp_path: Path) -> None:
    peer, notes = bm25_peer(["bm25s"])
    if peer is None:
        pytest.skip(notes[0])
    words = [["key"], ["key", "rotate"], ["cat", "sleep"]] * 30
    peer.build(words)
    assert {int(at) % 3 for at in peer.search(["rotate"], 5)} == {1}
    assert peer.num_bytes(tmp_path / "stored") > 0


@pytest.mark.usefixtures("tiny")
def test_unknown_peer_and_tiny_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown peers annoy; known are faiss"):
        run(tmp_path, peers=("annoy",))
    with pytest.raises(UsageError, match="fewer than 100"):
        run_index(IndexOptions((), sizes=(50,)), tmp_path)


def test_recall_accepts_rankings_and_arrays() -> None:
    truth = np.array([[1, 2], [3, 4]])
    assert ann_recall([[(ChunkId(2), 0.9), (ChunkId(7), 0.8)], np.array([4, 3])], truth) == 0.75
