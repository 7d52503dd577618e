"""The encoder of the bundled reader: scores each token of a passage as start and end of the answer to a question.

The architecture is BERT's (all-MiniLM-L6-v2, post-norm, learned positions), with one
linear head for the start and the end of the answer.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

_EPSILON = 1e-12
"""Of layer norms, as in the checkpoint of all-MiniLM-L6-v2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSpec:
    """Sizes of the encoder."""

    vocab_size: int = 30_522
    hidden_size: int = 384
    num_layers: int = 6
    num_heads: int = 12
    inner_size: int = 1_536
    max_positions: int = 512
    pair_size: int = 0
    """Size of the vectors whose product joins the start and the end of an answer; 0: they are scored alone."""


T = TypeVar("T", Tensor, NDArray[np.float32])


def span_scores(outputs: T) -> T:
    """Return the score of each answer, [tokens, tokens] by first and last token: the logits of its start and its end,
    and the product of their vectors if the model has them.

    Args:
        outputs: of `ReaderModel` for one row, [tokens, 2 + 2 * pair_size].
    """
    scores = outputs[:, None, 0] + outputs[None, :, 1]
    size = (outputs.shape[1] - 2) // 2
    if size:
        scores = scores + outputs[:, 2 : 2 + size] @ outputs[:, 2 + size :].T * size**-0.5
    return scores


class _Layer(nn.Module):
    def __init__(self, spec: ReaderSpec) -> None:
        super().__init__()
        self.num_heads = spec.num_heads
        self.qkv = nn.Linear(spec.hidden_size, 3 * spec.hidden_size)
        self.out = nn.Linear(spec.hidden_size, spec.hidden_size)
        self.norm_1 = nn.LayerNorm(spec.hidden_size, eps=_EPSILON)
        self.up = nn.Linear(spec.hidden_size, spec.inner_size)
        self.down = nn.Linear(spec.inner_size, spec.hidden_size)
        self.norm_2 = nn.LayerNorm(spec.hidden_size, eps=_EPSILON)

    def forward(self, hidden: Tensor, bias: Tensor, dropout: float) -> Tensor:
        num_rows, length, size = hidden.shape
        heads = self.qkv(hidden).view(num_rows, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads[0], heads[1], heads[2]
        scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-1, -2)) + bias
        attended = torch.matmul(torch.softmax(scores, dim=-1), value).transpose(1, 2).reshape(num_rows, length, size)
        hidden = self.norm_1(hidden + F.dropout(self.out(attended), dropout))
        normed: Tensor = self.norm_2(hidden + F.dropout(self.down(F.gelu(self.up(hidden))), dropout))
        return normed


class ReaderModel(nn.Module):
    """Encoder and head. Attention is written with matrix products: at these lengths they are faster on a CPU than the
    fused kernel."""

    def __init__(self, spec: ReaderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.words = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.positions = nn.Embedding(spec.max_positions, spec.hidden_size)
        self.parts = nn.Embedding(2, spec.hidden_size)
        self.norm = nn.LayerNorm(spec.hidden_size, eps=_EPSILON)
        self.layers = nn.ModuleList(_Layer(spec) for _ in range(spec.num_layers))
        self.head = nn.Linear(spec.hidden_size, 2 + 2 * spec.pair_size)

    def forward(self, token_ids: Tensor, parts: Tensor, is_token: Tensor, dropout: float = 0.0) -> Tensor:
        """Return float32 [rows, tokens, 2 + 2 * pair_size]: logits of start and end, and the vectors of `span_scores`.

        Args:
            token_ids: [rows, tokens], int64.
            parts: [rows, tokens], int64: 0 in the question, 1 in the passage.
            is_token: [rows, tokens], bool: False for padding.
            dropout: of the outputs of attention and inner layer; for training.
        """
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        hidden = self.words(token_ids) + self.positions(positions) + self.parts(parts)
        hidden = self.norm(hidden)
        bias = torch.zeros(is_token.shape, dtype=hidden.dtype, device=hidden.device)
        bias = bias.masked_fill(~is_token, torch.finfo(hidden.dtype).min)[:, None, None, :]
        for layer in self.layers:
            hidden = layer(hidden, bias, dropout)
        outputs: Tensor = self.head(hidden).float()
        return outputs
