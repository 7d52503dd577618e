"""Our encoder of embedding models beside sentence-transformers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from stillroom.config.settings import EmbedderConfig
from stillroom.errors import ModelNotFoundError
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.model_files import PACKAGED_MODEL, ModelFiles
from stillroom.retrieval.text_encoders import (
    BertTextEncoder,
    SentenceTransformersEncoder,
    Vectors,
    load_text_encoder,
)

TEXTS = ["Rotate the keys.", "", "\u00e9t\u00e9 \u4f60\u597d \U0001f600", "the vault " * 300, "a much longer text " * 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packaged model, to be changed."""
    return Path(shutil.copytree(ModelFiles(PACKAGED_MODEL).folder, tmp_path_factory.mktemp("model") / "copy"))


def encoded(encoder: BertTextEncoder | SentenceTransformersEncoder, texts: list[str]) -> Vectors:
    with torch.inference_mode():
        return encoder.encode(texts, "query")


def test_vectors_are_those_of_sentence_transformers() -> None:
    files = ModelFiles(PACKAGED_MODEL)
    own, other = BertTextEncoder(files, "cpu"), SentenceTransformersEncoder(files, "cpu")
    np.testing.assert_allclose(encoded(own, TEXTS), encoded(other, TEXTS), atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_allclose(np.sum(encoded(own, TEXTS) * encoded(other, TEXTS), axis=1), 1.0, atol=1e-3)


@pytest.mark.parametrize("kind", ["query", "document"])
def test_vectors_do_not_depend_on_the_batch(embedder: Embedder, kind: str) -> None:
    embed = embedder.embed_queries if kind == "query" else embedder.embed_documents
    texts = [*TEXTS, *(f"Key {number} is rotated. " * (number % 7) for number in range(20))]
    together = embed(texts)
    assert all(np.array_equal(embed([text])[0], vector) for text, vector in zip(texts, together, strict=True))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", {"model_type": "mpnet"}),
        ("config.json", {"hidden_act": "relu"}),
        ("config.json", {"position_embedding_type": "relative_key"}),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}),
        ("config_sentence_transformers.json", {"prompts": {"query": "query: "}}),
    ],
)
def test_other_models_are_left_to_sentence_transformers(folder: Path, name: str, change: dict[str, object]) -> None:
    path = folder / name
    before = path.read_text()
    assert ModelFiles(str(folder)).is_plain_bert
    path.write_text(json.dumps(json.loads(before) | change))
    try:
        assert not ModelFiles(str(folder)).is_plain_bert
    finally:
        path.write_text(before)


def test_prompts_of_a_model_are_used(folder: Path) -> None:
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prompts": {"query": "query: ", "document": ""}}))
    found = Embedder(EmbedderConfig(model=str(folder))).embed_queries(["Rotate the keys."])
    expected = Embedder(EmbedderConfig()).embed_queries(["query: Rotate the keys."])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_damaged_weights_are_refused(folder: Path) -> None:
    (folder / "config_sentence_transformers.json").unlink()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert ModelFiles(str(folder)).is_plain_bert
    with pytest.raises(ModelNotFoundError, match="cannot be loaded"):
        load_text_encoder(ModelFiles(str(folder)))
