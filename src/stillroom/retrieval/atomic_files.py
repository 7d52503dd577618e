"""Atomic and durable file writes; files of arrays with checksums."""

import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.core.private_files import make_folder, open_file
from stillroom.errors import CorruptKnowledgeBaseError


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file: readers see the old or the new content, also after a power failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open_file(temporary) as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        replace_durably(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_durably(new: Path, path: Path) -> None:
    """Rename a file that is synced to disk, and sync the rename."""
    os.replace(new, path)
    _sync(path.parent)


def make_folder_durably(folder: Path) -> None:
    """Make a folder and its missing parents, and sync their names to disk."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    make_folder(folder)
    for one in missing:
        _sync(one.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an .npz file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open_file(temporary) as stream:
            np.savez(stream, allow_pickle=False, **dict(arrays))
            stream.flush()
            os.fsync(stream.fileno())
        replace_durably(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read a file of `save_arrays` and check its checksums.

    Raises:
        FileNotFoundError: the file is missing.
        CorruptKnowledgeBaseError: the file is damaged.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CorruptKnowledgeBaseError(f"{path} is damaged ({error}); it will be rebuilt") from error
