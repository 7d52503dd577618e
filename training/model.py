"""A Llama for training in plain PyTorch, with the tensor names and arithmetic of transformers and Stillroom.

R rows, T tokens, H heads, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.isolation import Isolation, attend
from training.recipe import Shape


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def rotation(shape: Shape, positions_RT: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary positions, (R, 1, T, D)."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions_RT.device).float() / shape.head_dim
    angles = positions_RT.float()[:, None, :, None] * shape.rope_theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotated(x_RHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions in Hugging Face's layout, which rotates the two halves of a head."""
    first, second = x_RHTD.float().chunk(2, dim=-1)
    return (x_RHTD.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x_RHTD.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, isolation: Isolation) -> Tensor:
        rows, tokens, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(rows, tokens, -1, self.shape.head_dim).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        out = attend(rotated(q, cos, sin), rotated(k, cos, sin), v, isolation)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, tokens, -1))
        return projected


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, isolation: Isolation) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, isolation)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """A Llama up to its last norm; `logits` applies the head, which is tied to `embed_tokens`."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, shape.norm_eps)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        """Draw normal weights; residual projections are scaled down by the number of layers (GPT-2)."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= (2 * self.shape.num_layers) ** 0.5
                nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, tokens_RT: Tensor, positions_RT: Tensor, isolation: Isolation) -> Tensor:
        """Return hidden states, (R, T, hidden size)."""
        cos, sin = rotation(self.shape, positions_RT)
        x = self.embed_tokens(tokens_RT)
        for layer in self.layers:
            x = layer(x, cos, sin, isolation)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)
