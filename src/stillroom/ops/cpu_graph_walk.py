"""The search of an HNSW graph, compiled so that it can be paused and resumed.

Algorithms 2 and 5 of Malkov and Yashunin (2018), on the arrays of faiss. The beam holds the best rows seen so far, best
first; of equal scores the lower row is the better one. A step expands the best row that has not been expanded yet: it
scores those of its neighbours that nobody has seen. When none is left to expand, the beam is the answer.

A list is an array of numbers that sort as its rows do: the score, turned round, in the upper half; then the row, and in
the lowest bit whether it was expanded. The slow twin: tests/ops/test_cpu_graph_walk.py.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.ops.cpu_compiler import Floats, as_bits, kernel

# N rows (fewer than 2^31), D dimensions, E beam, K results

SEEN = np.uint8(1)
HIDDEN = np.uint8(2)
"""A row that is walked over and never a result."""

_EXPANDED = 1
_LOW_31 = 0x7FFFFFFF


def rows_of(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows of a list."""
    return (keys >> 1) & _LOW_31


@kernel
def _key(score: Any, row: int) -> Any:
    """Smaller for a higher score, and for a lower row where scores are equal."""
    bits = np.int64(np.int32(as_bits(score)))
    ascending = bits ^ ((bits >> 63) & _LOW_31)  # the bits of negative numbers run backward
    return (~ascending << 32) | (row << 1)


@kernel
def _dot(query: Floats, vectors: Floats, row: int) -> Any:
    total = np.float32(0)
    for i in range(query.shape[0]):
        total += query[i] * vectors[row, i]
    return total


@kernel
def _score(query: Floats, vectors: Floats, rows: Any, num_rows: int, scores: Floats) -> None:
    """Of the first rows [num_rows]; four at a time, so that the processor waits for four rows of memory at once."""
    num_in_fours = num_rows - num_rows % 4
    for start in range(0, num_in_fours, 4):
        a, b, c, d = rows[start], rows[start + 1], rows[start + 2], rows[start + 3]
        first = second = third = fourth = np.float32(0)
        for i in range(query.shape[0]):
            x = query[i]
            first += x * vectors[a, i]
            second += x * vectors[b, i]
            third += x * vectors[c, i]
            fourth += x * vectors[d, i]
        scores[start], scores[start + 1], scores[start + 2], scores[start + 3] = first, second, third, fourth
    for at in range(num_in_fours, num_rows):
        scores[at] = _dot(query, vectors, rows[at])


@kernel
def _insert(keys: Any, count: int, key: int) -> int:
    """Put a key into a list of `count`, of which the last falls out where it is full.

    Returns:
        Its place; the list's length where it is not good enough.
    """
    if count == len(keys) and key > keys[count - 1]:
        return count
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    for at in range(min(count, len(keys) - 1), low, -1):
        keys[at] = keys[at - 1]
    keys[low] = key
    return low


@kernel
def _take(lists: Any, marks: Any, score: Any, row: int) -> int:
    """Put a row into the beam and among the results; returns its place in the beam, as `_insert`."""
    beam, found, counts = lists
    key = _key(score, row)
    if len(found) > 0 and not marks[row] & HIDDEN:
        counts[1] += _insert(found, counts[1], key) < len(found) and counts[1] < len(found)
    place = _insert(beam, counts[0], key)
    counts[0] += place < len(beam) and counts[0] < len(beam)
    return place


@kernel
def _first_open(beam: Any, start: int, count: int) -> int:
    while start < count and beam[start] & _EXPANDED:
        start += 1
    return start


@kernel
def _nearest_above(query: Floats, graph: Any, row: Any, level: int) -> Any:
    """Walk down to level 0, at each level to the row that is nearer than all its neighbours."""
    vectors, neighbours, offsets, level_starts = graph
    best = _dot(query, vectors, row)
    while level > 0:
        start, stop = offsets[row] + level_starts[level], offsets[row] + level_starts[level + 1]
        is_best = True
        for at in range(start, stop):
            if neighbours[at] < 0:
                break
            score = _dot(query, vectors, neighbours[at])
            if score > best:
                best, row, is_best = score, np.int64(neighbours[at]), False
        if is_best:
            level -= 1
    return row


@kernel
def enter(query: Floats, graph: Any, entry: Any, lists: Any, marks: Any) -> None:
    """Start a walk: the beam holds the row of level 0 at which it begins. Arguments as those of `walk`.

    Args:
        entry: row and level of the graph's entry.
    """
    row = _nearest_above(query, graph, entry[0], entry[1])
    _take(lists, marks, _dot(query, graph[0], row), row)
    marks[row] |= SEEN


@kernel
def walk(query: Floats, graph: Any, lists: Any, marks: Any, num_steps: int) -> bool:
    """Up to `num_steps` steps on.

    Args:
        query: [D]
        graph: vectors [N, D]; neighbours of all rows and levels, int32, -1 fills up; where each row's begin [N + 1];
            where each level's begin among them.
        lists: the beam [E]; the best that are not hidden [K], where any are; how many there are in both [2].
        marks: [N], of `SEEN` and `HIDDEN`.

    Returns:
        Whether the walk is at its end.
    """
    vectors, neighbours, offsets, level_starts = graph
    beam, _, counts = lists
    width = level_starts[1]
    fresh, scores = np.empty(width, dtype=np.int64), np.empty(width, dtype=np.float32)
    next_open = _first_open(beam, 0, counts[0])
    for _ in range(num_steps):
        if next_open == counts[0]:
            break
        row = (beam[next_open] >> 1) & _LOW_31
        beam[next_open] |= _EXPANDED
        num_fresh = 0
        for at in range(offsets[row], offsets[row] + width):
            neighbour = np.int64(neighbours[at])
            if neighbour < 0:
                break
            if not marks[neighbour] & SEEN:
                marks[neighbour] |= SEEN
                fresh[num_fresh] = neighbour
                num_fresh += 1
        _score(query, vectors, fresh, num_fresh, scores)
        for at in range(num_fresh):
            next_open = min(next_open, _take(lists, marks, scores[at], fresh[at]))
        next_open = _first_open(beam, next_open, counts[0])
    return bool(next_open == counts[0])
