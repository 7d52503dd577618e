"""What a decoder computes with, as it lies in memory."""

from dataclasses import dataclass

import torch

from stillroom.models.mixture_of_experts import GatedMlp
from stillroom.ops.linear import Linear

# M model dimension, V vocabulary, H query heads, G key/value heads, D head dimension, E experts


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections that read the same input are one matrix: a product each, instead of three and two.

    Norm weights are in float32 where activations are, and where `ModelSpec.has_offset_norms`, with the offset added.
    """

    attention_norm: torch.Tensor
    qkv: Linear
    """M -> (H + 2 G) * D: queries, keys, values."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_attention_norm: torch.Tensor | None
    """Of what attention adds."""
    mlp_norm: torch.Tensor
    router: Linear | None
    """M -> E: the MLP is a mixture of experts."""
    experts: tuple[GatedMlp, ...]
    """One, or one for each expert of the mixture."""
    post_mlp_norm: torch.Tensor | None
    """Of what the MLP adds."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding_VM: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: Linear
