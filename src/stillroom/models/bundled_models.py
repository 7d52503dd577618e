"""The models that are part of the package: a folder of `bundled/` each, one of them the default.

`bundled` is the default, `bundled:NAME` a certain one. A new one is a folder; making it the default is the line below.
"""

from pathlib import Path

from stillroom.config.settings import BUNDLED_MODEL
from stillroom.errors import ModelNotFoundError

FOLDER = Path(__file__).parent / "bundled"

DEFAULT = "microworld"


def bundled_names() -> list[str]:
    """In order of their names."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def bundled_folder(model: str) -> Path | None:
    """The folder of a bundled model; None if the name means something else.

    Raises:
        ModelNotFoundError: `bundled:NAME` with a name that the package does not have.
    """
    kind, colon, name = model.partition(":")
    if kind != BUNDLED_MODEL:
        return None
    name = name if colon else DEFAULT
    if name not in bundled_names():
        known = ", ".join(f"{BUNDLED_MODEL}:{one}" for one in bundled_names())
        raise ModelNotFoundError(f"there is no bundled model {name!r}; the package has {known}")
    return FOLDER / name
