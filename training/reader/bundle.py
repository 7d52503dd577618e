"""Writes a reader's bundle: bfloat16 weights without word embeddings, and their config."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from stillroom.models.reader_model import ReaderSpec
from training.reader.train import read_encoder

WORDS = "words.weight"


def word_embeddings_hash(embedder: Path) -> str:
    """Return the SHA-256 of the embedder's word embeddings, as they lie in its file."""
    words = read_encoder(embedder)["embeddings.word_embeddings.weight"]
    return hashlib.sha256(words.contiguous().numpy().tobytes()).hexdigest()


def bundle(checkpoint: Path, embedder: Path, out: Path, spec: ReaderSpec) -> Path:
    """Write `model.safetensors` and `config.json`; other files of the folder stay. Returns the folder.

    The threshold is 0 until `python -m training reader threshold` chooses one for these weights.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    if not checkpoint.is_file():
        raise FileNotFoundError(f"{checkpoint} is missing; train first: python -m training reader train")
    weights = torch.load(checkpoint, weights_only=True)["model"]
    del weights[WORDS]
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.bfloat16().contiguous() for name, tensor in weights.items()}, out / "model.safetensors")
    (out / "model.safetensors").chmod(0o644)  # the library makes it readable by the owner only
    config = {
        "model_type": "stillroom-reader",
        "spec": asdict(spec),
        "threshold": 0.0,
        "word_embeddings_sha256": word_embeddings_hash(embedder),
    }
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return out
