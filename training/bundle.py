"""Puts a finished model into the package, and makes it the one that answers where no other is named."""

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
_LINE = re.compile(r'^DEFAULT = "[^"]*"$', re.MULTILINE)


def bundle(model: Path, name: str, *, into: Path | None = None) -> Path:
    """Copy a checkpoint with its card; returns its new folder.

    Args:
        into: the folder of bundled models; None: that of the package that is imported.

    Raises:
        ValueError: a file is missing, or it is too large, or the name is no plain word.
        ModelError: Stillroom cannot use it.
    """
    missing = [one for one in REQUIRED if not (model / one).is_file()]
    if missing:
        raise ValueError(f"{model} lacks {', '.join(missing)}; a bundled model has its card and attribution with it")
    size = (model / "model.safetensors").stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{model} has {size / 2**20:.0f} MiB of weights, more than {MAX_BYTES / 2**20:.0f}")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"{name!r} is no name for a folder; use small letters, digits and hyphens")
    load_model(str(model), device="cpu")
    out = (into or bundled_models.FOLDER) / name
    with replaced(out) as new:  # the model may be the folder that is replaced
        shutil.copytree(model, new, dirs_exist_ok=True)
    return out


def make_default(name: str, module: Path | None = None) -> None:
    """Rewrite the line that names the default; the folder of that name must be there.

    Args:
        module: the source of `stillroom.models.bundled_models`, by default the one that is imported.

    Raises:
        ValueError: there is no such bundled model, or the line is not to be found.
    """
    path = module or Path(bundled_models.__file__)
    if not (path.parent / "bundled" / name / "config.json").is_file():
        raise ValueError(f"no bundled model {name!r} beside {path}; bundle it first")
    text, count = _LINE.subn(f'DEFAULT = "{name}"', path.read_text(encoding="utf-8"))
    if count != 1:
        raise ValueError(f"{path} has no line that names the default")
    path.write_text(text, encoding="utf-8")
