"""A reader with random weights, for tests that need no right answers."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file

from stillroom.models.reader_model import ReaderModel, ReaderSpec

Module = TypeVar("Module", bound=torch.nn.Module)


def drawn(model: Module, seed: int = 0) -> Module:
    """Draw all weights but those of norms, as torch does for a new module; returns the model."""
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            torch.nn.Embedding.reset_parameters(module)
        elif isinstance(module, torch.nn.Linear):
            torch.nn.Linear.reset_parameters(module)
    return model


def save_random_reader(folder: Path, threshold: float = -1e9) -> Path:
    """Save a reader's folder; by default it answers every question."""
    folder.mkdir()
    spec = ReaderSpec()
    weights = drawn(ReaderModel(spec)).state_dict()
    del weights["words.weight"]  # taken from the embedder
    weights["head.weight"] *= 20  # so that readings differ clearly
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors")
    config = {"model_type": "stillroom-reader", "spec": asdict(spec), "threshold": threshold}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
