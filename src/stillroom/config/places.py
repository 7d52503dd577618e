"""The user's cache folder. Its content can be removed at any time and is recreated."""

import os
from pathlib import Path


def cache_root() -> Path:
    """Return Stillroom's folder in the user's cache folder (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stillroom"
