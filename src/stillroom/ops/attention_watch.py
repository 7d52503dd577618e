"""What the tokens of a look attend to, layer by layer: how a question sees reused KV before it is repaired.

Attention of few queries over one context, as explicit weights: [H, Q, K] of one layer exist for a moment. The slow twin
is `attention_mass.attention_weights_reference`.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stillroom.ops.attention import AttentionSpan, visible
from stillroom.ops.attention_mass import attention_mass

# T packed query tokens, Q queries of one span, K context tokens of one span, S slots, H query heads,
# G key/value heads, D head dimension


NUM_WATCHED = 16
"""Queries of a span that are watched: its last ones. What is attended to costs as much as attention itself."""


class Watch(Protocol):
    """Is shown the queries and keys of every layer."""

    def see(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> None:
        """One layer, its keys written already; arguments as for `AttentionPlan.attend`."""
        ...


class Watches:
    """Several."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = watches

    def see(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> None:
        """See `Watch.see`."""
        for watch in self._watches:
            watch.see(q_THD, k_SGD, scale, window, softcap)


class MassWatch:
    """What the queries of some spans pay to groups of their context (Cache-Craft Eq. 3); adds up over layers."""

    def __init__(self, spans: Sequence[AttentionSpan], groups: Sequence[NDArray[np.int64]]) -> None:
        """Args: groups: of each span, [K], the group of each token of its context, or -1."""
        self._spans, self._groups = tuple(spans), [torch.from_numpy(one) for one in groups]
        self._sums: list[torch.Tensor] = []
        self._num_layers = 0

    def see(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> None:
        """See `Watch.see`."""
        self._num_layers += 1
        for index, (span, groups_K) in enumerate(zip(self._spans, self._groups, strict=True)):
            q_QHD, num_groups = q_THD[span.query_start : span.query_end], int(groups_K.max()) + 1
            mass_QM = attention_mass(
                q_QHD, k_SGD[span.context], groups_K.to(q_THD.device), num_groups, scale, span.places, window, softcap
            )
            if index == len(self._sums):
                self._sums.append(torch.zeros_like(mass_QM))
            self._sums[index] += mass_QM

    def masses(self) -> list[NDArray[np.float32]]:
        """Of each span, [Q, number of groups]; means over heads and layers."""
        return [(sums_QM / max(self._num_layers, 1)).cpu().numpy() for sums_QM in self._sums]


class AttentionWatch:
    """Of some spans of one step; adds up over layers."""

    def __init__(self, spans: Sequence[AttentionSpan]) -> None:
        """Args: spans: whose queries stand side by side at the end of their contexts."""
        assert all(span.places is None for span in spans)
        self._spans = tuple(spans)
        self._sums: list[torch.Tensor] = []
        self._num_layers = 0

    def see(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> None:
        """See `Watch.see`."""
        if not self._sums:
            sizes = [span.num_context_tokens for span in self._spans]
            self._sums = [torch.zeros((2, size), device=q_THD.device) for size in sizes]
        self._num_layers += 1
        for span, sums_2K in zip(self._spans, self._sums, strict=True):
            rows = slice(max(span.query_start, span.query_end - NUM_WATCHED), span.query_end)
            weights_QK = mean_weights(q_THD[rows], k_SGD[span.context], scale, window, softcap)
            sums_2K[0] += weights_QK[-1]
            sums_2K[1] += weights_QK.mean(0)

    def shares(self) -> list[NDArray[np.float32]]:
        """Of each span, [2, K]: attention of its last query, and of the watched ones in the mean; means over heads and
        layers."""
        return [(sums_2K / max(self._num_layers, 1)).cpu().numpy() for sums_2K in self._sums]


def mean_weights(
    q_QHD: torch.Tensor, k_KGD: torch.Tensor, scale: float, window: int | None, softcap: float | None = None
) -> torch.Tensor:
    """Attention weights of the last Q of K tokens over all K, mean over heads, float32 [Q, K]."""
    (num_queries, num_heads, head_dim), (num_keys, num_kv_heads, _) = q_QHD.shape, k_KGD.shape
    q_GND = (q_QHD.float() * scale).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    logits_HQK = (q_GND @ k_KGD.float().permute(1, 2, 0)).view(num_heads, num_queries, num_keys)
    if softcap is not None:
        logits_HQK = torch.tanh(logits_HQK / softcap) * softcap
    seen_QK = visible(num_queries, num_keys, window, q_QHD.device)
    return torch.softmax(logits_HQK.masked_fill(~seen_QK, -torch.inf), dim=-1).mean(0)
