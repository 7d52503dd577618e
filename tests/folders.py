"""Folders of tests."""

import shutil
from pathlib import Path


def remove(folder: Path, *, tries: int = 100) -> None:
    """Remove a folder that another thread or process may write to: the next try removes a file made meanwhile.

    Raises:
        OSError: It is still there after the last try.
    """
    for _ in range(tries - 1):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
    shutil.rmtree(folder)
