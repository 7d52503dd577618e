"""tantivy's files: opening them, whether they are as tantivy wrote them, and its errors of the disk.

A segment's file ends with JSON that holds the CRC-32 of what stands before it, the length of that JSON and a magic
number. tantivy does not check the CRC itself: on damaged files a search may panic, and a commit may abort the process.
"""

import contextlib
import errno
import json
import os
import re
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import tantivy

_END, _MAGIC = struct.Struct("<II"), 1337
_BLOCK = 1 << 20
"""Bytes read at a time."""

_Identity = tuple[str, int, int, int]


class SegmentFiles:
    """The segment files of one index. A file is read again only if it has changed since it was found whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._whole: frozenset[_Identity] = frozenset()

    def damaged(self) -> list[str]:
        """Return the names of files that are damaged. Reads every file that is new or changed; one that a writer
        removes meanwhile is none."""
        whole, damaged = set(), []
        for path in sorted(self._folder.glob("*.*")):
            if not _is_segment(path):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                identity = path.name, status.st_ino, status.st_size, status.st_mtime_ns
                if identity in self._whole or _is_whole(path):
                    whole.add(identity)
                else:
                    damaged.append(path.name)
        self._whole = frozenset(whole)
        return damaged


def _is_segment(path: Path) -> bool:
    return re.fullmatch(r"[0-9a-f]{32}", path.name.partition(".")[0]) is not None


def _is_whole(path: Path) -> bool:
    """Raises FileNotFoundError."""
    try:
        with path.open("rb") as stream:
            end = stream.seek(-_END.size, os.SEEK_END)
            size, magic = _END.unpack(stream.read())
            end = stream.seek(end - size)
            crc = json.loads(stream.read(size))["crc"]
            return bool(magic == _MAGIC and _crc_of(stream, end) == crc)
    except FileNotFoundError:
        raise
    except (OSError, struct.error, ValueError, KeyError, TypeError):
        return False


def _crc_of(stream: BinaryIO, num_bytes: int) -> int:
    """Of the first bytes of a file."""
    stream.seek(0)
    found = 0
    for start in range(0, num_bytes, _BLOCK):
        found = zlib.crc32(stream.read(min(_BLOCK, num_bytes - start)), found)
    return found


def identity_of(path: Path) -> tuple[int, int] | None:
    """Of the file that has this name now; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def open_index(folder: Path) -> Any:
    index = tantivy.Index.open(str(folder))
    index.config_reader("manual")  # no thread that watches the folder; `refresh` looks
    return index


def open_borrowed(folder: Path) -> Any:
    """An index in a folder that cannot be written, where tantivy would make files to lock it even for reading: opened
    by links in another folder, which it no longer needs once its files are mapped."""
    with tempfile.TemporaryDirectory(prefix="stillroom-") as place:
        for file in folder.iterdir():
            if file.suffix != ".lock":
                (Path(place) / file.name).symlink_to(file.absolute())
        index = open_index(Path(place))
        index.reload()
        return index


def disk_error(message: str) -> int | None:
    """The number of the system's error that tantivy speaks of, where it is the disk's and not of what lies on it."""
    found = re.search(r"(?:os error |code: )(\d+)", message)
    if found is not None:
        return int(found[1]) if int(found[1]) in _DISK_ERRORS else None
    return errno.EIO if "worker thread" in message else None  # it does not say, but supposes so


_DISK_ERRORS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE)
)
