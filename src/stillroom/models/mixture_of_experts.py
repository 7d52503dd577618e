"""The gated MLP, and mixtures of experts: a router picks a few MLPs for each token (arXiv 2401.04088).

`mix` sorts tokens by expert, so that each chosen expert is one product over all its tokens. It copies the number of
tokens per expert to the host once per layer; GPUs with Triton compute `DeviceExperts` instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stillroom.ops.device_attention import has_kernels
from stillroom.ops.device_experts import DeviceExperts
from stillroom.ops.linear import Linear
from stillroom.ops.row_kernels import gate

# T tokens, M model dimension, I inner dimension of an expert, E experts, A active experts per token


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    gate_up: Linear
    """M -> 2 I: gate, then up."""
    down: Linear
    activation: str
    """silu | gelu_tanh."""

    def __call__(self, x_TM: torch.Tensor) -> torch.Tensor:
        """[T, M] -> [T, M]."""
        return self.down(gate(self.gate_up(x_TM), self.activation))


def route(router_TE: torch.Tensor, num_active: int, is_normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's expert weights, float32 [T, A], and experts, int64 [T, A], from router logits."""
    weights_TA, experts_TA = torch.topk(torch.softmax(router_TE.float(), dim=-1), num_active, dim=-1)
    if is_normalised:
        weights_TA = weights_TA / weights_TA.sum(dim=-1, keepdim=True)
    return weights_TA, experts_TA


def on_device(experts: Sequence[GatedMlp]) -> DeviceExperts | None:
    """Return the experts for the GPU kernel; None without a mixture or without a kernel for the device."""
    if len(experts) == 1 or not has_kernels(experts[0].down.weight.device):
        return None
    return DeviceExperts([one.gate_up for one in experts], [one.down for one in experts], experts[0].activation)


def mix(x_TM: torch.Tensor, routes: tuple[torch.Tensor, torch.Tensor], experts: Sequence[GatedMlp]) -> torch.Tensor:
    """Return the weighted sum [T, M] of each token's experts; `routes` comes from `route`."""
    weights_TA, experts_TA = routes
    num_tokens, num_active = experts_TA.shape
    order = experts_TA.flatten().argsort(stable=True)  # assignments (token, choice) sorted by expert
    sizes = torch.bincount(experts_TA.flatten(), minlength=len(experts)).tolist()
    out = x_TM.new_empty(num_tokens * num_active, x_TM.shape[1])
    start = 0
    for expert, size in zip(experts, sizes, strict=True):
        if size:
            rows = order[start : start + size]
            out[rows] = expert(x_TM[rows // num_active])
            start += size
    weighted = out.view(num_tokens, num_active, x_TM.shape[1]) * weights_TA[:, :, None]
    return weighted.sum(dim=1).to(x_TM.dtype)


def mix_reference(
    x_TM: torch.Tensor, routes: tuple[torch.Tensor, torch.Tensor], experts: Sequence[GatedMlp]
) -> torch.Tensor:
    """Reference of `mix`: one token and one expert at a time, in float64."""
    out_TM = torch.zeros_like(x_TM)
    for token, (weights, chosen) in enumerate(zip(*routes, strict=True)):
        x = x_TM[token].double()
        total = torch.zeros_like(x)
        for weight, index in zip(weights, chosen.tolist(), strict=True):
            expert = experts[index]
            inner = gate((expert.gate_up.weight.double() @ x)[None], expert.activation)[0]
            total += weight.double() * (expert.down.weight.double() @ inner)
        out_TM[token] = total.to(x_TM.dtype)
    return out_TM
