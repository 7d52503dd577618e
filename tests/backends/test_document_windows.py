"""Cutting documents into windows: which chunks are prepared together, and behind which others."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stillroom.backends.document_windows import cut_windows
from stillroom.kvcache.tree.provenance import MAX_SEEN
from tests.examples import most_examples

overlaps = st.floats(0.0, 1.0)
documents = st.lists(st.integers(1, 30), max_size=40)
rooms = st.integers(-3, 60)
many_small_chunks = st.lists(st.integers(1, 2), min_size=MAX_SEEN - 10, max_size=3 * MAX_SEEN)


def largest_overlap(lengths: Sequence[int], start: int, room: int, overlap: float) -> int:
    """Return how many chunks directly before `start` may precede it, tried one after the other."""
    allowed = min(math.floor(room * overlap), room - lengths[start])
    return max(
        count
        for count in range(min(start, MAX_SEEN - 1, math.floor(MAX_SEEN * overlap)) + 1)
        if sum(lengths[start - count : start]) <= allowed and max(lengths[start - count : start], default=0) <= room
    )


def check_windows(lengths: Sequence[int], room: int, overlap: float) -> None:
    windows = cut_windows(lengths, room, overlap)
    new = [index for first, known, end in windows for index in range(first + known, end)]
    assert new == [index for index, length in enumerate(lengths) if length <= room]
    for first, known, end in windows:
        start = first + known
        assert 0 <= first <= start < end <= len(lengths)
        assert end - first <= MAX_SEEN and sum(lengths[first:end]) <= room
        assert all(length <= room for length in lengths[first:end]), "a window spans a chunk that is too long"
        assert known == largest_overlap(lengths, start, room, overlap)
        is_full = end - first == MAX_SEEN or sum(lengths[first : end + 1]) > room
        assert end == len(lengths) or is_full, "the window ends although the next chunk fits"
    for (_, _, end), (first, known, _) in pairwise(windows):
        assert all(length > room for length in lengths[end : first + known])


@given(documents, rooms, overlaps)
@example([10, 99, 10, 10], 20, 0.5)
@example([5, 5, 5], 5, 1.0)
@settings(max_examples=most_examples(300), deadline=None)
def test_every_chunk_that_fits_is_new_in_exactly_one_window(lengths: list[int], room: int, overlap: float) -> None:
    check_windows(lengths, room, overlap)


@given(many_small_chunks, st.integers(MAX_SEEN - 5, 2 * MAX_SEEN), overlaps)
@example([1] * (2 * MAX_SEEN), 2 * MAX_SEEN, 0.0)
@example([1] * (MAX_SEEN + 2), 2 * MAX_SEEN, 1.0)
@settings(max_examples=15, deadline=None)
def test_a_window_has_at_most_max_seen_chunks(lengths: list[int], room: int, overlap: float) -> None:
    check_windows(lengths, room, overlap)


@pytest.mark.parametrize(
    ("lengths", "room", "overlap", "windows"),
    [
        ([], 10, 0.25, []),
        ([3, 3, 3], 10, 0.25, [(0, 0, 3)]),
        ([3, 3, 3], 9, 0.25, [(0, 0, 3)]),
        ([4, 4, 4, 4], 8, 0.0, [(0, 0, 2), (2, 0, 4)]),
        ([4, 4, 4, 4], 12, 0.34, [(0, 0, 3), (2, 1, 4)]),
        ([4, 4, 4, 4], 12, 0.33, [(0, 0, 3), (3, 0, 4)]),
        ([2, 2, 2, 2, 2, 2], 8, 0.5, [(0, 0, 4), (2, 2, 6)]),
    ],
)
def test_a_window_begins_with_the_end_of_the_one_before_it(
    lengths: list[int], room: int, overlap: float, windows: list[tuple[int, int, int]]
) -> None:
    assert cut_windows(lengths, room, overlap) == windows


def test_known_chunks_leave_room_for_the_first_new_one() -> None:
    assert cut_windows([2, 2, 2, 2, 7], 8, 1.0) == [(0, 0, 4), (4, 0, 5)]
    assert cut_windows([2, 2, 2, 2, 5], 8, 1.0) == [(0, 0, 4), (3, 1, 5)]


def test_a_chunk_that_is_too_long_is_in_no_window_and_no_window_spans_it() -> None:
    assert cut_windows([2, 2, 9, 2, 2], 8, 1.0) == [(0, 0, 2), (3, 0, 5)]
    assert cut_windows([9, 2, 9, 9], 8, 0.5) == [(1, 0, 2)]


def test_without_room_there_are_no_windows() -> None:
    assert cut_windows([1, 2], 0, 0.25) == cut_windows([1, 2], -5, 0.25) == []


def test_max_seen_counts_known_chunks() -> None:
    windows = cut_windows([1] * (MAX_SEEN + 100), 2 * MAX_SEEN, 0.1)
    known = MAX_SEEN // 10
    assert windows == [(0, 0, MAX_SEEN), (MAX_SEEN - known, known, MAX_SEEN + 100)]
