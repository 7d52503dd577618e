"""The compiled bfloat16 attention for spans of several queries, used where this processor computes it faster than
torch's attention."""

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


def has_kernel(q_THD: torch.Tensor, k_SGD: torch.Tensor) -> bool:
    """Whether the kernel supports these queries and keys, and is faster than torch on this processor."""
    return cpu_kernels.has_kernel(q_THD, k_SGD) and is_supported(k_SGD)


def is_supported(k_SGD: torch.Tensor) -> bool:
    """Whether the kernel supports these keys, and is faster than torch on this processor."""
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
    """Return whether the kernel computes a causal prefill faster than torch on this processor.

    Measured in about 50 ms.
    """
    return crossovers.remembered("attention of torch's", _ratio_to_torch) <= 1.0


def _ratio_to_torch() -> float:
    num_tokens, num_heads, num_kv_heads, head_dim = _TRIAL
    generator = torch.Generator().manual_seed(0)
    q = torch.randn((num_tokens, num_heads, head_dim), generator=generator)
    kv = torch.randn((2, num_tokens, num_kv_heads, head_dim), generator=generator).to(torch.bfloat16)
    slots, out = np.arange(num_tokens), torch.empty_like(q)
    plan = BlockPlan(np.array([[0, num_tokens]]), (slots, np.array([0, num_tokens])), slots + 1)

    def blocks() -> None:
        plan.attend(q, (kv[0], kv[1]), (head_dim**-0.5, 0.0, 0), out)

    def of_torch() -> None:
        heads = [x.float().transpose(0, 1)[None] for x in (q, kv[0], kv[1])]
        F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True, enable_gqa=True)

    return ratio_of_times(blocks, of_torch)
