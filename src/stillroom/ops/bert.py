"""BERT's encoder: post-norm, learned positions. The embedder and the bundled reader compute with it.

The names of its tensors are its own; `tensors_of_checkpoint` reads those of published checkpoints. Attention is written
with matrix products, a few rows at a time: at these lengths they are faster on a CPU than the fused kernel, except
under autocast, which would convert the scores of all pairs twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stillroom.ops.steady_linear import SteadyLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class BertSpec:
    """Sizes of the encoder; the defaults are those of all-MiniLM-L6-v2."""

    vocab_size: int = 30_522
    hidden_size: int = 384
    num_layers: int = 6
    num_heads: int = 12
    inner_size: int = 1_536
    max_positions: int = 512
    num_parts: int = 2
    epsilon: float = 1e-12
    """Of layer norms."""


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class _Layer(nn.Module):
    def __init__(self, spec: BertSpec) -> None:
        super().__init__()
        self.num_heads = spec.num_heads
        self.qkv = SteadyLinear(spec.hidden_size, 3 * spec.hidden_size)
        self.out = SteadyLinear(spec.hidden_size, spec.hidden_size)
        self.norm_1 = nn.LayerNorm(spec.hidden_size, eps=spec.epsilon)
        self.up = SteadyLinear(spec.hidden_size, spec.inner_size)
        self.down = SteadyLinear(spec.inner_size, spec.hidden_size)
        self.norm_2 = nn.LayerNorm(spec.hidden_size, eps=spec.epsilon)

    def forward(self, hidden: Tensor, bias: Tensor, dropout: float) -> Tensor:
        num_rows, length, size = hidden.shape
        heads = self.qkv(hidden).view(num_rows, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads[0], heads[1], heads[2]
        if torch.is_autocast_enabled(hidden.device.type):
            attended = F.scaled_dot_product_attention(query, key, value, bias.to(query.dtype))
        else:
            attended = _attended(query * query.shape[-1] ** -0.5, key, value, bias)
        attended = attended.transpose(1, 2).reshape(num_rows, length, size)
        hidden = self.norm_1(hidden + F.dropout(self.out(attended), dropout))
        normed: Tensor = self.norm_2(hidden + F.dropout(self.down(self.up(hidden, then_gelu=True)), dropout))
        return normed


_SCORES_AT_ONCE = 2**18
"""Scores that are computed at a time on a CPU, so that they stay in its cache until they are multiplied."""


def _attended(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Return attention of each row's tokens to each other, [rows, heads, tokens, head_size], as all arguments but bias.

    Args:
        query: scaled.
        bias: [rows, 1, 1, tokens] or [rows, 1, tokens, tokens], added to the scores.
    """
    num_rows, num_heads, length, _ = query.shape
    num_at_once = max(1, _SCORES_AT_ONCE // (num_heads * length**2)) if query.device.type == "cpu" else num_rows
    attended = []
    for first in range(0, num_rows, num_at_once):
        rows = slice(first, first + num_at_once)
        scores = query[rows] @ key[rows].transpose(-1, -2) + bias[rows]
        attended.append(torch.softmax(scores, dim=-1) @ value[rows])
    return torch.cat(attended)


class BertEncoder(nn.Module):
    """All weights are zeros until a checkpoint is loaded: drawing random ones takes longer than reading a file."""

    def __init__(self, spec: BertSpec) -> None:
        super().__init__()
        self.words = _Embedding(spec.vocab_size, spec.hidden_size)
        self.positions = _Embedding(spec.max_positions, spec.hidden_size)
        self.parts = _Embedding(spec.num_parts, spec.hidden_size)
        self.norm = nn.LayerNorm(spec.hidden_size, eps=spec.epsilon)
        self.layers = nn.ModuleList(_Layer(spec) for _ in range(spec.num_layers))

    def encode(self, token_ids: Tensor, parts: Tensor, is_token: Tensor, dropout: float = 0.0) -> Tensor:
        """Return the hidden states of the last layer, [rows, tokens, hidden_size].

        Args:
            token_ids: [rows, tokens], int64.
            parts: [rows, tokens], int64: 0 in the first part, 1 in the second.
            is_token: [rows, tokens], bool: False for padding.
            dropout: of the outputs of attention and inner layer; for training.
        """
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        hidden = self.norm(self.words(token_ids) + self.positions(positions) + self.parts(parts))
        bias = torch.zeros(is_token.shape, dtype=hidden.dtype, device=hidden.device)
        bias = bias.masked_fill(~is_token, torch.finfo(hidden.dtype).min)[:, None, None, :]
        for layer in self.layers:
            hidden = layer(hidden, bias, dropout)
        encoded: Tensor = hidden
        return encoded

    def encode_packed(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the hidden states of the last layer, [tokens, hidden_size], of texts that lie back to back without
        padding. Each text attends to itself only, and all its tokens are in part 0.

        Args:
            token_ids: [tokens], int64.
            lengths: numbers of tokens of the texts.
        """
        device = token_ids.device
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        texts = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device))
        hidden = self.norm(self.words(token_ids) + self.positions(positions) + self.parts.weight[0])[None]
        bias = torch.zeros((len(texts), len(texts)), dtype=hidden.dtype, device=device)
        bias = bias.masked_fill(texts[:, None] != texts, torch.finfo(hidden.dtype).min)[None, None]
        for layer in self.layers:
            hidden = layer(hidden, bias, 0.0)
        encoded: Tensor = hidden[0]
        return encoded


def tensors_of_checkpoint(checkpoint: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Return the tensors of a `BertEncoder` from those of a transformers checkpoint of BERT.

    Raises:
        KeyError: the checkpoint lacks a tensor.
    """
    state = {name.removeprefix("bert."): tensor for name, tensor in checkpoint.items()}
    found = {own: state[f"embeddings.{name}"] for own, name in _EMBEDDINGS.items()}
    for layer in range(num_layers):
        source = f"encoder.layer.{layer}."
        for kind in ("weight", "bias"):
            parts = [state[f"{source}attention.self.{name}.{kind}"] for name in ("query", "key", "value")]
            found[f"layers.{layer}.qkv.{kind}"] = torch.cat(parts)
            for own, name in _PARTS_OF_LAYER.items():
                found[f"layers.{layer}.{own}.{kind}"] = state[f"{source}{name}.{kind}"]
    return found


_EMBEDDINGS = {
    "words.weight": "word_embeddings.weight",
    "positions.weight": "position_embeddings.weight",
    "parts.weight": "token_type_embeddings.weight",
    "norm.weight": "LayerNorm.weight",
    "norm.bias": "LayerNorm.bias",
}
_PARTS_OF_LAYER = {
    "out": "attention.output.dense",
    "norm_1": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm_2": "output.LayerNorm",
}
