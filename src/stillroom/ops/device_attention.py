"""Attention whose plan is on the device, and its reference.

A plan is two int64 tensors: tiles, each some consecutive queries of one sequence, and the slots of all contexts back to
back. The kernel reads lengths from them, so the host never waits, and a captured launch uses their content at the time
of replay. Kernels: `triton_attention`, loaded only with a GPU that runs them.
"""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module, util
from typing import Any

import torch

from stillroom.ops.transfer import to_device

# N tiles, T packed query tokens, C slots of all contexts back to back, S slots, H query heads, G key/value heads,
# D head dimension, K keys of one query

MAX_SPLITS = 16
_MIN_KEYS_PER_SPLIT = 256


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels run on this device: a GPU since Ampere, with triton installed (part of torch for CUDA)."""
    if device.type != "cuda" or util.find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def current_gpu(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: Triton launches there, whatever GPU holds the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class DevicePlan:
    """The work of each program of the attention kernel; the same for all layers of a step."""

    def __init__(self, tiles_N4: torch.Tensor, slots_C: torch.Tensor, *, max_rows: int = 1, max_keys: int) -> None:
        """
        Args:
            tiles_N4: int64. First packed row of the tile, its number of rows, start of its context in `slots_C`, and
                number of keys that its last row sees, itself included.
            max_rows: most rows of a tile.
            max_keys: most keys that a row will ever see; only speed depends on it.
        """
        self.tensors = tiles_N4, slots_C
        self._max_rows, self._max_keys = max_rows, max_keys

    @classmethod
    def of(
        cls,
        bounds: Sequence[tuple[int, int, int]],
        contexts: Sequence[slice | torch.Tensor],
        device: torch.device,
        max_rows: int,
    ) -> "DevicePlan":
        """Make a plan.

        Args:
            bounds: start and end of each sequence's queries, and its number of context tokens.
            contexts: slots of these tokens.
            max_rows: most queries of a tile.
        """
        size = 1 if all(end - start == 1 for start, end, _ in bounds) else max_rows
        tiles, offset = [], 0
        for start, end, num_keys in bounds:
            for row in range(start, end, size):
                num_rows = min(size, end - row)
                tiles.append((row, num_rows, offset, num_keys - (end - row - num_rows)))
            offset += num_keys
        slots = [
            torch.arange(context.start, context.stop, device=device) if isinstance(context, slice) else context
            for context in contexts
        ]
        max_keys = max(num_keys for *_, num_keys in bounds)
        return cls(to_device(tiles, device), torch.cat(slots), max_rows=size, max_keys=max_keys)

    def attend(
        self,
        q_THD: torch.Tensor,
        kv_SGD: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        limits = (scale, window, softcap)
        if not has_kernels(q_THD.device):
            return attend_tiles_reference(q_THD, kv_SGD, self.tensors, limits)
        shape = (self._max_rows, self.num_splits(kv_SGD[0], window))
        with current_gpu(q_THD.device):
            out_THD: torch.Tensor = triton_kernels().attend_tiles(q_THD, kv_SGD, self.tensors, shape, limits)
        return out_THD

    def num_splits(self, k_SGD: torch.Tensor, window: int | None) -> int:
        """Return the splits of a context, a power of two: two programs per processor of the GPU, but no short ones."""
        num_programs, splits = len(self.tensors[0]) * k_SGD.shape[1], 1
        max_keys = min(self._max_keys, window or self._max_keys)
        most = min(MAX_SPLITS, max_keys // _MIN_KEYS_PER_SPLIT) if self._max_rows == 1 else 1
        while splits * num_programs < 2 * _num_processors(k_SGD.device) and 2 * splits <= most:
            splits *= 2
        return splits


def queries_per_tile(q_THD: torch.Tensor, k_SGD: torch.Tensor) -> int:
    """Return queries per tile of a prompt: with all heads of a group 64 matrix rows, fewer if above 32 KiB."""
    (_, num_heads, head_dim), num_kv_heads = q_THD.shape, k_SGD.shape[1]
    return max(1, min(64, 2**15 // (head_dim * q_THD.element_size())) * num_kv_heads // num_heads)


def triton_kernels() -> Any:
    """Import `triton_attention` on first use, since triton need not be installed."""
    return import_module("stillroom.ops.triton_attention")


def row_kernels_of_gpu() -> Any:
    """Import `triton_rows` on first use."""
    return import_module("stillroom.ops.triton_rows")


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def attend_tiles_reference(
    q_THD: torch.Tensor,
    kv_SGD: tuple[torch.Tensor, torch.Tensor],
    tiles: tuple[torch.Tensor, torch.Tensor],
    limits: tuple[float, int | None, float | None],
) -> torch.Tensor:
    """Reference of the kernels: one query at a time, in float64. Rows of no tile are zero."""
    (tiles_N4, slots_C), (scale, window, softcap) = tiles, limits
    group = q_THD.shape[1] // kv_SGD[0].shape[1]
    out_THD = torch.zeros_like(q_THD)
    for first_row, num_rows, offset, num_keys in tiles_N4.tolist():
        for row in range(num_rows):
            end = num_keys - num_rows + row + 1
            begin = 0 if window is None else max(0, end - window)
            slots_K = slots_C[offset + begin : offset + end]
            k_KHD, v_KHD = (kv[slots_K].double().repeat_interleave(group, dim=1) for kv in kv_SGD)
            logits_KH = (k_KHD * q_THD[first_row + row].double()).sum(dim=-1) * scale
            if softcap is not None:
                logits_KH = softcap * torch.tanh(logits_KH / softcap)
            weights_KH = torch.softmax(logits_KH, dim=0)
            out_THD[first_row + row] = (weights_KH[:, :, None] * v_KHD).sum(dim=0).to(out_THD.dtype)
    return out_THD
