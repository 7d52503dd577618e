"""The compiled walk of a graph equals its reference, on random graphs of whole numbers, whose scores are exact."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.ops.cpu_graph_walk import HIDDEN, enter, rows_of, walk
from tests.examples import most_examples

M = 3
"""Most neighbours of a row at a level; twice as many at level 0."""


@dataclass
class RandomGraph:
    """A random graph in the layout of faiss, and as lists of neighbours."""

    vectors: NDArray[np.float32]
    links: list[list[list[int]]]
    """Neighbours of each row at each of its levels."""
    entry: tuple[int, int]

    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        level_starts = np.array([0, *(M * (level + 2) for level in range(9))], dtype=np.int64)
        offsets = np.cumsum([0, *(level_starts[len(levels)] for levels in self.links)], dtype=np.int64)
        neighbours = np.full(offsets[-1], -1, dtype=np.int32)
        for row, levels in enumerate(self.links):
            for level, links in enumerate(levels):
                start = offsets[row] + level_starts[level]
                neighbours[start : start + len(links)] = links
        return self.vectors, neighbours, offsets, level_starts


@st.composite
def graphs(draw: st.DrawFn) -> RandomGraph:
    """Return a graph of 1 to 40 rows in 5 dimensions, some of them equal, with up to three levels."""
    num = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    vectors = rng.integers(-3, 4, size=(num, 5)).astype(np.float32)
    levels = rng.integers(1, 4, size=num)

    def linked(level: int) -> list[int]:
        others = np.flatnonzero(levels > level)
        return list(rng.choice(others, size=min(len(others), int(rng.integers(0, (1 + (level == 0)) * M + 1)))))

    links = [[sorted(set(linked(level))) for level in range(levels[row])] for row in range(num)]
    entry = int(np.argmax(levels))
    return RandomGraph(vectors, links, (entry, int(levels[entry]) - 1))


def slow_walk(
    graph: RandomGraph, query: NDArray[np.float32], ef_search: int, num_steps: int, hidden: set[int]
) -> tuple[list[int], list[int], bool]:
    """Reference: the beam's rows, all seen rows that are not hidden, best first, and whether the walk has ended."""
    scores = (graph.vectors @ query).tolist()

    def best_first(rows: set[int]) -> list[int]:
        return sorted(rows, key=lambda row: (-scores[row], row))

    row, level = graph.entry
    while level > 0:
        nearest = max(graph.links[row][level], key=lambda other: scores[other], default=row)
        if scores[nearest] > scores[row]:
            row = nearest
        else:
            level -= 1
    seen, beam, expanded = {row}, [row], set()
    for _ in range(num_steps):
        still_open = [row for row in beam if row not in expanded]
        if not still_open:
            break
        expanded.add(still_open[0])
        fresh = set(graph.links[still_open[0]][0]) - seen
        seen |= fresh
        beam = best_first({*beam, *fresh})[:ef_search]
    return beam, best_first(seen - hidden), not {*beam} - expanded


@settings(max_examples=most_examples(300), deadline=None)
@given(
    graph=graphs(),
    ef_search=st.integers(1, 12),
    pauses=st.lists(st.integers(0, 5), max_size=6),
    seed=st.integers(0, 1000),
    share_hidden=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
)
def test_paused_walk_has_the_state_of_its_reference(
    graph: RandomGraph, ef_search: int, pauses: list[int], seed: int, share_hidden: float
) -> None:
    rng = np.random.default_rng(seed)
    query = rng.integers(-3, 4, size=5).astype(np.float32)
    hidden = np.flatnonzero(rng.random(len(graph.vectors)) < share_hidden)
    k = int(rng.integers(1, ef_search + 1))
    marks = np.zeros(len(graph.vectors), dtype=np.uint8)
    marks[hidden] = HIDDEN
    counts = np.zeros(2, dtype=np.int64)
    beam, found = np.empty(ef_search, dtype=np.int64), np.empty(k if len(hidden) else 0, dtype=np.int64)
    arrays = graph.arrays()
    enter(query, arrays, graph.entry, (beam, found, counts), marks)
    num_steps = 0
    for more in [0, *pauses, 1000]:
        num_steps += more
        is_done = walk(query, arrays, (beam, found, counts), marks, more)
        slow_beam, slow_found, slow_is_done = slow_walk(graph, query, ef_search, num_steps, {*hidden.tolist()})
        assert rows_of(beam[: counts[0]]).tolist() == slow_beam
        assert is_done == slow_is_done
        if len(hidden):
            assert rows_of(found[: counts[1]]).tolist() == slow_found[:k]
    assert is_done
