"""The models that are part of the package, one folder of `bundled/` each.

`bundled` names the default model (`DEFAULT`), `bundled:NAME` a certain one.
"""

from pathlib import Path

from stillroom.config.settings import BUNDLED_MODEL
from stillroom.errors import ModelNotFoundError

FOLDER = Path(__file__).parent / "bundled"

DEFAULT = "microworld"


def bundled_names() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def bundled_folder(model: str) -> Path | None:
    """Return the folder of a bundled model; None if `model` does not name one.

    Raises:
        ModelNotFoundError: the package has no model of this name.
    """
    kind, colon, name = model.partition(":")
    if kind != BUNDLED_MODEL:
        return None
    name = name if colon else DEFAULT
    if name not in bundled_names():
        known = ", ".join(f"{BUNDLED_MODEL}:{one}" for one in bundled_names())
        raise ModelNotFoundError(f"there is no bundled model {name!r}; the package has {known}")
    return FOLDER / name
