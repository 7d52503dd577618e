"""A mixture of gated MLPs on a GPU that does not wait for the number of tokens per expert.

The number of tiles is the most that routing can need; tiles that are not needed have no rows. Same result as
`models.mixture_of_experts.mix`, which waits for the device. Kernel: `triton_experts`.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from stillroom.ops.device_attention import current_gpu
from stillroom.ops.linear import Linear
from stillroom.ops.row_kernels import gate

# T tokens, A active experts per token, R = T * A rows (token, choice), E experts, N tiles, M model dimension


class DeviceExperts:
    """The experts of one layer, by the addresses of their weights."""

    def __init__(self, gate_ups: Sequence[Linear], downs: Sequence[Linear], activation: str) -> None:
        self._matrices = [[linear.weight for linear in linears] for linears in (gate_ups, downs)]  # kept alive
        assert all(linear.bias is None for linear in (*gate_ups, *downs)), "no known mixture has biases"
        self._num_outputs = [matrices[0].shape[0] for matrices in self._matrices]
        self._activation = activation
        device = gate_ups[0].weight.device
        for weight in (weight for matrices in self._matrices for weight in matrices):
            assert weight.is_contiguous() and weight.data_ptr() % 16 == 0
        self._addresses_E = [
            torch.tensor([weight.data_ptr() for weight in matrices], dtype=torch.int64, device=device)
            for matrices in self._matrices
        ]

    def mix(self, x_TM: torch.Tensor, routes: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the weighted sum [T, M] of each token's experts; `routes` are weights and experts, both [T, A]."""
        weights_TA, experts_TA = routes
        num_tokens, num_active = experts_TA.shape
        num_experts, num_rows = len(self._matrices[0]), experts_TA.numel()
        block_r = 16 if num_rows <= 16 * num_experts else 64
        order_R = experts_TA.flatten().argsort(stable=True)
        tiles_N3 = expert_tiles(experts_TA.flatten(), num_experts, block_r)
        kernels: Any = import_module("stillroom.ops.triton_experts")
        gate_up, down = self._num_outputs
        with current_gpu(x_TM.device):
            inner = kernels.multiply(
                x_TM, self._addresses_E[0], tiles_N3, order_R, (gate_up, block_r, num_active), is_first=True
            )
            inner = gate(inner, self._activation)
            out: torch.Tensor = kernels.multiply(
                inner, self._addresses_E[1], tiles_N3, order_R, (down, block_r, num_active), is_first=False
            )
        weighted = out.view(num_tokens, num_active, -1) * weights_TA[:, :, None]
        return weighted.sum(dim=1).to(x_TM.dtype)


def expert_tiles(experts_R: torch.Tensor, num_experts: int, block_r: int) -> torch.Tensor:
    """Return tiles, int64 [N, 3]: expert, and bounds of at most `block_r` of its rows, sorted by expert.

    N depends on shapes only; tiles that are not needed are empty.
    """
    device, num_rows = experts_R.device, len(experts_R)
    sizes_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
    sizes_E.index_add_(0, experts_R, torch.ones_like(experts_R))
    ends_E = sizes_E.cumsum(0)
    num_tiles_E = (sizes_E + block_r - 1) // block_r
    tile_ends_E = num_tiles_E.cumsum(0)
    tiles_N = torch.arange(min(num_experts, num_rows) + num_rows // block_r, device=device)
    owners_N = torch.searchsorted(tile_ends_E, tiles_N, right=True)
    expert_N = owners_N.clamp(max=num_experts - 1)
    begin_N = ends_E[expert_N] - sizes_E[expert_N] + (tiles_N - tile_ends_E[expert_N] + num_tiles_E[expert_N]) * block_r
    end_N = torch.minimum(begin_N + block_r, ends_E[expert_N])
    return torch.stack((expert_N, begin_N, torch.where(owners_N < num_experts, end_N, begin_N)), dim=1)
