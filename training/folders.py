"""Replaces a folder atomically."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` at the end of the block; after an error `folder` is unchanged."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        yield new
        old = Path(scratch) / "old"
        try:
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
