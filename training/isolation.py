"""Attention masks of packed rows: a token attends to its sample's context and to its own branch, causally.

Two equivalent implementations: a dense mask for any device, and a block mask whose empty blocks a GPU skips.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Isolation = Any
"""A boolean mask (R, 1, T, T), true where a token attends; or a `BlockMask` of flex attention."""


def dense_mask(samples_RT: Tensor, branches_RT: Tensor) -> Tensor:
    """Return a boolean mask (R, 1, T, T)."""
    size = samples_RT.shape[1]
    order = torch.arange(size, device=samples_RT.device)
    is_earlier = order[:, None] >= order[None, :]
    is_own = samples_RT[:, :, None] == samples_RT[:, None, :]
    is_context = branches_RT[:, None, :] == 0
    is_branch = branches_RT[:, :, None] == branches_RT[:, None, :]
    return (is_earlier & is_own & (is_context | is_branch))[:, None]


def block_mask(samples_RT: Tensor, branches_RT: Tensor, *, is_compiled: bool) -> Isolation:
    """Return the mask for flex attention."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_own = samples_RT[row, query] == samples_RT[row, key]
        branch = branches_RT[row, key]
        return (query >= key) & is_own & ((branch == 0) | (branch == branches_RT[row, query]))

    rows, size = samples_RT.shape
    create: Callable[..., Any] = _compiled(create_block_mask) if is_compiled else create_block_mask
    return create(sees, rows, None, size, size, device=str(samples_RT.device))


def attend(q_RHTD: Tensor, k_RHTD: Tensor, v_RHTD: Tensor, isolation: Isolation) -> Tensor:
    """Return attention outputs (R, H, T, D); each key head serves a group of neighbouring query heads."""
    if isinstance(isolation, Tensor):
        return F.scaled_dot_product_attention(q_RHTD, k_RHTD, v_RHTD, attn_mask=isolation, enable_gqa=True)
    from torch.nn.attention.flex_attention import flex_attention

    is_alone = q_RHTD.is_cuda and not torch.compiler.is_compiling()  # otherwise it is compiled with the model
    flex: Any = _compiled(flex_attention) if is_alone else flex_attention
    out: Tensor = flex(q_RHTD, k_RHTD, v_RHTD, block_mask=isolation, enable_gqa=True)
    return out


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled
