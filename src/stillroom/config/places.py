"""Where a user's own caches lie: what is there can be removed at any time and is made again."""

import os
from pathlib import Path


def cache_root() -> Path:
    """Stillroom's folder in the user's cache folder, as the XDG base directory specification names it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stillroom"
