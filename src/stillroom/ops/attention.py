"""Causal grouped-query attention of packed queries over slot-addressed keys and values, and its reference.

Each span is one sequence, whose queries are the last tokens of its context. Nothing is padded, and only slots of the
context are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from stillroom.ops import block_attention, cpu_kernels
from stillroom.ops.cpu_row_attention import attend_rows, split_contexts
from stillroom.ops.device_attention import DevicePlan, has_kernels, queries_per_tile

# T packed query tokens, B of them single queries of their span, Q queries of one span, K context tokens of one span,
# S slots, H query heads, G key/value heads, D head dimension


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Queries [query_start, query_end) of the packed batch attend to `context`, causally; they are its last tokens."""

    query_start: int
    query_end: int
    context: slice | torch.Tensor
    """Slots of all context tokens in order of position: a slice if contiguous (read without a copy), else int64 [K]."""
    num_context_tokens: int
    places: torch.Tensor | None = None
    """int64 [Q], ascending: index in the context of each query, of which the last is the context's last token; None:
    the last Q tokens. A query sees the context up to itself."""


def spans_of_rows(spans: Sequence[AttentionSpan], rows: Sequence[int]) -> list[AttentionSpan]:
    """Return one span for each of these packed rows, packed without the others; each sees the same context."""
    found: list[AttentionSpan] = []
    remaining = iter(spans)
    span = next(remaining, None)
    for row in rows:
        while span is not None and row >= span.query_end:
            span = next(remaining, None)
        assert span is not None and row >= span.query_start, "rows must ascend and lie in spans"
        num_tokens = span.num_context_tokens - (span.query_end - 1 - row)
        if span.places is not None:
            num_tokens = int(span.places[row - span.query_start]) + 1
        context = span.context
        context = (
            slice(context.start, context.start + num_tokens) if isinstance(context, slice) else context[:num_tokens]
        )
        found.append(AttentionSpan(len(found), len(found) + 1, context, num_tokens))
    return found


class AttentionPlan:
    """The spans of one step, and what all layers compute with; made once per step."""

    def __init__(self, spans: Sequence[AttentionSpan]) -> None:
        self.spans = tuple(spans)
        self._single = [span for span in self.spans if span.query_end - span.query_start == 1]
        self._multi_query = [span for span in self.spans if span.query_end - span.query_start > 1]
        self._device_plan: DevicePlan | None = None

    @cached_property
    def contexts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Slots of single queries' contexts back to back, and the bounds of each context [B + 1]; for CPU kernels."""
        return _contexts(self._single)

    @cached_property
    def splits(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`split_contexts` of the single queries."""
        return split_contexts(self._lengths)

    @property
    def _lengths(self) -> NDArray[np.int64]:
        return np.array([span.num_context_tokens for span in self._single], dtype=np.int64)

    @cached_property
    def _multi_query_blocks(self) -> block_attention.BlockPlan:
        return self._blocks_of(self._multi_query)

    @cached_property
    def blocks(self) -> block_attention.BlockPlan:
        """All spans, as the kernel for several queries reads them."""
        return self._blocks_of(self.spans)

    def _blocks_of(self, spans: Sequence[AttentionSpan]) -> block_attention.BlockPlan:
        ends_T = np.zeros(self.spans[-1].query_end, np.int64)
        for span in spans:
            num_queries = span.query_end - span.query_start
            last = np.arange(span.num_context_tokens - num_queries, span.num_context_tokens)
            ends_T[span.query_start : span.query_end] = 1 + (last if span.places is None else span.places.numpy())
        queries = np.array([(span.query_start, span.query_end) for span in spans])
        return block_attention.BlockPlan(queries, _contexts(spans), ends_T)

    @property
    def is_decode_only(self) -> bool:
        """Whether every sequence has one query."""
        return not self._multi_query

    def attend(
        self,
        q_THD: torch.Tensor,
        kv_SGD: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Return the attention output [T, H, D].

        Args:
            kv_SGD: keys (rotated) and values of one layer, with this step's tokens already written.
            scale: factor on the logits, usually 1 / sqrt(D).
            window: a query sees itself and the `window - 1` tokens before it; None: all tokens before it.
            softcap: tanh squeezes logits into (-softcap, softcap); None: logits stay as they are.
        """
        if has_kernels(q_THD.device):
            return self._on_device(q_THD, kv_SGD[0]).attend(q_THD, kv_SGD, scale, window, softcap)
        if not cpu_kernels.has_kernel(q_THD, kv_SGD[0]):
            return attend_spans(q_THD, kv_SGD, self.spans, scale, window, softcap)
        if self.is_decode_only:
            return self._attend_rows(q_THD, kv_SGD, (scale, softcap or 0.0, window or 0))
        is_bfloat16 = kv_SGD[0].dtype == torch.bfloat16 and softcap is None
        if is_bfloat16 and block_attention.is_torch_fastest_in_bfloat16():
            out_THD = attend_spans(q_THD.to(torch.bfloat16), kv_SGD, self._multi_query, scale, window).float()
        elif block_attention.is_supported(kv_SGD[0]):
            out_THD = torch.empty_like(q_THD)
            self._multi_query_blocks.attend(q_THD, kv_SGD, (scale, softcap or 0.0, window or 0), out_THD)
        else:
            out_THD = attend_spans(q_THD, kv_SGD, self._multi_query, scale, window, softcap)
        if self._single:
            rows = torch.tensor([span.query_start for span in self._single])
            out_THD[rows] = self._attend_rows(q_THD[rows], kv_SGD, (scale, softcap or 0.0, window or 0))
        return out_THD

    def _on_device(self, q_THD: torch.Tensor, k_SGD: torch.Tensor) -> DevicePlan:
        if self._device_plan is None:
            spans = [run for span in self.spans for run in _split_at_gaps(span)]
            bounds = [(span.query_start, span.query_end, span.num_context_tokens) for span in spans]
            contexts = [span.context for span in spans]
            self._device_plan = DevicePlan.of(bounds, contexts, q_THD.device, queries_per_tile(q_THD, k_SGD))
        return self._device_plan

    def _attend_rows(
        self, q_BHD: torch.Tensor, kv_SGD: tuple[torch.Tensor, torch.Tensor], limits: tuple[float, float, int]
    ) -> torch.Tensor:
        out_BHD = torch.empty_like(q_BHD)
        kv = (cpu_kernels.array(kv_SGD[0]), cpu_kernels.array(kv_SGD[1]))
        limits_3 = np.array(limits, dtype=np.float32)
        attend_rows(q_BHD.numpy(), kv, self.contexts, self.splits, limits_3, out_BHD.numpy())
        return out_BHD


def _split_at_gaps(span: AttentionSpan) -> list[AttentionSpan]:
    """Split a span into spans without gaps, each with the beginning of the context that its queries see."""
    if span.places is None:
        return [span]
    places = span.places.tolist()
    breaks = [row for row in range(1, len(places)) if places[row] != places[row - 1] + 1]
    found = []
    for first, last in zip([0, *breaks], [*breaks, len(places)], strict=True):
        num_tokens, context = places[last - 1] + 1, span.context
        context = (
            slice(context.start, context.start + num_tokens) if isinstance(context, slice) else context[:num_tokens]
        )
        found.append(AttentionSpan(span.query_start + first, span.query_start + last, context, num_tokens))
    return found


def _contexts(spans: Sequence[AttentionSpan]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return slots of contexts back to back, and the bounds of each [B + 1]."""
    bounds = np.cumsum([0, *(span.num_context_tokens for span in spans)])
    return np.concatenate([np.zeros(0, np.int64), *(_slots(span) for span in spans)]), bounds


def _slots(span: AttentionSpan) -> NDArray[np.int64]:
    if isinstance(span.context, slice):
        return np.arange(span.context.start, span.context.stop, dtype=np.int64)
    slots: NDArray[np.int64] = span.context.numpy()
    return slots


def attend_spans(  # noqa: PLR0913  as `attend`
    q_THD: torch.Tensor,
    kv_SGD: tuple[torch.Tensor, torch.Tensor],
    spans: Sequence[AttentionSpan],
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `AttentionPlan.attend` span by span with torch's operators; rows of no span are undefined.

    Args:
        sinks_H: logits of a key without value that every query sees (gpt-oss), float32; None: there is none.
    """
    k_SGD, v_SGD = kv_SGD
    out_THD = torch.empty_like(q_THD)
    for span in spans:
        rows = slice(span.query_start, span.query_end)
        k_KGD, v_KGD = _context(k_SGD, span.context, q_THD), _context(v_SGD, span.context, q_THD)
        if span.places is None:
            out_THD[rows] = attend(q_THD[rows], k_KGD, v_KGD, scale, window, softcap, None, sinks_H)
            continue
        k_KGD, v_KGD = k_KGD.to(q_THD.dtype), v_KGD.to(q_THD.dtype)
        for start in range(span.query_start, span.query_end, _ROWS_WITH_GAPS):
            rows = slice(start, min(start + _ROWS_WITH_GAPS, span.query_end))
            places_Q = span.places[rows.start - span.query_start : rows.stop - span.query_start]
            end = int(places_Q[-1]) + 1  # none of these queries sees later tokens
            seen = k_KGD[:end], v_KGD[:end]
            out_THD[rows] = attend(q_THD[rows], *seen, scale, window, softcap, places_Q, sinks_H)
    return out_THD


def _context(cache_SGD: torch.Tensor, context: slice | torch.Tensor, q_THD: torch.Tensor) -> torch.Tensor:
    """Return the rows of a context: a view of contiguous slots, else a copy, which the CPU kernel converts to
    float32."""
    if isinstance(context, slice):
        return cache_SGD[context]
    if not cpu_kernels.has_kernel(q_THD, cache_SGD):
        return cache_SGD.index_select(0, context)  # copies rows; an index copies number by number
    rows_KGD = torch.empty((len(context), *cache_SGD.shape[1:]))
    cpu_kernels.gather_wide(cpu_kernels.array(cache_SGD), context.numpy(), rows_KGD.numpy())
    return rows_KGD


def attend(  # noqa: PLR0913  as torch's own
    q_QHD: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    places_Q: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention [Q, H, D] over K tokens of the last Q of them, or of those at `places_Q`."""
    num_queries, num_keys = q_QHD.shape[0], k_KGD.shape[0]
    if places_Q is None and window is not None and num_keys > window + num_queries - 1:
        first = num_keys - window - num_queries + 1  # no query sees earlier tokens
        k_KGD, v_KGD, num_keys = k_KGD[first:], v_KGD[first:], num_keys - first
    # on a CPU queries are float32, for which torch's attention is fastest
    k_KGD, v_KGD = k_KGD.to(q_QHD.dtype), v_KGD.to(q_QHD.dtype)
    if softcap is not None or sinks_H is not None:
        return attend_by_logits(q_QHD, k_KGD, v_KGD, scale, window, softcap, places_Q, sinks_H)
    mask = None
    sees_all = places_Q is None and (window is None or num_keys <= window)
    if sees_all and num_queries >= _LEAST_SQUARE and 0 < num_keys - num_queries <= num_queries // 3:
        # the end of a square, half of which is skipped; with a mask all of the rectangle is computed
        q_QHD = torch.cat((q_QHD.new_zeros(num_keys - num_queries, *q_QHD.shape[1:]), q_QHD))
    is_causal = sees_all and len(q_QHD) == num_keys > 1
    is_cut = places_Q is None or window is None or num_keys <= window  # the last query sees all keys that are left
    if (num_queries > 1 and not is_causal) or not is_cut:
        mask = _mask(num_queries, num_keys, window, q_QHD.device, places_Q)
    if mask is not None and places_Q is None and q_QHD.device.type == "cpu" and num_queries <= _MOST_STACKED:
        return _attend_stacked(q_QHD, k_KGD, v_KGD, scale, window)
    out_HQD = F.scaled_dot_product_attention(
        q_QHD.transpose(0, 1)[None],
        k_KGD.transpose(0, 1)[None],
        v_KGD.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=True,
    )[0]
    return out_HQD.transpose(0, 1)[-num_queries:]


def _attend_stacked(
    q_QHD: torch.Tensor, k_KGD: torch.Tensor, v_KGD: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Compute `attend` with the queries of all heads that read the same keys as rows of one product.

    Torch would copy keys and values for each query head, and turn the mask into numbers in every layer.
    """
    (num_queries, num_heads, head_dim), (num_keys, num_kv_heads, _) = q_QHD.shape, k_KGD.shape
    num_shared = num_heads // num_kv_heads
    mask = _stacked_mask(num_queries, num_keys, window, num_shared, q_QHD.dtype)
    q_GNQD = q_QHD.reshape(num_queries, num_kv_heads, num_shared, head_dim).permute(1, 2, 0, 3)
    k_GKD, v_GKD = k_KGD.transpose(0, 1), v_KGD.transpose(0, 1)
    out_GRD = F.scaled_dot_product_attention(
        q_GNQD.flatten(1, 2)[None], k_GKD[None], v_GKD[None], attn_mask=mask, scale=scale
    )[0]
    return out_GRD.view(q_GNQD.shape).permute(2, 0, 1, 3).flatten(1, 2)


@lru_cache(maxsize=4)
def _stacked_mask(
    num_queries: int, num_keys: int, window: int | None, num_shared: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return what is added to logits [N * Q, K] of the last Q tokens: 0 for keys that they see, else minus infinity."""
    is_seen = causal_mask(num_queries, num_keys, window, torch.device("cpu"))
    return torch.zeros(is_seen.shape, dtype=dtype).masked_fill(~is_seen, -torch.inf).repeat(num_shared, 1)


def attend_by_logits(  # noqa: PLR0913  as `attend`
    q_QHD: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    places_Q: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `attend` with capped logits or sinks, for which torch has no fused kernel: allocates float32 [H, Q, K]
    logits."""
    (num_queries, _, head_dim), (num_keys, num_kv_heads, _) = q_QHD.shape, k_KGD.shape
    q_GNQD = (q_QHD * scale).transpose(0, 1).reshape(num_kv_heads, -1, num_queries, head_dim)
    k_G1DK, v_G1KD = k_KGD.permute(1, 2, 0)[:, None], v_KGD.transpose(0, 1)[:, None]
    logits = (q_GNQD @ k_G1DK).float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if num_queries > 1 or (window is not None and num_keys > window):
        seen = _mask(num_queries, num_keys, window, q_QHD.device, places_Q)
        logits = logits.masked_fill(~seen, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.view(num_kv_heads, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, sinks), dim=-1)
    shares = torch.softmax(logits, dim=-1)[..., :num_keys]
    out_GNQD = shares.to(v_KGD.dtype) @ v_G1KD
    return out_GNQD.flatten(0, 1).transpose(0, 1)


_LEAST_SQUARE = 640
"""From so many queries on, those behind a short context are computed as the end of a square: 0.64 to 0.85 of the time
with a mask on an AMD EPYC, one thread; fewer are slower. The result is bit-identical."""
_MOST_STACKED = 64
"""Most queries for which `_attend_stacked` is used. It takes 0.53, 0.75, 0.80 and 0.96 of the time for 2, 8, 32 and 64
queries on a Xeon with AMX, one thread, 9 query and 3 key heads of 64, 1,096 keys in bfloat16."""
_ROWS_WITH_GAPS = 64
"""Queries with gaps that are computed at a time; few, so that tokens after all of them are left out."""


def _mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device, places_Q: torch.Tensor | None
) -> torch.Tensor:
    if places_Q is None:
        return causal_mask(num_queries, num_keys, window, device)
    return causal_mask_at(places_Q, num_keys, window)


@lru_cache(maxsize=4)
def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return bool [Q, K]: whether each of the last Q tokens sees each key."""
    return causal_mask_at(torch.arange(num_keys - num_queries, num_keys, device=device), num_keys, window)


def causal_mask_at(places_Q: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """Return bool [Q, K]: whether the tokens at these places see each key."""
    keys_1K, places_Q1 = torch.arange(num_keys, device=places_Q.device)[None, :], places_Q[:, None]
    seen = keys_1K <= places_Q1
    return seen if window is None else seen & (keys_1K > places_Q1 - window)


def attend_reference(
    q_QHD: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Reference of `attend`: one query and one head at a time, in float64."""
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
