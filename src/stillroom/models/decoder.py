"""The decoder: packed tokens in, hidden states out, keys and values written to their slots on the way.

One class for every architecture that `ModelSpec` describes. Sequences of a batch are packed back to back, without
padding; only attention knows where one ends. Oracle: transformers' own models (tests/models/test_oracle.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stillroom.models.spec import ModelSpec
from stillroom.ops.attention import AttentionPlan, AttentionSpan, only_rows
from stillroom.ops.linear import Linear
from stillroom.ops.rope import cos_sin, inverse_frequencies, rotate_and_store
from stillroom.ops.rows import rms_norm, silu_gate

# T packed tokens, B rows whose logits are wanted, M model dimension, V vocabulary, S slots,
# H query heads, G key/value heads, D head dimension

LayerKV = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Layer index -> its K and V, each [S, G, D], to be written and read by slot."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections that read the same input are one matrix: a product each, instead of three and two."""

    attention_norm: torch.Tensor
    qkv: Linear
    """M -> (H + 2 G) * D: queries, keys, values."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding_VM: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: Linear


class PackedInput:
    """One step's tokens of all sequences, back to back."""

    def __init__(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        spans: list[AttentionSpan],
        wanted: list[int],
    ) -> None:
        """
        Args:
            slots_T: where each token's K and V are written.
            spans: the sequences, in order.
            wanted: the rows whose hidden states are wanted, ascending; the last layer computes no others.
        """
        self.token_ids_T, self.positions_T, self.slots_T = token_ids_T, positions_T, slots_T
        self.plan = AttentionPlan(spans)
        self.wanted_B = torch.tensor(wanted, dtype=torch.int64, device=token_ids_T.device)
        is_all = len(wanted) == token_ids_T.shape[0]
        self.last_plan = self.plan if is_all else AttentionPlan(only_rows(spans, wanted))


class Decoder:
    """Weights plus arithmetic; holds no state between calls."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights) -> None:
        self.spec = spec
        self.weights = weights
        self.device = weights.embedding_VM.device
        self.dtype = weights.embedding_VM.dtype
        # a CPU has no arithmetic in half precision that is worth its rounding; only weights and KV are stored in it
        self.activation_dtype = torch.float32 if self.device.type == "cpu" else self.dtype
        inv_freq, self._rope_factor = inverse_frequencies(spec.rope)
        self._inv_freq = inv_freq.to(self.device)
        self._scale = spec.head_dim**-0.5

    @torch.inference_mode()
    def hidden_states(self, packed: PackedInput, layer_kv: LayerKV) -> torch.Tensor:
        """Final hidden states [B, M] of the wanted rows, before the last norm. Writes this step's K (rotated) and V to
        their slots."""
        x_TM = F.embedding(packed.token_ids_T, self.weights.embedding_VM).to(self.activation_dtype)
        rope = cos_sin(self._inv_freq, self._rope_factor, packed.positions_T, self.activation_dtype)
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            q_THD = self._queries(layer, x_TM, rope, packed.slots_T, layer_kv(index))
            plan = packed.plan
            if index == last:
                x_TM, q_THD, plan = x_TM[packed.wanted_B], q_THD[packed.wanted_B], packed.last_plan
            out_THD = plan.attend(q_THD, layer_kv(index), self._scale, self.spec.windows[index])
            x_TM = x_TM + layer.output(out_THD.flatten(1))
            x_TM = x_TM + self._mlp(layer, x_TM)
        return x_TM

    @torch.inference_mode()
    def logits(self, hidden_BM: torch.Tensor) -> torch.Tensor:
        """Float32 logits [B, V] of the tokens that follow these hidden states."""
        return self.weights.lm_head(self._norm(hidden_BM, self.weights.final_norm)).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.spec.norm_eps)

    def _queries(
        self,
        layer: LayerWeights,
        x_TM: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        slots_T: torch.Tensor,
        kv_SGD: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Rotated queries [T, H, D]; keys and values go to their slots."""
        spec = self.spec
        qkv = layer.qkv(self._norm(x_TM, layer.attention_norm))
        qkv = qkv.view(x_TM.shape[0], spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_THD, k_TGD, v_TGD = torch.split(qkv, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
            qkv = torch.cat((self._norm(q_THD, layer.q_norm), self._norm(k_TGD, layer.k_norm), v_TGD), dim=1)
        return rotate_and_store(qkv, rope, slots_T, kv_SGD)

    def _mlp(self, layer: LayerWeights, x_TM: torch.Tensor) -> torch.Tensor:
        return layer.down(silu_gate(layer.gate_up(self._norm(x_TM, layer.mlp_norm))))
