"""`stillroom reembed` and a server change the embedder of a real knowledge base to a small random model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from safetensors.numpy import load_file, save_file

from stillroom.cli import main
from stillroom.config.settings import EmbedderConfig, StillroomConfig
from stillroom.rag.stillroom import Stillroom
from stillroom.retrieval.model_files import PACKAGED_MODEL, ModelFiles
from stillroom.retrieval.store.vector_sets import VectorSets
from stillroom.server.app import create_app
from tests.cli.harness import Run

D = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of the packaged model, of 32 dimensions."""
    packaged, folder = ModelFiles(PACKAGED_MODEL).folder, tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "modules.json", "sentence_bert_config.json", "1_Pooling"):
        copy = shutil.copytree if (packaged / name).is_dir() else shutil.copy
        copy(packaged / name, folder / name)
    sizes = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    for name, changed in (("config.json", sizes), ("1_Pooling/config.json", {"word_embedding_dimension": D})):
        (folder / name).write_text(json.dumps(json.loads((packaged / name).read_text()) | changed))
    smaller = {384: slice(D), 1536: slice(64)}
    weights = {
        name: np.ascontiguousarray(tensor[tuple(smaller.get(size, slice(None)) for size in tensor.shape)])
        for name, tensor in load_file(packaged / "model.safetensors").items()
        if "encoder.layer." not in name or int(name.partition("layer.")[2].partition(".")[0]) < 2
    }
    save_file(weights, folder / "model.safetensors")
    assert ModelFiles(str(folder)).is_plain_bert
    return folder


@pytest.fixture
def kb(run: Run) -> Path:
    Path("docs").mkdir()
    for name, text in (("keys", "Rotate the keys of the vault."), ("cats", "Cats sleep most of the day.")):
        Path(f"docs/{name}.md").write_text(text)
    assert run("add", "docs", "--kb", "kb", "--quiet").code == 0
    return Path("kb")


def test_command_changes_the_embedder(run: Run, kb: Path, model: Path) -> None:
    found = run("reembed", "--model", model, "--kb", kb)
    assert found.code == 0
    assert found.out.startswith(f"searches use {model} now (32 dimensions): 2 chunks, 2 embedded now in ")
    again = run("reembed", "--model", model, "--kb", kb, "--json").json
    assert (again["is_changed"], again["num_chunks"], again["num_embedded"], again["dimension"]) == (False, 2, 0, D)
    assert run("reembed", "--kb", kb).out.startswith(f"the vectors were made by {model} already"), "the present one"
    assert run("search", "Rotate the keys of the vault.", "--kb", kb, "--mode", "dense").out.index("keys.md") > 0
    assert run("verify", "--kb", kb).code == 0
    assert run("reembed", "--model", "./none", "--kb", kb).code != 0
    assert "there is no model folder" in run("reembed", "--model", "./none", "--kb", kb).err


def test_unusable_models_are_refused_before_a_change_is_recorded(
    run: Run, kb: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, cross = tmp_path / "decoder", tmp_path / "cross"
    for folder, kind in ((decoder, "LlamaForCausalLM"), (cross, "BertForSequenceClassification")):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": [kind], "hidden_size": D}))
    damaged = Path(shutil.copytree(model, tmp_path / "damaged"))
    (damaged / "model.safetensors").write_bytes(b"damaged")
    cases = {
        decoder: "is a LlamaForCausalLM, not an embedding model",
        cross: "is a BertForSequenceClassification, not an embedding model",
        damaged: "cannot be loaded",
    }
    for folder, message in cases.items():
        found = run("reembed", "--model", folder, "--kb", kb)
        assert found.code and message in found.err and "internal error" not in found.err
        assert str(folder) not in run("verify", "--kb", kb).out, "no change was begun"
    monkeypatch.setenv("STILLROOM_EMBEDDER__MODEL", str(decoder))
    assert "is a LlamaForCausalLM" in run("add", "docs", "--kb", "new").err


def test_interrupted_command_says_what_is_kept(
    run: Run, kb: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(VectorSets, "switch", interrupted)
        found = run("reembed", "--model", model, "--kb", kb)
    assert found.code == main.INTERRUPTED and "What was embedded so far is kept" in found.err
    shown = run("verify", "--kb", kb)
    assert shown.code == 0 and f"2 of 2 chunks are embedded with {model}" in shown.out
    with monkeypatch.context() as patched:
        patched.setattr(VectorSets, "switch", interrupted)
        patched.setattr(VectorSets, "discard_next", interrupted)
        found = run("reembed", "--model", PACKAGED_MODEL, "--kb", kb)
    warning = f"the unfinished change to the embedder {model} is discarded, with the vectors of 2 chunks"
    assert f"warning: {warning}\n" in found.err
    assert run("reembed", "--model", model, "--kb", kb, "--json").json["num_embedded"] == 0


def test_server_changes_to_the_configured_embedder_while_it_answers(
    run: Run, kb: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "stillroom.retrieval.reembedding")
    config = StillroomConfig(embedder=EmbedderConfig(model=str(model)))
    with (
        Stillroom.open(kb, config=config) as stillroom,
        TestClient(create_app(stillroom), base_url="http://127.0.0.1") as client,
    ):

        def used() -> tuple[int, str]:
            reply = client.post("/v1/embeddings", json={"input": "keys"})
            assert reply.status_code == 200, reply.text
            return len(reply.json()["data"][0]["embedding"]), reply.json()["model"]

        assert used() == (384, PACKAGED_MODEL)
        stillroom.begin_reembedding()
        thread = stillroom._kb._reembedding._thread
        assert thread is not None
        thread.join()
        assert used() == (D, model.name)
        said = [one.getMessage() for one in caplog.records if one.name == "stillroom.retrieval.reembedding"]
        assert said == [
            f"changing the embedder from {PACKAGED_MODEL} to {model}",
            "changing the embedder: 0 of 2 chunks are embedded",
            f"searches use the embedder {model} now (2 chunks)",
        ]
        with Stillroom.open(kb) as other:  # as the command in another process
            other.reembed(PACKAGED_MODEL)
        assert used() == (384, PACKAGED_MODEL)
