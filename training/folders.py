"""A folder that is replaced as a whole, or not at all."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """An empty folder that takes this one's place at the end of the block; after an error the old one is as it was."""
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
