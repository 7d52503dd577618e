"""A binary heap with look-up, re-key and removal by item (llmds 3.6).

Items with equal keys leave in order of arrival, so decisions are reproducible. Invariants, tested by `check_integrity`:
a parent never comes after its child, and the map of places is exact.
"""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class IndexedHeap(Generic[T]):
    """Items with float keys, smallest first (or largest first with `is_max`).

    O(log n): push, pop, remove, update. O(1): look-up, peek. Items are distinct and hashable.
    """

    def __init__(self, *, is_max: bool = False) -> None:
        self._sign = -1.0 if is_max else 1.0
        self._entries: list[tuple[float, int, T]] = []  # (signed key, arrival, item)
        self._places: dict[T, int] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[T]:
        """Yield all items in arbitrary order."""
        return iter(self._places)

    def key_of(self, item: T) -> float:
        """Return the item's key. Raises KeyError if the item is absent."""
        return self._sign * self._entries[self._places[item]][0]

    def push(self, item: T, key: float) -> None:
        assert item not in self._places, f"{item!r} is in the heap already; update it"
        self._arrivals += 1
        self._entries.append((self._sign * key, self._arrivals, item))
        self._up(len(self._entries) - 1)

    def peek(self) -> tuple[T, float]:
        """Return the first item and its key. Raises IndexError if empty."""
        key, _, item = self._entries[0]
        return item, self._sign * key

    def pop(self) -> tuple[T, float]:
        """Remove and return the first item and its key. Raises IndexError if empty."""
        item, key = self.peek()
        self.remove(item)
        return item, key

    def remove(self, item: T) -> float:
        """Remove an item; return its key. Raises KeyError if the item is absent."""
        place = self._places.pop(item)
        key = self._entries[place][0]
        last = self._entries.pop()
        if place < len(self._entries):
            self._settle(place, last)
        return self._sign * key

    def discard(self, item: T) -> None:
        """Remove an item if it is present."""
        if item in self._places:
            self.remove(item)

    def put(self, item: T, key: float) -> None:
        """Push an item, or change its key if it is present."""
        if item in self._places:
            self.update(item, key)
        else:
            self.push(item, key)

    def update(self, item: T, key: float) -> None:
        """Change an item's key; its arrival among equals stays. Raises KeyError if the item is absent."""
        place = self._places[item]
        self._settle(place, (self._sign * key, self._entries[place][1], item))

    def check_integrity(self) -> None:
        assert len(self._places) == len(self._entries)
        for place, entry in enumerate(self._entries):
            assert self._places[entry[2]] == place, f"{entry[2]!r} is not where the map says"
            assert place == 0 or self._entries[(place - 1) // 2][:2] < entry[:2], f"order is broken at {place}"

    def _settle(self, place: int, entry: tuple[float, int, T]) -> None:
        """Put an entry into a place, then move it up or down until the heap order holds."""
        self._entries[place] = entry
        if place > 0 and entry < self._entries[(place - 1) // 2]:
            self._up(place)
        else:
            self._down(place)

    def _up(self, place: int) -> None:
        entries, places = self._entries, self._places
        entry = entries[place]
        while place > 0:
            parent = (place - 1) // 2
            above = entries[parent]
            if entry >= above:  # arrivals differ, so items are never compared
                break
            entries[place] = above
            places[above[2]] = place
            place = parent
        entries[place] = entry
        places[entry[2]] = place

    def _down(self, place: int) -> None:
        entries, places = self._entries, self._places
        entry, last = entries[place], len(entries) - 1
        while (child := 2 * place + 1) <= last:
            below = entries[child]
            if child < last and entries[child + 1] < below:
                child += 1
                below = entries[child]
            if below >= entry:
                break
            entries[place] = below
            places[below[2]] = place
            place = child
        entries[place] = entry
        places[entry[2]] = place
