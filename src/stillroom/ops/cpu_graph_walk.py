"""Compiled search of an HNSW graph that can be paused and resumed.

Algorithms 2 and 5 of Malkov and Yashunin (2018), on the arrays of faiss. The beam holds the best rows seen so far, best
first; ties go to the lower row. A step expands the best row that is not expanded yet: it scores the neighbours that are
not marked as seen. When every row is expanded, the beam is the answer.

A list is an array of keys that sort as its rows do: the negated score in the upper half, then the row, and in the
lowest bit whether the row is expanded. Reference: tests/ops/test_cpu_graph_walk.py.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.ops.cpu_compiler import Floats, as_bits, kernel

# N rows (fewer than 2^31), D dimensions, E beam, K results

SEEN = np.uint8(1)
HIDDEN = np.uint8(2)
"""A row that may be expanded and is never a result."""

_EXPANDED = 1
_LOW_31 = 0x7FFFFFFF


def rows_of(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    return (keys >> 1) & _LOW_31


@kernel
def _key(score: Any, row: int) -> Any:
    """Return a key that is smaller for a higher score, and for a lower row at equal scores."""
    bits = np.int64(np.int32(as_bits(score)))
    ascending = bits ^ ((bits >> 63) & _LOW_31)  # bits of negative floats descend
    return (~ascending << 32) | (row << 1)


@kernel
def _dot(query: Floats, vectors: Floats, row: int) -> Any:
    total = np.float32(0)
    for i in range(query.shape[0]):
        total += query[i] * vectors[row, i]
    return total


@kernel
def _score(query: Floats, vectors: Floats, rows: Any, num_rows: int, scores: Floats) -> None:
    """Score the first `num_rows` rows, four at a time, so that four reads from memory overlap."""
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
    """Insert a key into a sorted list of `count`; a full list drops its last key.

    Returns:
        The key's index; `count` if the list is full and the key comes after all of it.
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
def _add_row(lists: Any, marks: Any, score: Any, row: int) -> int:
    """Insert a row into the beam and the results; returns its index in the beam, as `_insert`."""
    beam, found, counts = lists
    key = _key(score, row)
    if len(found) > 0 and not marks[row] & HIDDEN:
        counts[1] += _insert(found, counts[1], key) < len(found) and counts[1] < len(found)
    place = _insert(beam, counts[0], key)
    counts[0] += place < len(beam) and counts[0] < len(beam)
    return place


@kernel
def _first_unexpanded(beam: Any, start: int, count: int) -> int:
    while start < count and beam[start] & _EXPANDED:
        start += 1
    return start


@kernel
def _nearest_above(query: Floats, graph: Any, row: Any, level: int) -> Any:
    """Descend greedily to level 0; returns the row that is nearer than its neighbours on the level above."""
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
    """Start a walk: put its first row on level 0 into the beam. Arguments as for `walk`.

    Args:
        entry: row and level of the graph's entry point.
    """
    row = _nearest_above(query, graph, entry[0], entry[1])
    _add_row(lists, marks, _dot(query, graph[0], row), row)
    marks[row] |= SEEN


@kernel
def walk(query: Floats, graph: Any, lists: Any, marks: Any, num_steps: int) -> bool:
    """Run up to `num_steps` steps.

    Args:
        query: [D]
        graph: vectors [N, D]; neighbours of all rows and levels, int32, padded with -1; start of each row's neighbours
            [N + 1]; start of each level's neighbours among them.
        lists: the beam [E]; the best rows that are not hidden [K], empty if no row is hidden; the length of both [2].
        marks: [N], flags `SEEN` and `HIDDEN`.

    Returns:
        Whether the walk has ended.
    """
    vectors, neighbours, offsets, level_starts = graph
    beam, _, counts = lists
    width = level_starts[1]
    fresh, scores = np.empty(width, dtype=np.int64), np.empty(width, dtype=np.float32)
    next_unexpanded = _first_unexpanded(beam, 0, counts[0])
    for _ in range(num_steps):
        if next_unexpanded == counts[0]:
            break
        row = (beam[next_unexpanded] >> 1) & _LOW_31
        beam[next_unexpanded] |= _EXPANDED
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
            next_unexpanded = min(next_unexpanded, _add_row(lists, marks, scores[at], fresh[at]))
        next_unexpanded = _first_unexpanded(beam, next_unexpanded, counts[0])
    return bool(next_unexpanded == counts[0])
