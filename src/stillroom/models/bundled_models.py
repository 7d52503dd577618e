"""The models that are part of the package, one folder of `bundled/` each.

`bundled` names the default model (`DEFAULT`), `bundled:NAME` a certain one.
"""

import json
from pathlib import Path

from stillroom.config.settings import BUNDLED_MODEL
from stillroom.errors import ModelNotFoundError

FOLDER = Path(__file__).parent / "bundled"

DEFAULT = "reader"
READER = f"{BUNDLED_MODEL}:reader"
"""Quotes documents; generates no tokens, and has no KV."""
MICROWORLD = f"{BUNDLED_MODEL}:microworld"
"""Generates tokens; for tests, and to show reuse of KV."""
_CANNOT_READ = (
    "microworld knows 994 words of an invented country; it shows KV reuse and cannot read other documents. Leave out "
    "--model for the bundled reader."
)
_READER_TYPE = "stillroom-reader"
"""`model_type` in the `config.json` of a reader."""


def bundled_names() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def full_name(model: str) -> str:
    """Return `bundled:NAME` for a bundled model, also if it was given as `bundled` or as its folder; other names
    unchanged."""
    if model == BUNDLED_MODEL:
        return f"{BUNDLED_MODEL}:{DEFAULT}"
    try:
        folder = Path(model).expanduser()
    except RuntimeError:  # `~` of an unknown user, for example in a request
        return model
    is_bundled = folder.is_dir() and folder.resolve().parent == FOLDER.resolve()
    return f"{BUNDLED_MODEL}:{folder.resolve().name}" if is_bundled else model


def short_name(model: str) -> str:
    """Return `full_name`, or of another model's folder or file the last part."""
    name = full_name(model)
    return Path(model).resolve().name if name == model and Path(model).exists() else name


def model_warnings(model: str) -> tuple[str, ...]:
    """Return what a reader of a model's answers must know; empty for models that can read documents."""
    return (_CANNOT_READ,) if full_name(model) == MICROWORLD else ()


def bundled_folder(model: str) -> Path | None:
    """Return the folder of a bundled model; None if `model` does not name one.

    Raises:
        ModelNotFoundError: the package has no model of this name.
    """
    kind, colon, name = full_name(model).partition(":")
    if kind != BUNDLED_MODEL or not colon:
        return None
    if name not in bundled_names():
        known = ", ".join(f"{BUNDLED_MODEL}:{one}" for one in bundled_names())
        raise ModelNotFoundError(f"there is no bundled model {name!r}; the package has {known}")
    return FOLDER / name


def reader_folder(model: str) -> Path | None:
    """Return the folder of a reader, the bundled one or another; None if `model` names another kind of model.

    Raises:
        ModelNotFoundError: the package has no model of this name.
    """
    folder = bundled_folder(model) or Path(model).expanduser()
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return folder if isinstance(config, dict) and config.get("model_type") == _READER_TYPE else None
