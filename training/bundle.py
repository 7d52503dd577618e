"""Copies a finished model into the package."""

import re
import shutil
from pathlib import Path

from stillroom.models import bundled_models
from stillroom.models.loader import load_model
from training.export import MAX_BYTES
from training.folders import replaced

REQUIRED = (
    "README.md",
    "ATTRIBUTION.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def bundle(model: Path, name: str, *, into: Path | None = None) -> Path:
    """Copy a checkpoint with its card; returns its new folder.

    Args:
        into: folder of bundled models; None: that of the imported package.

    Raises:
        ValueError: a file is missing, the weights are too large, or the name is invalid.
        ModelError: Stillroom cannot load the checkpoint.
    """
    missing = [one for one in REQUIRED if not (model / one).is_file()]
    if missing:
        raise ValueError(f"{model} lacks {', '.join(missing)}; a bundled model needs its card and attribution")
    size = (model / "model.safetensors").stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{model} has {size / 2**20:.0f} MiB of weights, more than {MAX_BYTES / 2**20:.0f}")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"{name!r} is not a folder name; use lower-case letters, digits and hyphens")
    load_model(str(model), device="cpu")
    out = (into or bundled_models.FOLDER) / name
    with replaced(out) as new:  # `model` may be the replaced folder
        shutil.copytree(model, new, dirs_exist_ok=True)
    return out
