"""The compiled bfloat16 attention for spans of several queries, and whether this processor computes it faster than
torch's attention, in float32 or in bfloat16."""

import functools

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from stillroom.ops import cpu_kernels, crossovers
from stillroom.ops.cpu_attention import attend_blocks, split_queries
from stillroom.ops.cpu_vectors import LANES
from stillroom.ops.linear import ratio_of_times

# T packed tokens, B spans, S slots, H query heads, G key/value heads, D head dimension

_TRIAL = (192, 6, 2, 64)
"""Queries, query heads, key/value heads and head dimension of the measurement."""


def is_supported(k_SGD: torch.Tensor) -> bool:
    """Whether the kernel supports these keys, and is faster than torch in float32 on this processor."""
    is_readable = k_SGD.device.type == "cpu" and k_SGD.dtype == torch.bfloat16 and k_SGD.is_contiguous()
    return is_readable and k_SGD.shape[2] % LANES == 0 and is_faster_than_torch()


class BlockPlan:
    """Spans of several queries of one step, as the kernel reads them; made once for all layers."""

    def __init__(
        self,
        queries: NDArray[np.int64],
        contexts: tuple[NDArray[np.int64], NDArray[np.int64]],
        ends_T: NDArray[np.int64],
    ) -> None:
        """
        Args:
            queries: first packed query and end of each span [B, 2].
            contexts: slots of all contexts back to back, and their bounds [B + 1].
            ends_T: end of the part of its context that each packed query sees.
        """
        self.contexts = contexts
        self._queries, self._ends = queries, ends_T
        self._tasks: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._firsts: dict[int, NDArray[np.int64]] = {}

    def seen(self, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first key and the end of the keys that each packed query sees; a window of 0 is none."""
        if window not in self._firsts:
            self._firsts[window] = np.maximum(0, self._ends - window) if window else np.zeros_like(self._ends)
        return self._firsts[window], self._ends

    def tasks(self, num_heads: int, num_kv_heads: int) -> NDArray[np.int64]:
        """Return `split_queries` for a model of so many query and key/value heads."""
        shape = (num_heads // num_kv_heads, num_kv_heads)
        if shape not in self._tasks:
            self._tasks[shape] = split_queries(self._queries, *shape)
        return self._tasks[shape]

    def attend(
        self,
        q_THD: torch.Tensor,
        kv_SGD: tuple[torch.Tensor, torch.Tensor],
        limits: tuple[float, float, int],
        out_THD: torch.Tensor,
    ) -> None:
        """Write the spans' rows of the attention output; `limits` are scale, soft cap or 0, and window or 0."""
        scale, cap, window = limits
        cache = (cpu_kernels.array(kv_SGD[0]), cpu_kernels.array(kv_SGD[1]))
        attend_blocks(
            q_THD.contiguous().numpy(),
            cache,
            self.contexts,
            self.seen(window),
            self.tasks(q_THD.shape[1], kv_SGD[0].shape[1]),
            np.array([scale, cap], np.float32),
            out_THD.numpy(),
            cpu_kernels.use_threads(),
        )


@functools.cache
def is_faster_than_torch() -> bool:
    """Return whether the kernel computes a causal prefill faster than torch in float32 on this processor.

    Measured in about 50 ms.
    """
    trial = _Trial()
    return crossovers.remembered("attention of torch's", lambda: ratio_of_times(trial.blocks, trial.float32)) <= 1.0


@functools.cache
def is_torch_fastest_in_bfloat16() -> bool:
    """Return whether torch computes a causal prefill in bfloat16 faster than the kernel, or than in float32 where the
    kernel is slow. So it is on processors with AMX. Measured in about 50 ms."""
    trial = _Trial()
    other = trial.blocks if is_faster_than_torch() else trial.float32
    measured = crossovers.remembered(
        "attention in bfloat16 of the others'", lambda: ratio_of_times(trial.bfloat16, other)
    )
    return measured < 1.0


class _Trial:
    """A causal prefill, computed in three ways."""

    def __init__(self) -> None:
        num_tokens, num_heads, num_kv_heads, self._head_dim = _TRIAL
        generator = torch.Generator().manual_seed(0)
        self._q = torch.randn((num_tokens, num_heads, self._head_dim), generator=generator)
        shape = (2, num_tokens, num_kv_heads, self._head_dim)
        self._kv = torch.randn(shape, generator=generator).to(torch.bfloat16)
        slots, self._out = np.arange(num_tokens), torch.empty_like(self._q)
        self._plan = BlockPlan(np.array([[0, num_tokens]]), (slots, np.array([0, num_tokens])), slots + 1)

    def blocks(self) -> None:
        self._plan.attend(self._q, (self._kv[0], self._kv[1]), (self._head_dim**-0.5, 0.0, 0), self._out)

    def float32(self) -> None:
        self._by_torch(torch.float32)

    def bfloat16(self) -> None:
        self._by_torch(torch.bfloat16)

    def _by_torch(self, dtype: torch.dtype) -> None:
        q, k, v = (x.to(dtype).transpose(0, 1)[None] for x in (self._q, self._kv[0], self._kv[1]))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        self._out.copy_(out[0].transpose(0, 1))
