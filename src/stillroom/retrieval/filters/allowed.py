"""Sets of chunk ids that a filter allows, and a memo of what an index derives from them."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


class AllowedIds:
    """Immutable set of chunk ids. Equal only to itself, so it can key a memo."""

    def __init__(self, ids: NDArray[np.int64]) -> None:
        """Take over `ids`, which are ascending."""
        self.ids = ids
        self.ids.setflags(write=False)

    def __len__(self) -> int:
        return len(self.ids)

    def has(self, ids: NDArray[np.int64] | Sequence[int]) -> NDArray[np.bool_]:
        """Mask [n] of the given ids that are in the set."""
        asked = np.asarray(ids, dtype=np.int64)
        if not len(self.ids):
            return np.zeros(len(asked), dtype=bool)
        places = np.searchsorted(self.ids, asked)
        found: NDArray[np.bool_] = self.ids[np.minimum(places, len(self.ids) - 1)] == asked
        return found


class FilterMemo(Generic[T]):
    """Values that an index derives from `AllowedIds`, kept while the set lives and the index does not change."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[AllowedIds, T] = WeakKeyDictionary()

    def get(self, allowed: AllowedIds, make: Callable[[], T]) -> T:
        made = self._made.get(allowed)
        if made is None:
            made = self._made[allowed] = make()
        return made

    def clear(self) -> None:
        """Forget all values. Called when the index changes."""
        self._made.clear()
