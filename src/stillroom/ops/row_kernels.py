"""RMS norm and the gate of the MLP: kernels for float32 on a CPU and for gates on a GPU, else torch's operators."""

import torch
import torch.nn.functional as F

from stillroom.ops import cpu_kernels
from stillroom.ops.device_attention import current_gpu, has_kernels, row_kernels_of_gpu

# T tokens, M model dimension, I inner dimension of the MLP


def rms_norm(x: torch.Tensor, weight_M: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension; same shape and dtype."""
    if not _has_kernel(x):
        return F.rms_norm(x, weight_M.shape, weight_M, epsilon)
    rows = x.contiguous()
    out = torch.empty_like(rows)
    width = rows.shape[-1]
    cpu_kernels.rms_norm(rows.view(-1, width).numpy(), weight_M.numpy(), epsilon, out.view(-1, width).numpy())
    return out


def gate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up: [T, 2 * I] with gate before up -> [T, I]; the activation is silu or gelu_tanh."""
    if activation == "silu" and _has_kernel(gate_up):
        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2))
        cpu_kernels.silu_gate(gate_up.numpy(), out.numpy())
        return out
    if activation == "silu" and has_kernels(gate_up.device):
        with current_gpu(gate_up.device):
            gated: torch.Tensor = row_kernels_of_gpu().silu_gate(gate_up)
        return gated
    gates, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gates) if activation == "silu" else F.gelu(gates, approximate="tanh")) * up


def _has_kernel(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32
