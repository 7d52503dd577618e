"""Attention of many queries in bfloat16 products, fused with its softmax (flash attention, Dao et al. 2022).

Queries of a block and the query heads of one key/value head are the lanes of vectors, and the keys are walked through:
maxima and sums of the softmax need no sum over lanes, and keys are read where they lie. The softmax is merged every
`PART` keys, at multiples of `PART` from the context's beginning. So a query's result depends neither on the other
queries of the step nor on the number of threads: it is the same bits behind a kept prefix as without one.

Queries and softmax weights are rounded to bfloat16, sums are float32. Reference: `attention.attend_reference`.
"""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from stillroom.ops.cpu_blocks import dot_block
from stillroom.ops.cpu_compiler import HAS_TILES, Bits, Floats, inlined, kernel, parallel_kernel
from stillroom.ops.cpu_tiles import CONFIG, TILE, configure_tiles, release_tiles, tile_block, transpose
from stillroom.ops.cpu_vectors import (
    LANES,
    add,
    any_greater,
    divide,
    greater,
    interleave,
    load,
    multiply,
    multiply_add,
    power_of_two,
    splat,
    store,
    store_pairs,
    where_between,
)

# Q queries, H query heads, G key/value heads, D head dimension, S slots, W lanes of a block of queries

BLOCK = 64
"""Keys that are scored at a time, and the most lanes of a block of queries."""
PART = 512
"""Keys after which the softmax is merged."""
_MIN_TASKS = 8
"""Blocks that few queries are split into at least, so that each thread has some."""

_LOG2_E = np.float32(1.4426950408889634)
_LOWEST = np.float32(-1e20)
"""Less than any logit; the highest logit of a query that sees no key of a part."""
_UNSEEN = np.float32(-1e30)
_MOST_ROWS = 8
_dot_4x64, _dot_4x48, _dot_8x32, _dot_8x16 = (dot_block(4, 64), dot_block(4, 48), dot_block(8, 32), dot_block(8, 16))
"""Few sums in registers leave the processor waiting for its own additions, so narrow blocks have more rows."""
_PAIRS = BLOCK // 2
_tiles_2x2, _tiles_2x1 = tile_block(2, 2), tile_block(2, 1)


@inlined
def _rows_at_once(width: Any) -> Any:
    """Return the number of rows that `_products` multiplies; it divides 16."""
    return 4 if width == 48 or width == 64 else _MOST_ROWS


@kernel
def _products(  # noqa: PLR0913  a kernel's call
    sums: Floats, first: Any, width: Any, x: Any, x_at: Any, x_step: Any, y: Bits, num_pairs: Any, is_added: Any
) -> None:
    """Multiply `_rows_at_once` rows with all columns of y [num_pairs, width]."""
    if width == 64:
        _dot_4x64(sums, first, width, x, x_at, x_step, y, 0, num_pairs, is_added)
    elif width == 48:
        _dot_4x48(sums, first, width, x, x_at, x_step, y, 0, num_pairs, is_added)
    elif width == 32:
        _dot_8x32(sums, first, width, x, x_at, x_step, y, 0, num_pairs, is_added)
    else:
        for column in range(0, width, LANES):
            _dot_8x16(sums, first + column, width, x, x_at, x_step, y, column, num_pairs, is_added)


@kernel
def _multiply_tiles(sums: Floats, num_rows: Any, x: Any, y: Bits, is_added: Any) -> None:
    """Multiply `num_rows` rows of x, a multiple of 32, with all columns of y [num_pairs, width]; sums [.., width]."""
    num_pairs, width = y.shape
    step = x.shape[1]
    at = np.empty(2, np.int64)
    for row in range(0, num_rows, 2 * TILE):
        at[0], at[1] = row * step, (row + TILE) * step
        for column in range(0, width, 2 * TILE):
            place = row * width + column
            if column + TILE < width:
                _tiles_2x2(sums, place, width, x, at, step, y, column, num_pairs // TILE, is_added, at)
            else:
                _tiles_2x1(sums, place, width, x, at, step, y, column, num_pairs // TILE, is_added, at)


@kernel
def _score_tiles(k_SGD: Bits, slots: Any, group: Any, queries: Bits, keys: Bits, logits: Floats) -> None:
    """As `_score`, with tiles (`cpu_tiles`); the keys are copied to `keys` [BLOCK, D] first."""
    num_keys, head_dim = len(slots), k_SGD.shape[2]
    for key in range(num_keys):
        row, copied = k_SGD[slots[key], group], keys[key]
        for i in range(head_dim):
            copied[i] = row[i]
    _multiply_tiles(logits, 2 * TILE * ((num_keys + 2 * TILE - 1) // (2 * TILE)), keys, queries, False)


@kernel
def _add_values_tiles(values: Bits, columns: Bits, weights: Bits, sums: Floats) -> None:
    """Add the values, pairs of keys [BLOCK / 2, D], times the weights [BLOCK / 2, W] to the sums [D, W].

    Args:
        columns: room for the values as columns, [D, BLOCK / 2].
    """
    head_dim = values.shape[1]
    for i in range(0, head_dim, TILE):
        for pair in range(0, _PAIRS, TILE):
            transpose(values, pair * head_dim + i, head_dim, columns, i * _PAIRS + pair, _PAIRS)
    _multiply_tiles(sums, head_dim, columns, weights, True)


@kernel
def _score(k_SGD: Bits, slots: Any, group: Any, queries: Bits, logits: Floats) -> None:
    """Write the products of the keys at `slots` with the queries [D / 2, W]: float32 [BLOCK, W]."""
    num_kv_heads, head_dim = k_SGD.shape[1], k_SGD.shape[2]
    at, num_rows = np.empty(_MOST_ROWS, np.int64), _rows_at_once(logits.shape[1])
    for key in range(0, BLOCK, num_rows):
        for row in range(num_rows):
            slot = slots[min(key + row, len(slots) - 1)]  # after the last key, it is scored again and masked
            at[row] = (slot * num_kv_heads + group) * head_dim
        _products(logits, key * logits.shape[1], logits.shape[1], k_SGD, at, 2, queries, head_dim // 2, False)
        if key + num_rows >= len(slots):
            break


@kernel
def _limit(logits: Floats, first_key: Any, bounds: Any, limits: Any) -> None:
    """Cap logits [BLOCK, W], which turns them into powers of two, and mark those that a query does not see."""
    width = logits.shape[1]
    scale, cap = limits[0], limits[1]
    unseen = splat(_UNSEEN)
    for column in range(0, width, LANES):
        low, high = load(bounds[0], column), load(bounds[1], column)
        for key in range(BLOCK):
            at = key * width + column
            x = load(logits, at)
            if cap > 0:  # cap * tanh(x / cap)
                power = power_of_two(multiply(x, splat(scale * 2 * _LOG2_E / cap)))
                share = divide(splat(np.float32(-2)), add(power, splat(np.float32(1))))
                x = multiply(splat(cap * _LOG2_E), add(share, splat(np.float32(1))))
            store(logits, at, where_between(x, low, splat(np.float32(first_key + key)), high, unseen))


@kernel
def _weigh(logits: Floats, factor: Any, highs: Floats, totals: Floats, weights: Bits, sums: Floats) -> None:
    """Turn logits times `factor`, powers of two, into weights, pairs of keys [BLOCK / 2, W]; update the softmax."""
    width, head_dim = logits.shape[1], sums.shape[0]
    scale = splat(factor)
    for column in range(0, width, LANES):
        before, lowest = load(highs, column), splat(_UNSEEN)
        a, b, c, d = lowest, lowest, lowest, lowest
        for at in range(column, BLOCK * width, 4 * width):
            a, b = greater(load(logits, at), a), greater(load(logits, at + width), b)
            c, d = greater(load(logits, at + 2 * width), c), greater(load(logits, at + 3 * width), d)
        high = greater(before, multiply(greater(greater(a, b), greater(c, d)), scale))
        total = load(totals, column)
        if any_greater(high, before):
            store(highs, column, high)
            fade = power_of_two(add(before, multiply(high, splat(np.float32(-1)))))
            total = multiply(total, fade)
            for row in range(head_dim):
                store(sums, row * width + column, multiply(load(sums, row * width + column), fade))
        minus = multiply(high, splat(np.float32(-1)))
        second = splat(np.float32(0))
        for pair in range(BLOCK // 2):
            at = 2 * pair * width + column
            low = power_of_two(multiply_add(load(logits, at), scale, minus))
            odd = power_of_two(multiply_add(load(logits, at + width), scale, minus))
            total, second = add(total, low), add(second, odd)
            store_pairs(weights, pair * width + column, low, odd)
        store(totals, column, add(total, second))


@kernel
def _gather(
    q_QHD: Floats, rows: Any, share: Any, seen: tuple[Any, Any], queries: Bits, bounds: tuple[Floats, Floats]
) -> None:
    """Write queries of `rows` as lanes, pairs of dimensions [D / 2, W], and the keys that each lane sees, [W] each."""
    first, end, group = rows
    num_pairs, width = queries.shape
    low, high = bounds
    low[:], high[:] = 0, 0
    flat = np.zeros(2 * num_pairs * width, np.float32)
    for query in range(first, end):
        for head in range(share):
            lane = (query - first) * share + head
            low[lane], high[lane] = seen[0][query], seen[1][query]
            for i in range(2 * num_pairs):
                flat[i * width + lane] = q_QHD[query, group * share + head, i]
    for pair in range(num_pairs):
        for column in range(0, width, LANES):
            at = 2 * pair * width + column
            store_pairs(queries, pair * width + column, load(flat, at), load(flat, at + width))


@kernel
def _attend_part(  # noqa: C901, PLR0913  a kernel is one function
    queries: Bits,
    group: Any,
    cache: tuple[Bits, Bits],
    slots: Any,
    bounds: tuple[Floats, Floats],
    unmasked: Any,
    keys: Any,
    limits: Any,
    kept: tuple[Floats, Floats, Floats],
) -> None:
    """Attend from queries [D / 2, W] of a key/value head to the context's `keys` (first, end).

    Args:
        slots: of the context.
        bounds: first key and end of the keys that each lane sees [W].
        unmasked: first key and end of the keys that all of them see.
        kept: gets the highest power of two and the sum of weights of each lane [W], and the weighted sums [D, W].
    """
    k_SGD, v_SGD = cache
    highs, totals, sums = kept
    num_kv_heads, (head_dim, width) = k_SGD.shape[1], sums.shape
    highs[:], totals[:], sums[:] = _LOWEST, 0, 0
    logits, weights = np.zeros((BLOCK, width), np.float32), np.zeros((BLOCK // 2, width), np.uint32)
    values, at = np.zeros((BLOCK // 2, head_dim), np.uint32), np.zeros(_MOST_ROWS, np.int64)
    num_rows, has_tiles = _rows_at_once(width), HAS_TILES and head_dim % (2 * TILE) == 0
    size = head_dim if has_tiles else 0
    copies, columns = np.zeros((BLOCK, size), np.uint16), np.zeros((size, _PAIRS), np.uint32)
    if has_tiles:
        configure_tiles(CONFIG)
    for start in range(keys[0], keys[1], BLOCK):
        stop = min(start + BLOCK, keys[1])
        if has_tiles:
            _score_tiles(k_SGD, slots[start:stop], group, queries, copies, logits)
        else:
            _score(k_SGD, slots[start:stop], group, queries, logits)
        factor = np.float32(1) if limits[1] > 0 else limits[0] * _LOG2_E
        if limits[1] > 0 or start < unmasked[0] or start + BLOCK > min(unmasked[1], stop):
            _limit(logits, start, bounds, limits)
        _weigh(logits, factor, highs, totals, weights, sums)
        for pair in range(BLOCK // 2):
            even, odd = start + 2 * pair, start + 2 * pair + 1
            even_at = (slots[even] * num_kv_heads + group) * head_dim if even < stop else -1 - head_dim
            odd_at = (slots[odd] * num_kv_heads + group) * head_dim if odd < stop else -1 - head_dim
            for i in range(0, head_dim, LANES):
                interleave(values, pair * head_dim + i, v_SGD, even_at + i, odd_at + i)
        if has_tiles:
            _add_values_tiles(values, columns, weights, sums)
            continue
        for i in range(0, head_dim, num_rows):
            for row in range(num_rows):
                at[row] = i + row
            _products(sums, i * width, width, values, at, head_dim, weights, BLOCK // 2, True)
    if has_tiles:
        release_tiles()


@inlined
def _merge(kept: Any, part: Any) -> None:
    """Add the softmax of a later part to that of the parts before it."""
    highs, totals, sums = kept
    for column in range(0, sums.shape[1], LANES):
        before, after = load(highs, column), load(part[0], column)
        high = greater(before, after)
        minus = multiply(high, splat(np.float32(-1)))
        a, b = power_of_two(add(before, minus)), power_of_two(add(after, minus))
        store(highs, column, high)
        store(totals, column, add(multiply(load(totals, column), a), multiply(load(part[1], column), b)))
        for row in range(sums.shape[0]):
            at = row * sums.shape[1] + column
            store(sums, at, add(multiply(load(sums, at), a), multiply(load(part[2], at), b)))


@inlined
def _finish(kept: Any, rows: Any, share: Any, out_QHD: Any) -> None:
    _, totals, sums = kept
    first, end, group = rows
    for query in range(first, end):
        for head in range(share):
            lane = (query - first) * share + head
            scale = np.float32(1) / totals[lane]
            for i in range(sums.shape[0]):
                out_QHD[query, group * share + head, i] = sums[i, lane] * scale


@parallel_kernel
def attend_blocks(  # noqa: PLR0913  a kernel is one function
    q_THD: Floats,
    cache: tuple[Bits, Bits],
    contexts: tuple[Any, Any],
    seen: tuple[Any, Any],
    tasks: Any,
    limits: Any,
    out_THD: Floats,
    num_threads: int,
) -> None:
    """Attention of queries over their contexts; rows of no task stay as they are.

    Args:
        cache: keys and values, bits of bfloat16 [S, G, D].
        contexts: slots of all contexts back to back, and their bounds [B + 1].
        seen: first key and end of the keys that each query sees, counted from its context's beginning, int64 [T].
        tasks: from `split_queries`.
        limits: float32 (scale, soft cap or 0, and what is not read).
    """
    slots, bounds = contexts
    num_heads, head_dim = q_THD.shape[1], q_THD.shape[2]
    num_kv_heads = cache[0].shape[1]
    share, num_blocks = num_heads // num_kv_heads, len(tasks)
    for thread in numba.prange(num_threads):
        for number in range(num_blocks * num_kv_heads):
            turn, place = number // num_threads, number % num_threads
            if (place if turn % 2 == 0 else num_threads - 1 - place) != thread:
                continue
            span, first, end = tasks[number // num_kv_heads]
            rows = (first, end, number % num_kv_heads)
            width = LANES * ((((end - first) * share) + LANES - 1) // LANES)
            context = slots[bounds[span] : bounds[span + 1]]
            low, high, last_low, first_high = seen[0][first], seen[1][first], seen[0][first], seen[1][first]
            for query in range(first, end):
                low, high = min(low, seen[0][query]), max(high, seen[1][query])
                last_low, first_high = max(last_low, seen[0][query]), min(first_high, seen[1][query])
            unmasked = (last_low, first_high)
            queries = np.empty((head_dim // 2, width), np.uint32)
            sees = (np.empty(width, np.float32), np.empty(width, np.float32))
            _gather(q_THD, rows, share, seen, queries, sees)
            kept = (np.empty(width, np.float32), np.empty(width, np.float32), np.empty((head_dim, width), np.float32))
            part = (np.empty(width, np.float32), np.empty(width, np.float32), np.empty((head_dim, width), np.float32))
            start = low // PART * PART
            keys = (start, min(high, start + PART))
            _attend_part(queries, rows[2], cache, context, sees, unmasked, keys, limits, kept)
            for start in range(low // PART * PART + PART, high, PART):
                keys = (start, min(high, start + PART))
                _attend_part(queries, rows[2], cache, context, sees, unmasked, keys, limits, part)
                _merge(kept, part)
            _finish(kept, rows, share, out_THD)


def split_queries(bounds: NDArray[np.int64], share: int, num_kv_heads: int) -> NDArray[np.int64]:
    """Return blocks of queries, dearest last query first: span, first query and end [n, 3].

    Args:
        bounds: first query and end of each span [B, 2].
        share: query heads per key/value head.
    """
    found = []
    for span, (first, end) in enumerate(bounds.tolist()):
        most = max(1, BLOCK // share)
        # few queries are split further, so that there are a few tasks for each thread
        fair = -(-(end - first) * num_kv_heads // _MIN_TASKS)
        size = max(min(most, fair), min(most, max(1, LANES // share)))
        found += [(span, start, min(end, start + size)) for start in range(first, end, size)]
    return np.array(found[::-1], dtype=np.int64).reshape(-1, 3)
