"""Records of a shared tier in a folder that several machines mount. No torch.

Layout: `<folder>/<namespace>/<fingerprint>/<first two digits of the key>/<key>.kv`, as on a process's own disk. A
record appears whole under its name by a rename, so that readers need no locks. A record's header names the chunks that
it has seen; there is no index to lose. As a folder evicts nothing itself, `maintain` removes the oldest records.
"""

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NodeKey, OwnerTag
from stillroom.kvstore.files import (
    TEMPORARY_SUFFIX,
    fingerprints,
    folder_of,
    in_blocks,
    path_of,
    record_paths,
    records_to_forget,
    remove_file,
    remove_files,
    write_file,
)
from stillroom.kvstore.record import Buffer
from stillroom.kvstore.shared.records import TierFullError, namespace

_SHARE_PER_SWEEP = 16
"""A sweep lists the folder after this part of its size was written by this process."""
_SWEEP_SECONDS = 600.0
_STALE_SECONDS = 3600.0
"""Temporary files older than this were left by killed processes."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""Errors of a file system without room, and of a user's quota."""


class FolderRecords:
    def __init__(  # noqa: PLR0913  plain values, given once
        self,
        folder: Path,
        fingerprint: bytes,
        *,
        group: str = "",
        trailer_size: int = 0,
        max_bytes: int,
        ttl: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            fingerprint: of the model.
            group: as in `namespace`.
            trailer_size: bytes behind each record, not part of its format.
            max_bytes: of all records in the namespace, of every model.
            ttl: seconds until a record is removed.
            now: seconds since 1970.
        """
        self._root = folder / namespace(group)
        self._folder = folder_of(self._root, fingerprint)
        self._trailer_size = trailer_size
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._now = now
        self._num_written = max_bytes  # a start sweeps
        self._swept_at = float("-inf")

    def num_present(self, keys: Sequence[NodeKey]) -> int:
        os.stat(self._root.parent)  # a folder that is not there is an error, not empty
        for count, key in enumerate(keys):
            if not path_of(self._folder, key).exists():
                return count
        return len(keys)

    def read(self, key: NodeKey, max_bytes: int) -> bytearray | None:
        try:
            with open(path_of(self._folder, key), "rb", buffering=0) as file:
                data = bytearray(min(os.fstat(file.fileno()).st_size, max_bytes))
                view, num_read = memoryview(data), 0
                while num_read < len(data) and (count := file.readinto(view[num_read:])):
                    num_read += count
                return data
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, key: NodeKey, parts: Sequence[Buffer], owner: OwnerTag | None, seen: Collection[ChunkId]) -> None:
        os.stat(self._root.parent)  # a share that is not mounted must not be filled
        path = path_of(self._folder, key)
        temporary = path.with_suffix(f".{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
        try:
            write_file(temporary, parts)
            os.replace(temporary, path)
        except OSError as error:
            remove_file(temporary)
            if error.errno in _FULL:
                raise TierFullError(f"{error.strerror}; free space there, or lower reuse.kv_tier_bytes") from None
            if error.errno in _READ_ONLY:
                raise TierFullError(f"{error.strerror}; let this process write to {self._root.parent}") from None
            raise
        self._num_written += sum(map(len, parts))

    def remove(self, key: NodeKey) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path_of(self._folder, key))

    def forget(self, owner: OwnerTag, chunk_ids: Collection[ChunkId] | None) -> int:
        os.stat(self._root.parent)
        removed = None if chunk_ids is None else frozenset(chunk_ids)
        found = records_to_forget(
            self._root,
            lambda chunk_id: removed is not None and chunk_id not in removed,
            owner,
            trailer_size=self._trailer_size,
            is_all=removed is None,
        )
        num_removed, failures = remove_files(found)
        if failures:
            raise failures[0]
        return num_removed

    def maintain(self) -> None:
        """Remove what is too old, then the oldest records until all fit into the budget."""
        now = self._now()
        is_due = self._num_written * _SHARE_PER_SWEEP >= self._max_bytes or now - self._swept_at >= _SWEEP_SECONDS
        if not is_due or not self._root.is_dir():
            return
        self._num_written, self._swept_at = 0, now
        found: list[tuple[float, int, Path]] = []
        for fingerprint in fingerprints(self._root):
            folder = folder_of(self._root, fingerprint)
            for path in record_paths(folder):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    found.append((status.st_mtime, in_blocks(status.st_size), path))
            for path in folder.glob(f"*/*{TEMPORARY_SUFFIX}"):
                with contextlib.suppress(OSError):
                    if path.stat().st_mtime < now - _STALE_SECONDS:
                        remove_file(path)
        left = sum(size for _, size, _ in found)
        for written_at, size, path in sorted(found):
            if left <= self._max_bytes and written_at >= now - self._ttl:
                break
            left -= size if remove_file(path) else 0

    def close(self) -> None:
        pass
