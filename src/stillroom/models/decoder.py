"""The decoder: packed tokens in, hidden states out, keys and values written to their slots on the way.

One class for every architecture that `ModelSpec` describes. Sequences of a batch are packed back to back, without
padding; only attention knows where one ends. Oracle: transformers' own models (tests/models/test_oracle.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stillroom.models.spec import ModelSpec
from stillroom.ops.attention import AttentionSpan, attend_spans
from stillroom.ops.rope import cos_sin, inverse_frequencies, rotate

# T packed tokens, B rows whose logits are wanted, M model dimension, V vocabulary, S slots,
# H query heads, G key/value heads, D head dimension

LayerKV = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Layer index -> its K and V, each [S, G, D], to be written and read by slot."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections that read the same input are one matrix: a product each, instead of three and two."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    """[(H + 2 G) * D, M]: queries, keys, values."""
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding_VM: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head_VM: torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedInput:
    """One step's tokens of all sequences, back to back."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    """Where each token's K and V are written."""
    spans: list[AttentionSpan]


class Decoder:
    """Weights plus arithmetic; holds no state between calls."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights) -> None:
        self.spec = spec
        self.weights = weights
        self.device = weights.embedding_VM.device
        self.dtype = weights.embedding_VM.dtype
        inv_freq, self._rope_factor = inverse_frequencies(spec.rope)
        self._inv_freq = inv_freq.to(self.device)
        self._scale = spec.head_dim**-0.5

    @torch.inference_mode()
    def hidden_states(self, packed: PackedInput, layer_kv: LayerKV) -> torch.Tensor:
        """Final hidden states [T, M], before the last norm. Writes this step's K (rotated) and V to their slots."""
        x_TM = F.embedding(packed.token_ids_T, self.weights.embedding_VM)
        rope = cos_sin(self._inv_freq, self._rope_factor, packed.positions_T, self.dtype)
        for index, layer in enumerate(self.weights.layers):
            x_TM = x_TM + self._attention(index, layer, x_TM, rope, packed, layer_kv(index))
            x_TM = x_TM + self._mlp(layer, x_TM)
        return x_TM

    @torch.inference_mode()
    def logits(self, hidden_BM: torch.Tensor) -> torch.Tensor:
        """Float32 logits [B, V] of the tokens that follow these hidden states."""
        return F.linear(self._norm(hidden_BM, self.weights.final_norm), self.weights.lm_head_VM).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.spec.norm_eps)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x_TM: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        packed: PackedInput,
        kv_SGD: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        spec = self.spec
        qkv = F.linear(self._norm(x_TM, layer.attention_norm), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(x_TM.shape[0], spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        q_THD, k_TGD, v_TGD = torch.split(qkv, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_THD, k_TGD = self._norm(q_THD, layer.q_norm), self._norm(k_TGD, layer.k_norm)
        q_THD, k_TGD = rotate(q_THD, *rope), rotate(k_TGD, *rope)
        kv_SGD[0].index_copy_(0, packed.slots_T, k_TGD)
        kv_SGD[1].index_copy_(0, packed.slots_T, v_TGD)
        out_THD = attend_spans(q_THD, kv_SGD, packed.spans, self._scale, spec.windows[index])
        return F.linear(out_THD.flatten(1), layer.output, layer.output_bias)

    def _mlp(self, layer: LayerWeights, x_TM: torch.Tensor) -> torch.Tensor:
        gate_up = F.linear(self._norm(x_TM, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
