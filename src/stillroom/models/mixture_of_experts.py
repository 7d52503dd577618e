"""A mixture of experts in place of one MLP: a router picks a few experts for each token (arXiv 2401.04088).

Tokens are sorted by expert, so that each expert that anybody chose is one product over all its tokens. The number of
tokens per expert crosses to the host once per layer.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

# T tokens, M model dimension, I inner dimension of an expert, E experts, A active experts per token

Activation = Callable[[torch.Tensor], torch.Tensor]


def route(router_TE: torch.Tensor, num_active: int, is_normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """From router logits to each token's weights, float32 [T, A], and experts, int64 [T, A]."""
    weights_TA, experts_TA = torch.topk(torch.softmax(router_TE.float(), dim=-1), num_active, dim=-1)
    if is_normalised:
        weights_TA = weights_TA / weights_TA.sum(dim=-1, keepdim=True)
    return weights_TA, experts_TA


def mix(
    x_TM: torch.Tensor,
    routes: tuple[torch.Tensor, torch.Tensor],
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation,
) -> torch.Tensor:
    """The weighted sum [T, M] of each token's experts.

    Args:
        routes: what `route` returned.
        gate_up: [E, 2 I, M].
        down: [E, M, I].
    """
    weights_TA, experts_TA = routes
    num_tokens, num_active = experts_TA.shape
    order = experts_TA.flatten().argsort(stable=True)  # assignments (token, choice), those of one expert together
    sizes = torch.bincount(experts_TA.flatten(), minlength=gate_up.shape[0]).tolist()
    out = x_TM.new_empty(num_tokens * num_active, x_TM.shape[1])
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            rows = order[start : start + size]
            out[rows] = expert_mlp(x_TM[rows // num_active], gate_up[expert], down[expert], activation)
            start += size
    weighted = out.view(num_tokens, num_active, -1) * weights_TA[:, :, None]
    return weighted.sum(dim=1).to(x_TM.dtype)


def expert_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation) -> torch.Tensor:
    """One expert over some tokens."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(activation(gate) * up, down)


def mix_reference(
    x_TM: torch.Tensor,
    routes: tuple[torch.Tensor, torch.Tensor],
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation,
) -> torch.Tensor:
    """The slow twin of `mix`: one token and one expert at a time, in float64."""
    out_TM = torch.zeros_like(x_TM)
    for token, (weights, experts) in enumerate(zip(*routes, strict=True)):
        x = x_TM[token].double()
        parts = [
            weight.double() * expert_mlp(x, gate_up[expert].double(), down[expert].double(), activation)
            for weight, expert in zip(weights, experts.tolist(), strict=True)
        ]
        out_TM[token] = torch.stack(parts).sum(dim=0).to(x_TM.dtype)
    return out_TM
