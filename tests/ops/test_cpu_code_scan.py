"""The compiled scan of codes against numpy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.ops.cpu_code_scan import LEAST, WIDTH, centre_products, copy_codes, keep_best, scan_lists

NUM_QUERIES = 3


def made(sizes: list[int], num_subquantizers: int, seed: int) -> tuple[list[Any], list[Any], Any]:
    """Return codes and rows of each list, and tables of all queries."""
    rng = np.random.default_rng(seed)
    codes = [rng.integers(256, size=(size, num_subquantizers), dtype=np.uint8) for size in sizes]
    rows = np.split(rng.permutation(sum(sizes)).astype(np.int64), np.cumsum(sizes)[:-1])
    tables = rng.integers(256, size=(NUM_QUERIES, num_subquantizers, 256), dtype=np.uint8)
    return codes, [np.ascontiguousarray(one) for one in rows], tables


def scanned(  # noqa: PLR0913  what is drawn
    codes: list[Any], rows: list[Any], tables: Any, offsets: Any, bits: Any, num: int, room: int
) -> list[set[tuple[int, int]]]:
    """Return (row, total) of the candidates of each query, which probes every list."""
    lists = (
        np.array([one.ctypes.data for one in codes]),
        np.array([one.ctypes.data for one in rows]),
        np.array([len(one) for one in codes]),
        np.arange(len(codes) + 1) * NUM_QUERIES,
    )
    pairs = np.tile(np.arange(NUM_QUERIES), len(codes)), offsets.T.ravel().astype(np.int32)
    totals, places = np.empty((NUM_QUERIES, room), np.int32), np.empty((NUM_QUERIES, room, 2), np.int64)
    limits, counts = np.full(NUM_QUERIES, LEAST, np.int32), np.zeros(NUM_QUERIES, np.int64)
    begin = np.zeros(3, np.int64)
    while not scan_lists(lists, pairs, tables, bits, (limits, counts, totals, places), begin, num):
        totals = np.concatenate([totals, np.empty_like(totals)], axis=1)
        places = np.concatenate([places, np.empty_like(places)], axis=1)
    found = []
    for query in range(NUM_QUERIES):
        count = int(counts[query])
        if count > num:
            count = keep_best(totals[query], places[query], count, num, tables.shape[1] + 2)[0]
        kept = zip(totals[query, :count].tolist(), places[query, :count].tolist(), strict=True)
        found.append({(int(rows[pair // NUM_QUERIES][at]), total) for total, (pair, at) in kept})
    return found


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    num_subquantizers=st.integers(1, 9),
    num=st.integers(1, 50),
    extra_room=st.integers(0, 200),
    is_filtered=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_candidates_are_those_that_may_be_among_the_best(
    sizes: list[int], num_subquantizers: int, num: int, extra_room: int, is_filtered: bool, seed: int
) -> None:
    codes, rows, tables = made(sizes, num_subquantizers, seed)
    rng = np.random.default_rng(seed)
    offsets = rng.integers(-300, 300, size=(NUM_QUERIES, len(sizes)))
    is_allowed = rng.random(sum(sizes)) < (0.3 if is_filtered else 1)
    bits = np.packbits(is_allowed, bitorder="little") if is_filtered else np.empty(0, np.uint8)
    found = scanned(codes, rows, tables, offsets, bits, num, num + WIDTH + extra_room)
    for query in range(NUM_QUERIES):
        everything = [
            (int(row), int(offset + tables[query, np.arange(num_subquantizers), code].astype(int).sum()))
            for own, own_rows, offset in zip(codes, rows, offsets[query], strict=True)
            for code, row in zip(own, own_rows, strict=True)
            if is_allowed[row]
        ]
        totals = sorted((total for _, total in everything), reverse=True)
        limit = totals[num - 1] - (num_subquantizers + 2) if len(totals) > num else -(10**9)
        assert found[query] == {one for one in everything if one[1] >= limit}


@pytest.mark.parametrize("num_queries", [1, 3, 4, 6])
@pytest.mark.parametrize("num_centres", [1, 2, 7])
def test_products_with_centres(num_queries: int, num_centres: int) -> None:
    rng = np.random.default_rng(num_queries)
    queries = rng.standard_normal((num_queries, 37)).astype(np.float32)
    centres = rng.standard_normal((num_centres, 37)).astype(np.float32)
    out = np.empty((num_queries, num_centres), np.float32)
    centre_products(queries, centres, out)
    assert out == pytest.approx(queries @ centres.T, abs=1e-4)


def test_codes_and_rows_are_copied_from_their_addresses() -> None:
    codes, rows = np.arange(12, dtype=np.uint8).reshape(4, 3), np.array([5, -1, 7, 2**40])
    found, found_rows = np.empty((2, 3), np.uint8), np.empty(2, np.int64)
    at = np.array([3, 0])
    copy_codes(codes.ctypes.data + 3 * at, rows.ctypes.data + 8 * at, found, found_rows)
    assert found.tolist() == [[9, 10, 11], [0, 1, 2]] and found_rows.tolist() == [2**40, 5]
