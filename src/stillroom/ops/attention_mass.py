"""Where attention falls: what each query pays to groups of keys, and what each key receives. With its slow twin.

If the value of a key is the one-hot vector of its group, the output of attention is what the query pays to each group:
no attention matrix of all heads is ever there. Cache-Craft's inter and intra (Eq. 3, 4, 14, 15) are sums of such rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

# Q queries, K keys, H query heads, G key/value heads, D head dimension, M groups of keys

_QUERIES_PER_TILE = 512
"""What is there at a time of one head's attention matrix: so many rows, as wide as the context they see."""


class _Tile(NamedTuple):
    """Some queries, the keys that any of them sees, and which sees which."""

    rows: slice
    keys: slice
    positions_Q: torch.Tensor
    """Of its queries, counted from its first key."""
    seen_QK: torch.Tensor


def attention_mass(  # noqa: PLR0913  attention has that many parts
    q_QHD: torch.Tensor,
    k_KGD: torch.Tensor,
    groups_K: torch.Tensor,
    num_groups: int,
    scale: float,
    positions_Q: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """What each query pays to each group of keys, [Q, num_groups] float32, mean over heads.

    A row sums to 1 if all keys that the query sees are in groups. Half-precision queries give half-precision sums.

    Args:
        k_KGD: rotated as the queries are.
        groups_K: int64, in [0, num_groups), or -1 for a key of no group.
        scale, window, softcap: as in `AttentionPlan.attend`.
        positions_Q: int64; a query sees no key after this index, which is its own. None: they are the last Q of K.
    """
    k_KGD = k_KGD.to(q_QHD.dtype)
    values_KM = one_hot(groups_K, num_groups, q_QHD.dtype)
    mass_QM = torch.zeros((q_QHD.shape[0], num_groups), device=q_QHD.device)
    for rows, keys, _, seen_QK in _tiles(q_QHD, k_KGD, positions_Q, window):
        if softcap is None:
            mass_QM[rows] = _pay_fused(q_QHD[rows], k_KGD[keys], values_KM[keys], seen_QK, scale)
        else:
            values = values_KM[keys].float()
            for weights_QK in _weights(q_QHD[rows], k_KGD[keys], seen_QK, scale, softcap):
                mass_QM[rows] += weights_QK @ values / q_QHD.shape[1]
    return mass_QM


def received_attention(
    q_QHD: torch.Tensor,
    k_KGD: torch.Tensor,
    scale: float,
    positions_Q: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """What each key receives from all queries together, [K] float32, mean over heads; one head at a time.

    Arguments are those of `attention_mass`.
    """
    received_K = torch.zeros(k_KGD.shape[0], device=q_QHD.device)
    for rows, keys, _, seen_QK in _tiles(q_QHD, k_KGD, positions_Q, window):
        for weights_QK in _weights(q_QHD[rows], k_KGD[keys], seen_QK, scale, softcap):
            received_K[keys] += weights_QK.sum(0) / q_QHD.shape[1]
    return received_K


def attention_to_itself(
    q_QHD: torch.Tensor,
    k_KGD: torch.Tensor,
    scale: float,
    positions_Q: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """What each query pays to its own key, [Q] float32, mean over heads; one head at a time.

    Cache-Craft's Eq. 4 leaves it out of a chunk's attention to itself. Arguments are those of `attention_mass`.
    """
    own_Q = torch.zeros(q_QHD.shape[0], device=q_QHD.device)
    for rows, keys, positions, seen_QK in _tiles(q_QHD, k_KGD, positions_Q, window):
        for weights_QK in _weights(q_QHD[rows], k_KGD[keys], seen_QK, scale, softcap):
            own_Q[rows] += weights_QK.gather(1, positions[:, None])[:, 0] / q_QHD.shape[1]
    return own_Q


def one_hot(groups_K: torch.Tensor, num_groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Membership [K, num_groups]: 1 in a key's group, a row of 0 for a key of none."""
    return (groups_K[:, None] == torch.arange(num_groups, device=groups_K.device)).to(dtype)


def _tiles(
    q_QHD: torch.Tensor, k_KGD: torch.Tensor, positions_Q: torch.Tensor | None, window: int | None
) -> Iterator[_Tile]:
    num_queries, num_keys = q_QHD.shape[0], k_KGD.shape[0]
    if positions_Q is None:
        positions_Q = torch.arange(num_keys - num_queries, num_keys, device=q_QHD.device)
    for start in range(0, num_queries, _QUERIES_PER_TILE):
        rows = slice(start, min(start + _QUERIES_PER_TILE, num_queries))
        first, last = torch.stack(positions_Q[rows].aminmax()).tolist()
        keys = slice(0 if window is None else max(0, first - window + 1), last + 1)
        positions = positions_Q[rows] - keys.start
        key_positions_K = torch.arange(keys.stop - keys.start, device=q_QHD.device)
        seen_QK = key_positions_K <= positions[:, None]
        if window is not None:
            seen_QK &= key_positions_K > positions[:, None] - window
        yield _Tile(rows, keys, positions, seen_QK)


def _pay_fused(
    q_QHD: torch.Tensor, k_KGD: torch.Tensor, values_KM: torch.Tensor, seen_QK: torch.Tensor, scale: float
) -> torch.Tensor:
    """[Q, M] in passes of D groups: fused kernels want values as wide as keys."""
    num_heads, head_dim = q_QHD.shape[1:]
    num_repeats = num_heads // k_KGD.shape[1]
    k_HKD = k_KGD.transpose(0, 1).repeat_interleave(num_repeats, 0)  # not every kernel that takes a mask groups heads
    passes = []
    for values_KD in torch.split(values_KM, head_dim, dim=1):
        width = values_KD.shape[1]
        padded_HKD = F.pad(values_KD, (0, head_dim - width)).expand(num_heads, -1, -1)
        out_HQD = F.scaled_dot_product_attention(
            q_QHD.transpose(0, 1)[None], k_HKD[None], padded_HKD[None], attn_mask=seen_QK, scale=scale
        )[0]
        passes.append(out_HQD[:, :, :width].float().mean(0))
    return torch.cat(passes, dim=1)


def _weights(
    q_QHD: torch.Tensor, k_KGD: torch.Tensor, seen_QK: torch.Tensor, scale: float, softcap: float | None
) -> Iterator[torch.Tensor]:
    """Attention weights [Q, K] in float32 of one head after the other."""
    num_heads, num_kv_heads = q_QHD.shape[1], k_KGD.shape[1]
    for head in range(num_heads):
        k_DK = k_KGD[:, head * num_kv_heads // num_heads].to(q_QHD.dtype).T
        logits_QK = (q_QHD[:, head] * scale @ k_DK).float()
        if softcap is not None:
            logits_QK = torch.tanh(logits_QK / softcap) * softcap
        yield torch.softmax(logits_QK.masked_fill(~seen_QK, -torch.inf), dim=-1)


def attention_weights_reference(
    q_QHD: torch.Tensor,
    k_KGD: torch.Tensor,
    scale: float,
    positions_Q: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The whole attention matrix [H, Q, K] in float64, one row at a time."""
    (num_queries, num_heads, _), (num_keys, num_kv_heads, _) = q_QHD.shape, k_KGD.shape
    weights_HQK = torch.zeros((num_heads, num_queries, num_keys), dtype=torch.float64)
    for row in range(num_queries):
        position = num_keys - num_queries + row if positions_Q is None else int(positions_Q[row])
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            keys = k_KGD[first : position + 1, head * num_kv_heads // num_heads].double()
            logits = keys @ q_QHD[row, head].double() * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            weights_HQK[head, row, first : position + 1] = torch.softmax(logits, dim=0)
    return weights_HQK


def attention_mass_reference(  # noqa: PLR0913  as its twin
    q_QHD: torch.Tensor,
    k_KGD: torch.Tensor,
    groups_K: torch.Tensor,
    num_groups: int,
    scale: float,
    positions_Q: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The slow twin of `attention_mass`: sums of the whole matrix's columns, in float64."""
    weights_QK = attention_weights_reference(q_QHD, k_KGD, scale, positions_Q, window, softcap).mean(0)
    sums = [weights_QK[:, groups_K == group].sum(1) for group in range(num_groups)]
    return torch.stack(sums, dim=1)
