"""tantivy's files: opening, checksums, and recognising disk errors.

A segment file ends with JSON that contains the CRC-32 of the bytes before it, the length of that JSON and a magic
number. tantivy does not check the CRC: on damaged files a search may panic and a commit may abort the process.
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
"""Bytes per read."""

_Identity = tuple[str, int, int, int]


class SegmentFiles:
    """Segment files of one index. A file is read again only if it has changed since its checksum was right."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._whole: frozenset[_Identity] = frozenset()

    def damaged(self) -> list[str]:
        """Return the names of damaged files. Reads only new and changed files; skips files removed meanwhile."""
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
    """Whether the checksum is right. Raises FileNotFoundError."""
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
    """Return the CRC-32 of the first `num_bytes` of a file."""
    stream.seek(0)
    found = 0
    for start in range(0, num_bytes, _BLOCK):
        found = zlib.crc32(stream.read(min(_BLOCK, num_bytes - start)), found)
    return found


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time of a file; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def open_index(folder: Path) -> Any:
    index = tantivy.Index.open(str(folder))
    index.config_reader("manual")  # no watcher thread: `refresh` reloads
    return index


def open_borrowed(folder: Path) -> Any:
    """Open an index in a read-only folder, where tantivy could not create its lock files.

    The index is opened through symbolic links in a temporary folder, which is not needed once the files are mapped.
    """
    with tempfile.TemporaryDirectory(prefix="stillroom-") as place:
        for file in folder.iterdir():
            if file.suffix != ".lock":
                (Path(place) / file.name).symlink_to(file.absolute())
        index = open_index(Path(place))
        index.reload()
        return index


def disk_error(message: str) -> int | None:
    """Return the errno in a message of tantivy if it is an error of the disk, None if it is one of the content."""
    found = re.search(r"(?:os error |code: )(\d+)", message)
    if found is not None:
        return int(found[1]) if int(found[1]) in _DISK_ERRORS else None
    return errno.EIO if "worker thread" in message else None  # tantivy gives no number then


_DISK_ERRORS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE)
)
