"""The chunks that a filter allows, as indexes see them."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class AllowedIds:
    """A set of chunks that does not change. Its identity names it: equal only to itself."""

    def __init__(self, ids: NDArray[np.int64]) -> None:
        """`ids`: ascending, no longer anybody else's."""
        self.ids = ids
        self.ids.setflags(write=False)

    def __len__(self) -> int:
        return len(self.ids)

    def has(self, ids: NDArray[np.int64] | Sequence[int]) -> NDArray[np.bool_]:
        """Which of these are in it."""
        asked = np.asarray(ids, dtype=np.int64)
        if not len(self.ids):
            return np.zeros(len(asked), dtype=bool)
        places = np.searchsorted(self.ids, asked)
        found: NDArray[np.bool_] = self.ids[np.minimum(places, len(self.ids) - 1)] == asked
        return found


class FilterMemo(Generic[T]):
    """What an index makes of a set of chunks, kept for as long as the set and the index stay as they are."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[AllowedIds, T] = WeakKeyDictionary()

    def get(self, allowed: AllowedIds, make: Callable[[], T]) -> T:
        made = self._made.get(allowed)
        if made is None:
            made = self._made[allowed] = make()
        return made

    def clear(self) -> None:
        """The index has changed."""
        self._made.clear()
