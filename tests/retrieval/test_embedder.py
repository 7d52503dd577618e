"""Embedder with the real model: meaning, order, precision, and a missing model."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from stillroom.config.settings import EmbedderConfig
from stillroom.errors import ModelNotFoundError
from stillroom.retrieval.embedder import Embedder, _runs

TEXTS = [
    "Rotate the keys of the vault every month.",
    "Cats sleep most of the day.",
    "Keys are rotated monthly. " * 20,
    "",
    "The capital of France is Paris.",
]


def test_vectors_have_length_one_and_the_order_of_the_texts(embedder: Embedder) -> None:
    vectors = embedder.embed_documents(TEXTS * 8)
    assert vectors.shape == (40, embedder.dimension) == (40, 384) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    alone = np.concatenate([embedder.embed_documents([text]) for text in TEXTS])
    np.testing.assert_allclose(np.sum(vectors[:5] * alone, axis=1), 1.0, atol=2e-3)


def test_similar_meaning_scores_above_similar_words(embedder: Embedder) -> None:
    scores = embedder.embed_documents(TEXTS) @ embedder.embed_queries(["How often are secrets exchanged?"])[0]
    assert np.argmax(scores) in (0, 2)


def test_documents_in_bfloat16_are_close_to_float32(embedder: Embedder) -> None:
    exact = embedder.embed_queries(TEXTS)
    assert np.min(np.sum(embedder.embed_documents(TEXTS) * exact, axis=1)) > 0.999


def test_sentences_have_the_vectors_of_queries_among_any_others(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = embedder.embed_queries(TEXTS)
    together = embedder.embed_sentences(TEXTS)
    assert np.min(np.sum(together * exact, axis=1)) > 0.999
    monkeypatch.setattr("stillroom.retrieval.embedder._MAX_TOGETHER", 20)
    assert np.min(np.sum(embedder.embed_sentences(TEXTS) * exact, axis=1)) > 0.999
    monkeypatch.setattr("stillroom.retrieval.embedder._autocast_dtype", lambda config, device: None)
    np.testing.assert_allclose(embedder.embed_sentences(TEXTS), exact, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "runs"),
    [([3], [[0]]), ([9], [[0]]), ([2, 3, 1, 5, 9, 1], [[0, 1], [2], [3], [4], [5]]), ([1, 1, 3], [[0, 1, 2]])],
)
def test_sentences_are_embedded_in_runs_of_bounded_length(lengths: list[int], runs: list[list[int]]) -> None:
    assert list(_runs(lengths, 5)) == runs


def test_no_texts_give_no_vectors(embedder: Embedder) -> None:
    assert embedder.embed_documents([]).shape == (0, 384)
    assert embedder.embed_queries([]).shape == (0, 384)
    assert embedder.embed_sentences([]).shape == (0, 384)


def test_query_vector_is_cached(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    first = embedder.embed_query("How often are keys rotated?")
    assert np.array_equal(first, embedder.embed_queries(["How often are keys rotated?"])[0])
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1.0
    monkeypatch.setattr(embedder, "embed_queries", None)
    assert embedder.embed_query("How often are keys rotated?") is first


def test_progress_is_reported_after_each_batch(embedder: Embedder) -> None:
    done: list[int] = []
    embedder.embed_documents(["text"] * 35, done.append)
    assert sorted(done) == [3, 16, 16]


def test_text_longer_than_the_model_reads_is_embedded_in_parts(embedder: Embedder) -> None:
    long = " ".join(f"The keeper number {number} opens the vault." for number in range(60))
    found = embedder.embed_whole(["Rotate the keys.", long, "Cats sleep."])
    np.testing.assert_array_equal(found[[0, 2]], embedder.embed_documents(["Rotate the keys.", "Cats sleep."]))
    parts = embedder._parts(long)
    assert "".join(parts) == long and len(parts) == 2
    assert max(embedder.count_tokens(part) for part in parts) <= embedder.max_seq_length - 2
    total = embedder.embed_documents(parts).sum(axis=0)
    np.testing.assert_allclose(found[1], total / np.linalg.norm(total), atol=1e-6)
    cut = embedder.embed_documents([long])[0]
    assert cut @ found[1] < 0.999, "it would be embedded without its end"


def test_threads_get_their_own_results(embedder: Embedder) -> None:
    expected = [embedder.embed_queries([text])[0] for text in TEXTS]
    found: dict[int, np.ndarray] = {}

    def work(index: int) -> None:
        found[index] = embedder.embed_queries([TEXTS[index]])[0]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(TEXTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, vector in enumerate(expected):
        np.testing.assert_allclose(found[index], vector, atol=1e-5)


def test_missing_model_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match=r"check embedder\.model"):
        Embedder(EmbedderConfig(model=str(tmp_path / "nowhere"))).embed_queries(["x"])
    with pytest.raises(ModelNotFoundError, match="could not be downloaded"):
        Embedder(EmbedderConfig(model="stillroom-tests/no-such-model")).embed_queries(["x"])
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        Embedder(EmbedderConfig(model=str(tmp_path))).embed_queries(["x"])
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelNotFoundError, match="cannot be loaded"):
        Embedder(EmbedderConfig(model=str(tmp_path))).embed_queries(["x"])


def test_counting_tokens_loads_neither_torch_nor_the_model() -> None:
    code = """
import sys
from stillroom.config.settings import EmbedderConfig
from stillroom.retrieval.embedder import Embedder, _runs

embedder = Embedder(EmbedderConfig())
assert embedder.count_tokens("rotate the keys") == 3
assert (embedder.dimension, embedder.max_seq_length, len(embedder.fingerprint)) == (384, 256, 32)
assert "torch" not in sys.modules and "sentence_transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
