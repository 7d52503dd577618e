"""Removed chunks whose records in a shared tier are still to be deleted."""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from stillroom.core.ids import ChunkId
from stillroom.core.kv import OwnerTag


@dataclass(slots=True)
class _Removed:
    chunk_ids: set[ChunkId] = field(default_factory=set)
    is_all: bool = False


class Forgetting:
    """Removed chunks by owner. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._removed: dict[OwnerTag, _Removed] = {}

    def __bool__(self) -> bool:
        return bool(self._removed)

    @property
    def num_open(self) -> int:
        """Chunks whose records are still to be deleted; an owner of whom all are counts as one more."""
        with self._lock:
            return sum(len(one.chunk_ids) + one.is_all for one in self._removed.values())

    def add(self, owner: OwnerTag, chunk_ids: Collection[ChunkId] | None) -> None:
        """Note removed chunks of an owner; None: all of them."""
        with self._lock:
            one = self._removed.setdefault(owner, _Removed())
            one.chunk_ids.update(chunk_ids or ())
            one.is_all |= chunk_ids is None

    def covers(self, owner: OwnerTag, seen: Collection[ChunkId | None]) -> bool:
        """Whether a record of an owner that has seen these chunks is to be deleted."""
        with self._lock:
            one = self._removed.get(owner)
            return one is not None and (one.is_all or not one.chunk_ids.isdisjoint(seen))

    def first(self) -> tuple[OwnerTag, frozenset[ChunkId], bool]:
        """Return an owner, its removed chunks, and whether all are removed. Precondition: there is one."""
        with self._lock:
            owner, one = next(iter(self._removed.items()))
            return owner, frozenset(one.chunk_ids), one.is_all

    def remove(self, owner: OwnerTag, chunk_ids: Collection[ChunkId], *, is_all: bool) -> None:
        """Note that the records of what `first` returned are deleted; what was added since stays."""
        with self._lock:
            one = self._removed[owner]
            one.is_all &= not is_all
            one.chunk_ids.difference_update(chunk_ids)
            if not (one.is_all or one.chunk_ids):
                del self._removed[owner]
