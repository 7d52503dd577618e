"""The weights of a decoder in memory."""

from dataclasses import dataclass

import torch

from stillroom.models.mixture_of_experts import GatedMlp
from stillroom.ops.linear import Linear

# M model dimension, V vocabulary, H query heads, G key/value heads, D head dimension, E experts


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections of the same input are stacked into one matrix.

    Norm weights are float32 where activations are, and with `ModelSpec.has_offset_norms`, whose offset is added.
    """

    attention_norm: torch.Tensor
    qkv: Linear
    """M -> (H + 2 G) * D: queries, keys, values."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_attention_norm: torch.Tensor | None
    """Norm of attention's output."""
    mlp_norm: torch.Tensor
    router: Linear | None
    """M -> E; None unless the MLP is a mixture of experts."""
    experts: tuple[GatedMlp, ...]
    """The experts of the mixture, or one MLP."""
    post_mlp_norm: torch.Tensor | None
    """Norm of the MLP's output."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding_VM: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: Linear
