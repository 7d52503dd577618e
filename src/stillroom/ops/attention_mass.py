"""Attention mass: what each query pays to groups of keys and to its own key, and what each key receives.

Cache-Craft's inter and intra attention (Eq. 3, 4, 14, 15) are sums of such rows; H2O's heavy hitters are the keys that
receive most. The attention matrix is computed a tile of queries at a time, and only its mean over heads is kept.
"""

from typing import NamedTuple

import torch

from stillroom.ops.attention import causal_mask_at

# Q queries, K keys, H query heads, G key/value heads, D head dimension, M groups of keys

_LOGITS_PER_TILE = 2**24
"""Bound on the logits of all heads in a tile of queries: 64 MiB."""


class AttentionFlow(NamedTuple):
    """Means over heads, float32."""

    paid_QM: torch.Tensor
    """Mass that each query pays to each group of keys, without its own key."""
    own_Q: torch.Tensor
    """Mass that each query pays to its own key; Cache-Craft's Eq. 4 does not count it (k < l)."""
    received_K: torch.Tensor
    """Mass that each key receives from all queries together."""


def attention_flow(  # noqa: PLR0913  attention has that many parts
    q_QHD: torch.Tensor,
    k_KGD: torch.Tensor,
    groups_K: torch.Tensor,
    num_groups: int,
    scale: float,
    places_Q: torch.Tensor,
    window: int | None = None,
    softcap: float | None = None,
) -> AttentionFlow:
    """Measure attention mass; a query's row and its own key sum to 1 if all keys that it sees are in groups.

    Args:
        k_KGD: rotated keys.
        groups_K: int64, in [0, num_groups), or -1 for a key of no group.
        scale, window, softcap: as in `AttentionPlan.attend`.
        places_Q: int64, the index of each query's own key, the last key that it sees.
    """
    members_KM = one_hot(groups_K, num_groups)
    received_K = torch.zeros(len(k_KGD), device=q_QHD.device)
    paid, own = [q_QHD.new_zeros((0, num_groups), dtype=torch.float32)], [q_QHD.new_zeros(0, dtype=torch.float32)]
    rows_per_tile = max(1, _LOGITS_PER_TILE // (q_QHD.shape[1] * max(len(k_KGD), 1)))
    for start in range(0, len(q_QHD), rows_per_tile):
        q_THD, places_T = q_QHD[start : start + rows_per_tile], places_Q[start : start + rows_per_tile]
        num_seen = int(places_T.max()) + 1
        weights_TK = mean_weights(q_THD, k_KGD[:num_seen], scale, places_T, window, softcap)
        own_T = weights_TK.gather(1, places_T[:, None])[:, 0]
        received_K[:num_seen] += weights_TK.sum(0)
        paid.append(weights_TK @ members_KM[:num_seen] - own_T[:, None] * members_KM[places_T])
        own.append(own_T)
    return AttentionFlow(torch.cat(paid).clamp_min(0.0), torch.cat(own), received_K)


def mean_weights(
    q_QHD: torch.Tensor,
    k_KGD: torch.Tensor,
    scale: float,
    places_Q: torch.Tensor,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return the mean of `head_weights` over heads, float32 [Q, K]."""
    return head_weights(q_QHD, k_KGD, scale, places_Q, window, softcap).mean(0)


def head_weights(
    q_QHD: torch.Tensor,
    k_KGD: torch.Tensor,
    scale: float,
    places_Q: torch.Tensor,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return attention weights of queries at these places over all K keys, float32 [H, Q, K]."""
    (num_queries, num_heads, head_dim), (num_keys, num_kv_heads, _) = q_QHD.shape, k_KGD.shape
    q_GND = (q_QHD.float() * scale).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    logits_HQK = (q_GND @ k_KGD.float().permute(1, 2, 0)).view(num_heads, num_queries, num_keys)
    if softcap is not None:
        logits_HQK = torch.tanh(logits_HQK / softcap) * softcap
    seen_QK = causal_mask_at(places_Q, num_keys, window)
    return torch.softmax(logits_HQK.masked_fill_(~seen_QK, -torch.inf), dim=-1)


def one_hot(groups_K: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return membership [K, num_groups], float32: 1 in a key's group, a row of 0 for a key of no group."""
    return (groups_K[:, None] == torch.arange(num_groups, device=groups_K.device)).float()


def attention_weights_reference(
    q_QHD: torch.Tensor,
    k_KGD: torch.Tensor,
    scale: float,
    places_Q: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Reference: the whole attention matrix [H, Q, K] in float64, one row and one head at a time.

    Args:
        places_Q: None: the queries are the last tokens.
    """
    (num_queries, num_heads, _), (num_keys, num_kv_heads, _) = q_QHD.shape, k_KGD.shape
    weights_HQK = torch.zeros((num_heads, num_queries, num_keys), dtype=torch.float64)
    for row in range(num_queries):
        position = num_keys - num_queries + row if places_Q is None else int(places_Q[row])
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            keys = k_KGD[first : position + 1, head * num_kv_heads // num_heads].double()
            logits = keys @ q_QHD[row, head].double() * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            weights_HQK[head, row, first : position + 1] = torch.softmax(logits, dim=0)
    return weights_HQK
