"""Tests that generated corpora grow, cluster like the real one and are reproducible."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from stillroom.errors import DocumentError, UsageError
from stillroom_bench.loads import workloads
from stillroom_bench.loads.workloads import RealData, choose_queries, clustered_vectors, load_real_data, random_texts


def unit(count: int, seed: int = 0) -> workloads.Vectors:
    vectors = np.random.default_rng(seed).standard_normal((count, 16)).astype(np.float32)
    found: workloads.Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return found


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    documents = [{"_id": "1", "title": "Keys", "text": "Rotate them."}, {"_id": "2", "text": "Cats sleep."}]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)) + "\n\n")
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "how to rotate keys"}) + "\n")
    return folder


def test_real_data_is_embedded_once(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    real = load_real_data([dataset], tmp_path / "work", said.append)
    assert real.texts == ("Keys\nRotate them.", "Cats sleep.") and real.questions == ("how to rotate keys",)
    assert np.argmax(real.documents @ real.queries[0]) == 0
    assert "embedding documents: 2 of 2" in said
    monkeypatch.setattr(workloads, "_embed", lambda *_: pytest.fail("embedded again"))
    again = load_real_data([dataset], tmp_path / "work")
    assert np.array_equal(again.documents, real.documents) and np.array_equal(again.queries, real.queries)


def test_broken_data_set_is_refused(dataset: Path, tmp_path: Path) -> None:
    with (dataset / "corpus.jsonl").open("a") as stream:
        stream.write("[1]\n")
    with pytest.raises(DocumentError, match=r"corpus.jsonl:4: not a JSON object"):
        load_real_data([dataset], tmp_path)
    (dataset / "corpus.jsonl").write_text("")
    with pytest.raises(UsageError, match="no documents"):
        load_real_data([dataset], tmp_path)
    (dataset / "queries.jsonl").unlink()
    with pytest.raises(UsageError, match="is missing"):
        load_real_data([dataset], tmp_path)


def test_generated_corpus_grows_around_real_vectors() -> None:
    real = unit(50)
    large, small = clustered_vectors(real, 300, 7), clustered_vectors(real, 120, 7)
    assert np.array_equal(large[:120], small)
    assert np.array_equal(clustered_vectors(real, 20, 7), large[:20])
    assert {tuple(row) for row in large[:50]} == {tuple(row) for row in real}
    assert np.allclose(np.linalg.norm(large, axis=1), 1.0, atol=1e-5) and large.dtype == np.float32
    assert (large[50:] @ real.T).max(axis=1).min() > 0.7, "near a real one"
    assert not np.array_equal(clustered_vectors(real, 300, 8), large)


def test_generated_texts_have_real_word_frequencies() -> None:
    real = ["the cat sat on the mat the end", "the key"]
    texts = list(random_texts(real, 2000, 1))
    assert texts == list(random_texts(real, 2000, 1))
    assert {len(text.split()) for text in texts} == {8, 2}
    counts = Counter(word for text in texts for word in text.split())
    assert set(counts) == set(" ".join(real).split())
    assert counts["the"] / counts.total() == pytest.approx(0.4, abs=0.03)


def test_queries_are_distinct_and_seeded() -> None:
    real = RealData(("a",), tuple(f"q{at}" for at in range(20)), unit(1), unit(20))
    texts, vectors = choose_queries(real, 15, 3)
    assert len(set(texts)) == 15 and vectors.shape == (15, 16)
    assert texts == choose_queries(real, 15, 3)[0] != choose_queries(real, 15, 4)[0]
    assert np.array_equal(vectors[0], real.queries[int(texts[0][1:])])
    assert len(choose_queries(real, 100, 3)[0]) == 20
