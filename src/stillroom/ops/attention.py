"""Causal grouped-query attention of packed queries over slot-addressed keys and values, and its slow twin.

Each span is one sequence: its queries stand at the end of its context. Nothing is padded and nothing outside the
context is read.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# T packed query tokens, Q queries of one span, K context tokens of one span, S slots,
# H query heads, G key/value heads, D head dimension


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Queries [query_start, query_end) of the packed batch attend to `context`, causally; they are its last tokens."""

    query_start: int
    query_end: int
    context: slice | torch.Tensor
    """Slots of all context tokens in order of position: a slice where they are contiguous (read without a copy), else
    int64 [K]."""
    num_context_tokens: int


def attend_spans(
    q_THD: torch.Tensor,
    kv_SGD: tuple[torch.Tensor, torch.Tensor],
    spans: list[AttentionSpan],
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention output [T, H, D].

    Args:
        kv_SGD: keys (rotated) and values of one layer, with this step's tokens written already.
        scale: factor on the logits, usually 1 / sqrt(D).
        window: a query sees itself and the `window - 1` tokens before it; None: everything before it.
        softcap: logits are squeezed into (-softcap, softcap); None: left alone.
    """
    k_SGD, v_SGD = kv_SGD
    out_THD = torch.empty_like(q_THD)
    for span in spans:
        rows = slice(span.query_start, span.query_end)
        out_THD[rows] = attend(q_THD[rows], k_SGD[span.context], v_SGD[span.context], scale, window, softcap)
    return out_THD


def attend(
    q_QHD: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of the last Q of K tokens over all K, [Q, H, D]."""
    num_queries, num_keys = q_QHD.shape[0], k_KGD.shape[0]
    if window is not None and num_keys > window + num_queries - 1:
        first = num_keys - window - num_queries + 1  # nobody sees anything before it
        k_KGD, v_KGD, num_keys = k_KGD[first:], v_KGD[first:], num_keys - first
    dtype = q_QHD.dtype
    if num_queries == 1 and dtype != torch.float32 and q_QHD.device.type == "cpu":
        # One-row attention in half precision is several times slower than float32 on CPUs.
        q_QHD, k_KGD, v_KGD = q_QHD.float(), k_KGD.float(), v_KGD.float()
    if softcap is not None:
        return attend_capped(q_QHD, k_KGD, v_KGD, scale, window, softcap).to(dtype)
    mask = None
    is_causal = num_queries == num_keys > 1 and (window is None or num_keys <= window)
    if num_queries > 1 and not is_causal:
        mask = visible(num_queries, num_keys, window, q_QHD.device)
    out_HQD = F.scaled_dot_product_attention(
        q_QHD.transpose(0, 1)[None],
        k_KGD.transpose(0, 1)[None],
        v_KGD.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=True,
    )[0]
    return out_HQD.transpose(0, 1).to(dtype)


def attend_capped(
    q_QHD: torch.Tensor, k_KGD: torch.Tensor, v_KGD: torch.Tensor, scale: float, window: int | None, softcap: float
) -> torch.Tensor:
    """`attend` with capped logits, which no fused kernel computes: [H, Q, K] logits in float32 exist for a while."""
    (num_queries, _, head_dim), (num_keys, num_kv_heads, _) = q_QHD.shape, k_KGD.shape
    q_GNQD = (q_QHD * scale).transpose(0, 1).reshape(num_kv_heads, -1, num_queries, head_dim)
    k_G1DK, v_G1KD = k_KGD.permute(1, 2, 0)[:, None], v_KGD.transpose(0, 1)[:, None]
    logits = torch.tanh((q_GNQD @ k_G1DK).float() / softcap) * softcap
    if num_queries > 1 or (window is not None and num_keys > window):
        logits = logits.masked_fill(~visible(num_queries, num_keys, window, q_QHD.device), -torch.inf)
    out_GNQD = torch.softmax(logits, dim=-1).to(v_KGD.dtype) @ v_G1KD
    return out_GNQD.flatten(0, 1).transpose(0, 1)


def visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Bool [Q, K]: whether a query, one of the last Q tokens, may look at a key."""
    query_positions = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key_positions = torch.arange(num_keys, device=device)[None, :]
    seen = key_positions <= query_positions
    return seen if window is None else seen & (key_positions > query_positions - window)


def attend_reference(
    q_QHD: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The slow twin of `attend`: one query and one head at a time, in float64."""
    num_queries, num_heads, _ = q_QHD.shape
    num_keys, num_kv_heads, _ = k_KGD.shape
    out_QHD = torch.empty_like(q_QHD)
    for row in range(num_queries):
        position = num_keys - num_queries + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            group = head * num_kv_heads // num_heads
            keys, values = (
                k_KGD[first : position + 1, group].double(),
                v_KGD[first : position + 1, group].double(),
            )
            logits = keys @ q_QHD[row, head].double() * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            weights = torch.softmax(logits, dim=0)
            out_QHD[row, head] = (weights @ values).to(out_QHD.dtype)
    return out_QHD
