"""Our encoder of embedding models beside sentence-transformers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stillroom.config.settings import EmbedderConfig
from stillroom.errors import ModelNotFoundError
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.model_files import PACKAGED_MODEL, ModelFiles
from stillroom.retrieval.query_encoder import load_query_encoder
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


@pytest.fixture(scope="module")
def judges() -> tuple[BertTextEncoder, SentenceTransformersEncoder]:
    files = ModelFiles(PACKAGED_MODEL)
    return BertTextEncoder(files, "cpu"), SentenceTransformersEncoder(files, "cpu")


def test_vectors_are_those_of_sentence_transformers(
    judges: tuple[BertTextEncoder, SentenceTransformersEncoder],
) -> None:
    own, other = judges
    np.testing.assert_allclose(encoded(own, TEXTS), encoded(other, TEXTS), atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_allclose(np.sum(encoded(own, TEXTS) * encoded(other, TEXTS), axis=1), 1.0, atol=1e-3)


def test_vectors_without_torch_are_those_of_torch_and_sentence_transformers(
    judges: tuple[BertTextEncoder, SentenceTransformersEncoder],
) -> None:
    words = (Path(__file__).parents[2] / "docs" / "retrieval.md").read_text(encoding="utf-8").split()
    texts = [*TEXTS[:3], *(" ".join(words[start : start + num]) for start, num in enumerate([5, 25, 50, 90, 300]))]
    encoder = load_query_encoder(ModelFiles(PACKAGED_MODEL))
    assert encoder is not None
    found = encoder.encode(texts)
    for text, vector in zip(texts, found, strict=True):
        assert np.array_equal(encoder.encode([text])[0], vector)
        for judge in judges:
            np.testing.assert_allclose(vector, encoded(judge, [text])[0], atol=1e-6)


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
        assert load_query_encoder(ModelFiles(str(folder))) is None
    finally:
        path.write_text(before)


def test_weights_in_half_precision_are_left_to_torch(folder: Path) -> None:
    path = folder / "model.safetensors"
    before = path.read_bytes()
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path)
    try:
        embedder = Embedder(EmbedderConfig(model=str(folder)))
        embedder.avoid_torch()
        found = embedder.embed_queries(TEXTS)
    finally:
        path.write_bytes(before)
    np.testing.assert_allclose(found, Embedder(EmbedderConfig()).embed_queries(TEXTS), atol=1e-3)


def test_prompts_of_a_model_are_used(folder: Path) -> None:
    path = folder / "config_sentence_transformers.json"
    prompts = {"query": "query: ", "passage": "passage: "}  # as E5 needs them
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prompts": prompts}))
    embedder, plain = (
        Embedder(EmbedderConfig(dtype="float32", model=model)) for model in (str(folder), PACKAGED_MODEL)
    )
    assert (embedder.num_prompt_tokens, plain.num_prompt_tokens) == (2, 0)
    found = embedder.embed_queries(["Rotate the keys."]), embedder.embed_documents(["Rotate the keys."])
    expected = plain.embed_queries(["query: Rotate the keys."]), plain.embed_documents(["passage: Rotate the keys."])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    sizes: list[int] = []
    embedder.embed_documents(["key " * num for num in range(26, 33)], sizes.append)
    assert sorted(sizes) == [3, 4], "with the prompt and two special tokens, 28 words fill a block of 32"


def test_a_folder_without_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    """transformers makes a tokenizer without words, to which all texts are the same."""
    files = shutil.ignore_patterns("tokenizer*", "vocab*", "special_tokens*")
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=files)
    with pytest.raises(ModelNotFoundError, match=r"has no tokenizer \(tokenizer\.json, vocab\.txt"):
        Embedder(EmbedderConfig(model=str(bare))).check()


@pytest.mark.usefixtures("one_thread")  # with two threads, oneDNN may choose the order of sums by the number of rows
@pytest.mark.parametrize("length", [75, 200])
def test_model_may_read_any_number_of_tokens(folder: Path, length: int) -> None:
    from sentence_transformers import SentenceTransformer

    path = folder / "sentence_bert_config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"max_seq_length": length}))
    try:
        encoder = SentenceTransformersEncoder(ModelFiles(str(folder)), "cpu")
        oracle = SentenceTransformer(str(folder), device="cpu")
    finally:
        path.write_text(before)
    in_last_block = ["the vault " * 300, "the vault " * (length // 2 - 3), "a key " * (length // 2)]
    texts = [*TEXTS, *in_last_block]
    expected = oracle.encode_query(texts, batch_size=1, normalize_embeddings=True)
    np.testing.assert_allclose(encoded(encoder, texts), expected, atol=1e-6)
    together = encoded(encoder, in_last_block)
    alone = [encoded(encoder, [text])[0] for text in in_last_block]
    assert np.array_equal(together, alone), "a vector does not depend on its batch"


def test_damaged_weights_are_refused(folder: Path) -> None:
    (folder / "config_sentence_transformers.json").unlink()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert ModelFiles(str(folder)).is_plain_bert
    for load in (load_text_encoder, load_query_encoder):
        with pytest.raises(ModelNotFoundError, match="cannot be loaded"):
            load(ModelFiles(str(folder)))
