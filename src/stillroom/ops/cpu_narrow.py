"""The kernels of `ops/narrow.py` on a CPU, compiled by numba; tests/ops/test_narrow.py compares them with torch.

KV may be bfloat16, which numba sees as bits. Each task is one group of tokens in one layer.
"""

from typing import Any

import numba
import numpy as np

from stillroom.ops.cpu_compiler import SIXTEEN, Bits, Floats, as_bits, as_float, inlined, kernel, parallel_kernel
from stillroom.ops.cpu_elements import read, write

_ROUND_UP = np.uint32(0xFFFF)
_SIGN = np.uint32(31)
_LEAST_STEP = np.float32(1e-30)
"""Steps below it count as 0, so that dividing by them does not overflow."""


@inlined
def _above(value: Any) -> Any:
    """The least bfloat16 that is at least a float32 of 0 or more; 0 for the smallest."""
    if value < _LEAST_STEP:
        return np.float32(0)
    return as_float(((as_bits(value) + _ROUND_UP) >> SIXTEEN) << SIXTEEN)


@inlined
def _below(value: Any) -> Any:
    """The greatest bfloat16 that is at most a float32."""
    bits = as_bits(value)
    return as_float(((bits + _ROUND_UP * (bits >> _SIGN)) >> SIXTEEN) << SIXTEEN)


@inlined
def _scale_of(least: Any, most: Any, num_bits: Any) -> Any:
    """Step and low of the scale for numbers in this range; see `ops.narrow`."""
    low = _below(least)
    return _above((most - low) / np.float32(2**num_bits - 1)), low


@inlined
def _code(value: Any, step: Any, low: Any, num_bits: Any) -> Any:
    """The number of the step that is nearest to a value."""
    count = np.rint((value - low) / max(step, _LEAST_STEP))
    return np.uint8(max(min(count, np.float32(2**num_bits - 1)), np.float32(0)))


@inlined
def _store_row(row: Any, steps: Any, lows: Any, codes: Any, num_bits: Any) -> None:
    """Write the codes of a row; with 4 bits, numbers i and i + D / 2 share a byte."""
    if num_bits == 8:
        for i in range(len(row)):
            codes[i] = _code(row[i], steps[i], lows[i], num_bits)
    else:
        half = len(codes)
        for i in range(half):
            second = _code(row[i + half], steps[i + half], lows[i + half], num_bits)
            codes[i] = _code(row[i], steps[i], lows[i], num_bits) | (second << np.uint8(4))


@inlined
def _turn_back(x: Any, cos: Any, sin: Any, row: Any) -> None:
    """Write a key to `row` as it was before its rotation."""
    half = len(cos)
    for i in range(half):
        a, b = read(x[i]), read(x[i + half])
        row[i], row[i + half] = a * cos[i] + b * sin[i], b * cos[i] - a * sin[i]
    for i in range(2 * half, len(row)):
        row[i] = read(x[i])


@parallel_kernel
def narrow_into(kv_2LTGD: Bits, rotation: tuple[Floats, Floats], parts: Any, group_size: int, num_bits: int) -> None:
    """Write KV [2, L, T, G, D] to the parts of `ops.narrow.NarrowKV`, keys as before their rotation.

    cos and sin in `rotation` are [L, T, P], or [1, T, P] if all layers rotate alike.
    """
    k_steps, k_lows, v_steps, v_lows, k_codes, v_codes = parts
    num_layers, num_tokens, num_heads, head_dim = kv_2LTGD.shape[1:]
    num_groups = k_steps.shape[1]
    for task in numba.prange(num_layers * num_groups):
        layer, group = task // num_groups, task % num_groups
        first, end = group * group_size, min(num_tokens, (group + 1) * group_size)
        own = layer if rotation[0].shape[0] > 1 else 0
        keys, row = np.empty((group_size, head_dim), np.float32), np.empty(head_dim, np.float32)
        steps, lows = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
        least, most = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
        for head in range(num_heads):
            least[:], most[:] = np.inf, -np.inf
            for at in range(first, end):
                key = keys[at - first]
                _turn_back(kv_2LTGD[0, layer, at, head], rotation[0][own, at], rotation[1][own, at], key)
                for i in range(head_dim):
                    least[i], most[i] = min(least[i], key[i]), max(most[i], key[i])
            for i in range(head_dim):
                steps[i], lows[i] = _scale_of(least[i], most[i], num_bits)
                k_steps[layer, group, head, i] = np.uint16(as_bits(steps[i]) >> SIXTEEN)
                k_lows[layer, group, head, i] = np.uint16(as_bits(lows[i]) >> SIXTEEN)
            for at in range(first, end):
                _store_row(keys[at - first], steps, lows, k_codes[layer, at, head], num_bits)
            for at in range(first, end):
                low, high = np.float32(np.inf), np.float32(-np.inf)
                for i in range(head_dim):
                    row[i] = read(kv_2LTGD[1, layer, at, head, i])
                    low, high = min(low, row[i]), max(high, row[i])
                step, low = _scale_of(low, high, num_bits)
                v_steps[layer, at, head] = np.uint16(as_bits(step) >> SIXTEEN)
                v_lows[layer, at, head] = np.uint16(as_bits(low) >> SIXTEEN)
                steps[:], lows[:] = step, low
                _store_row(row, steps, lows, v_codes[layer, at, head], num_bits)


@inlined
def _widen_row(codes: Any, steps: Any, lows: Any, row: Any, num_bits: Any) -> None:
    """Write the numbers of a row of codes, each with its own step and low."""
    if num_bits == 8:
        for i in range(len(row)):
            row[i] = lows[i] + steps[i] * np.float32(codes[i])
    else:
        half = len(codes)
        for i in range(half):
            row[i] = lows[i] + steps[i] * np.float32(codes[i] & np.uint8(15))
        for i in range(half):
            row[i + half] = lows[i + half] + steps[i + half] * np.float32(codes[i] >> np.uint8(4))


@inlined
def _widen_group(  # noqa: PLR0913  inlined: there is no call
    parts: Any, rotation: Any, targets: Any, slots: Any, group_size: Any, num_bits: Any, layer: Any, group: Any
) -> None:
    k_steps, k_lows, v_steps, v_lows, k_codes, v_codes = parts
    num_tokens, num_heads = k_codes.shape[1], k_codes.shape[2]
    head_dim, half = targets[0].shape[3], rotation[0].shape[2]
    own = layer if rotation[0].shape[0] > 1 else 0
    steps, lows = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    row = np.empty(head_dim, np.float32)
    for head in range(num_heads):
        for i in range(head_dim):
            steps[i], lows[i] = read(k_steps[layer, group, head, i]), read(k_lows[layer, group, head, i])
        for at in range(group * group_size, min(num_tokens, (group + 1) * group_size)):
            cos, sin, out = rotation[0][own, at], rotation[1][own, at], targets[0][layer, slots[at], head]
            _widen_row(k_codes[layer, at, head], steps, lows, row, num_bits)
            for i in range(half):
                write(out, i, row[i] * cos[i] - row[i + half] * sin[i])
            for i in range(half):
                write(out, i + half, row[i + half] * cos[i] + row[i] * sin[i])
            for i in range(2 * half, head_dim):
                write(out, i, row[i])
        for at in range(group * group_size, min(num_tokens, (group + 1) * group_size)):
            out = targets[1][layer, slots[at], head]
            steps[:], lows[:] = read(v_steps[layer, at, head]), read(v_lows[layer, at, head])
            _widen_row(v_codes[layer, at, head], steps, lows, row, num_bits)
            for i in range(head_dim):
                write(out, i, row[i])


@parallel_kernel
def widen_into(
    parts: Any, rotation: tuple[Floats, Floats], targets: tuple[Bits, Bits], slots: Any, group_size: int, num_bits: int
) -> None:
    """Write the parts of a `NarrowKV` to slots of K and V of all layers, each [L, S, G, D], with the keys rotated.

    cos and sin in `rotation` are as of `narrow_into`.
    """
    num_groups = parts[0].shape[1]
    for task in numba.prange(parts[0].shape[0] * num_groups):
        layer, group = task // num_groups, task % num_groups
        _widen_group(parts, rotation, targets, slots, group_size, num_bits, layer, group)


@kernel
def widen_into_single_threaded(
    parts: Any, rotation: tuple[Floats, Floats], targets: tuple[Bits, Bits], slots: Any, group_size: int, num_bits: int
) -> None:
    """As `widen_into`, on one thread, while other threads run kernels."""
    for layer in range(parts[0].shape[0]):
        for group in range(parts[0].shape[1]):
            _widen_group(parts, rotation, targets, slots, group_size, num_bits, layer, group)
