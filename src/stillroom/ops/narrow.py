"""KV in 8 or 4 bits a number: scales, codes, and the way back. Keys are narrowed as before their rotation.

A number is kept as `low + step * code`, with codes from 0 to 255 or 15. Step and low are bfloat16, the step rounded up
and the low rounded down, so that no number is cut off. Keys have one scale for each channel of up to 64 tokens, values
one for each token and head (KIVI, arXiv 2402.02750: keys have a few large channels, values have large tokens). Before
the rotation a channel is one number that varies little from token to token; the rotation mixes it with another by the
token's position (KVQuant, arXiv 2401.18079, section 3.2). An error is at most half a step: 1/510 of the group's range
with 8 bits, 1/30 with 4 bits.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stillroom.ops import cpu_kernels, cpu_narrow
from stillroom.ops.cpu_compiler import serialised
from stillroom.ops.rope import rotate

# L layers, T tokens, N groups of tokens, G key/value heads, D head dimension, C bytes of a row of codes, P pairs

GROUP_SIZE = 64
"""Tokens that share the scales of their keys."""

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of each token's rotation, float32 [L, T, P], or [1, T, P] if all layers rotate alike."""


@dataclass(frozen=True, slots=True)
class NarrowKV:
    """The parts of one node's narrow KV: views of one buffer of bytes."""

    num_bits: int
    """8 or 4."""
    k_steps_LNGD: torch.Tensor
    k_lows_LNGD: torch.Tensor
    v_steps_LTG: torch.Tensor
    v_lows_LTG: torch.Tensor
    k_codes_LTGC: torch.Tensor
    v_codes_LTGC: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Steps and lows of keys, of values (bfloat16); codes of keys, of values (uint8)."""
        return (
            self.k_steps_LNGD,
            self.k_lows_LNGD,
            self.v_steps_LTG,
            self.v_lows_LTG,
            self.k_codes_LTGC,
            self.v_codes_LTGC,
        )

    def of(self, layers: slice) -> "NarrowKV":
        """Return a range of layers."""
        return NarrowKV(self.num_bits, *(part[layers] for part in self.tensors))

    def to(self, device: torch.device) -> "NarrowKV":
        """Return it on a device."""
        return NarrowKV(self.num_bits, *(part.to(device) for part in self.tensors))


def num_narrow_bytes(size: tuple[int, int, int, int], num_bits: int) -> int:
    """Return the bytes of the narrow KV of a node.

    Args:
        size: layers, tokens, key/value heads, head dimension.
        num_bits: 8 or 4.
    """
    return sum(count * width for _, count, width in _layout(size, num_bits))


def narrow_views(payload: torch.Tensor, size: tuple[int, int, int, int], num_bits: int) -> NarrowKV:
    """View flat bytes (uint8, `num_narrow_bytes` of them) as the parts of narrow KV. Arguments as there."""
    parts, start = [], 0
    for shape, count, width in _layout(size, num_bits):
        part = payload[start : start + count * width]
        parts.append((part if width == 1 else part.view(torch.bfloat16)).view(shape))
        start += count * width
    return NarrowKV(num_bits, *parts)


def narrow(kv_2LTGD: torch.Tensor, rotation: Rotation, out: NarrowKV) -> None:
    """Narrow the KV of a node on the CPU.

    Args:
        kv_2LTGD: contiguous, finite, on the CPU.
        rotation: of its keys, from position 0 to where they are.
        out: is filled.
    """
    if kv_2LTGD.dtype in (torch.float32, torch.bfloat16):
        cpu_kernels.use_threads()
        turns = (rotation[0].numpy(), rotation[1].numpy())
        serialised(cpu_narrow.narrow_into)(cpu_kernels.array(kv_2LTGD), turns, _arrays(out), GROUP_SIZE, out.num_bits)
    else:
        narrow_by_torch(kv_2LTGD, rotation, out)


def narrow_by_torch(kv_2LTGD: torch.Tensor, rotation: Rotation, out: NarrowKV) -> None:
    """As `narrow`, by torch; the slow twin of the kernel."""
    cos_LT1P, sin_LT1P = (values[:, :, None] for values in rotation)
    k_LTGD, v_LTGD = rotate(kv_2LTGD[0].float(), cos_LT1P, -sin_LT1P), kv_2LTGD[1].float()
    for group, first in enumerate(range(0, k_LTGD.shape[1], GROUP_SIZE)):
        tokens = slice(first, first + GROUP_SIZE)
        keys = k_LTGD[:, tokens]
        step, low = _scale(keys.amin(1), keys.amax(1), out.num_bits)
        out.k_steps_LNGD[:, group] = step
        out.k_lows_LNGD[:, group] = low
        out.k_codes_LTGC[:, tokens] = _codes(keys, step[:, None].float(), low[:, None].float(), out.num_bits)
    step, low = _scale(v_LTGD.amin(-1), v_LTGD.amax(-1), out.num_bits)
    out.v_steps_LTG.copy_(step)
    out.v_lows_LTG.copy_(low)
    out.v_codes_LTGC.copy_(_codes(v_LTGD, step[..., None].float(), low[..., None].float(), out.num_bits))


def widen_into(
    kv: NarrowKV,
    rotation: Rotation,
    targets: tuple[torch.Tensor, torch.Tensor],
    slots_T: NDArray[np.int64],
    *,
    is_alone: bool = True,
) -> None:
    """Write narrow KV to slots of K and V, with its keys rotated. On the CPU, in float32 or bfloat16.

    Args:
        rotation: of the keys, from position 0 to where they shall be; [1, T, P] if these are not all layers.
        targets: K and V of the same layers, each [L, S, G, D].
        is_alone: use several threads, because no other thread runs kernels.
    """
    into = cpu_narrow.widen_into_single_threaded
    if is_alone:
        cpu_kernels.use_threads()
        into = serialised(cpu_narrow.widen_into)
    turns = (rotation[0].numpy(), rotation[1].numpy())
    into(
        _arrays(kv),
        turns,
        (cpu_kernels.array(targets[0]), cpu_kernels.array(targets[1])),
        slots_T,
        GROUP_SIZE,
        kv.num_bits,
    )


def compile_kernels(dtype: torch.dtype) -> None:
    """Compile the kernels for KV of this type on the CPU: seconds, once per machine, for which no question waits."""
    if dtype not in (torch.float32, torch.bfloat16):
        return
    size = (1, 1, 1, 2)
    rotation = (torch.ones(1, 1, 1), torch.zeros(1, 1, 1))
    kv = narrow_views(torch.zeros(num_narrow_bytes(size, 8), dtype=torch.uint8), size, 8)
    narrow(torch.zeros(2, *size, dtype=dtype), rotation, kv)
    targets = (torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype))
    for is_alone in (True, False):
        widen_into(kv, rotation, targets, np.zeros(1, np.int64), is_alone=is_alone)


def widened(kv: NarrowKV, rotation: Rotation, dtype: torch.dtype) -> torch.Tensor:
    """Return narrow KV as [2, L, T, G, D], by torch, with its keys rotated; the slow twin of `cpu_narrow.widen_into`.

    Args:
        kv: on the device of the rotation.
        rotation: of the keys, from position 0 to where they shall be.
    """
    num_tokens = kv.k_codes_LTGC.shape[1]
    groups_T = torch.arange(num_tokens, device=kv.k_codes_LTGC.device) // GROUP_SIZE
    cos_LT1P, sin_LT1P = (values[:, :, None] for values in rotation)
    keys = _numbers(kv.k_codes_LTGC, kv.num_bits) * kv.k_steps_LNGD[:, groups_T].float()
    values = _numbers(kv.v_codes_LTGC, kv.num_bits) * kv.v_steps_LTG[..., None].float()
    keys, values = keys + kv.k_lows_LNGD[:, groups_T].float(), values + kv.v_lows_LTG[..., None].float()
    return torch.stack((rotate(keys, cos_LT1P, sin_LT1P), values)).to(dtype)


def _arrays(kv: NarrowKV) -> tuple[Any, ...]:
    """The parts as the kernels read them: bfloat16 as bits."""
    return tuple(cpu_kernels.array(part) for part in kv.tensors)


def _scale(least: torch.Tensor, most: torch.Tensor, num_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Step and low for numbers in these ranges, bfloat16."""
    low = torch.where(least < 0, _rounded_away(least), _truncated(least))
    return _rounded_away((most - low.float()) / (2**num_bits - 1)), low


def _rounded_away(values: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16, away from 0."""
    return _truncated((values.view(torch.int32) + 0xFFFF).view(torch.float32))


def _truncated(values: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16, towards 0."""
    return (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _codes(numbers: torch.Tensor, step: torch.Tensor, low: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The numbers' steps as bytes; with 4 bits numbers i and i + D / 2 share one."""
    counts = torch.where(step > 0, (numbers - low) / step, 0.0).round()
    codes = counts.clamp(0, 2**num_bits - 1).to(torch.uint8)
    if num_bits == 8:
        return codes
    first, second = codes.chunk(2, dim=-1)
    return first | (second << 4)


def _numbers(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The inverse of `_codes`, in steps, float32."""
    if num_bits == 8:
        return codes.float()
    return torch.cat((codes & 15, codes >> 4), dim=-1).float()


def _layout(size: tuple[int, int, int, int], num_bits: int) -> list[tuple[tuple[int, ...], int, int]]:
    """Shape, number of elements and bytes of an element of each part, in the order of the buffer."""
    num_layers, num_tokens, num_heads, head_dim = size
    assert num_bits in (8, 4) and head_dim * num_bits % 8 == 0, (num_bits, head_dim)
    num_groups = -(-num_tokens // GROUP_SIZE)
    keys, values = (num_layers, num_groups, num_heads, head_dim), (num_layers, num_tokens, num_heads)
    codes = (num_layers, num_tokens, num_heads, head_dim * num_bits // 8)
    shapes = [(keys, 2), (keys, 2), (values, 2), (values, 2), (codes, 1), (codes, 1)]
    return [(shape, math.prod(shape), width) for shape, width in shapes]
