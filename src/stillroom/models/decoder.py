"""The decoder: packed tokens in, hidden states out, keys and values written to their slots on the way.

One class for every architecture that `ModelSpec` describes. Sequences of a batch are packed back to back, without
padding; only attention knows where one ends. Oracle: transformers' own models (tests/models/test_oracle.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from stillroom.models.mixture_of_experts import Activation, mix, route
from stillroom.models.spec import ModelSpec
from stillroom.ops.attention import AttentionSpan, attend_spans
from stillroom.ops.rope import RopeSpec, cos_sin, inverse_frequencies, rotate

# T packed tokens, B rows whose logits are wanted, M model dimension, V vocabulary, S slots,
# H query heads, G key/value heads, D head dimension, E experts, I inner dimension of an MLP

LayerKV = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Layer index -> its K and V, each [S, G, D], to be written and read by slot."""

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of this step's positions."""

_ACTIVATIONS: dict[str, Activation] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Projections that read the same input are one matrix: a product each, instead of three and two.

    Norm weights are in float32 where `ModelSpec.has_offset_norms`, with the offset added.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    """[(H + 2 G) * D, M]: queries, keys, values."""
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor | None
    """Of what attention adds."""
    mlp_norm: torch.Tensor
    router: torch.Tensor | None
    """[E, M]: the MLP is a mixture of experts, and `gate_up` and `down` hold one matrix for each."""
    gate_up: torch.Tensor
    """[2 I, M], or [E, 2 I, M]."""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    """[M, I], or [E, M, I]."""
    down_bias: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None
    """Of what the MLP adds."""


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
        self._rope = self._frequencies(spec.rope)
        self._local_rope = self._frequencies(spec.local_rope or spec.rope)
        self._activation = _ACTIVATIONS[spec.activation]
        # rounded as the product with the embedding will be
        self._embedding_scale = float(torch.tensor(spec.embedding_scale or 1.0, dtype=self.dtype))

    @torch.inference_mode()
    def hidden_states(self, packed: PackedInput, layer_kv: LayerKV) -> torch.Tensor:
        """Final hidden states [T, M], before the last norm. Writes this step's K (rotated) and V to their slots."""
        x_TM = F.embedding(packed.token_ids_T, self.weights.embedding_VM)
        if self.spec.embedding_scale is not None:
            x_TM = x_TM * self._embedding_scale
        rope = local_rope = cos_sin(*self._rope, packed.positions_T, self.dtype)
        if self.spec.local_rope is not None:
            local_rope = cos_sin(*self._local_rope, packed.positions_T, self.dtype)
        for index, layer in enumerate(self.weights.layers):
            turn = rope if self.spec.windows[index] is None else local_rope
            x_TM = x_TM + self._attention(index, layer, x_TM, turn, packed, layer_kv(index))
            x_TM = x_TM + self._mlp(layer, x_TM)
        return x_TM

    @torch.inference_mode()
    def logits(self, hidden_BM: torch.Tensor) -> torch.Tensor:
        """Float32 logits [B, V] of the tokens that follow these hidden states."""
        logits_BV = F.linear(self._norm(hidden_BM, self.weights.final_norm), self.weights.lm_head_VM).float()
        cap = self.spec.logit_softcap
        return logits_BV if cap is None else torch.tanh(logits_BV / cap) * cap

    def _frequencies(self, rope: RopeSpec) -> tuple[torch.Tensor, float]:
        inv_freq, factor = inverse_frequencies(rope)
        return inv_freq.to(self.device), factor

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """In the precision of the weight; the result has that of x."""
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.spec.norm_eps).to(x.dtype)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x_TM: torch.Tensor,
        rope: Rotation,
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
        out_THD = attend_spans(
            q_THD, kv_SGD, packed.spans, spec.attention_scale, spec.windows[index], spec.attention_softcap
        )
        out_TM = F.linear(out_THD.flatten(1), layer.output, layer.output_bias)
        return out_TM if layer.post_attention_norm is None else self._norm(out_TM, layer.post_attention_norm)

    def _mlp(self, layer: LayerWeights, x_TM: torch.Tensor) -> torch.Tensor:
        x_TM = self._norm(x_TM, layer.mlp_norm)
        out_TM = self._dense(layer, x_TM) if layer.router is None else self._mixture(layer, layer.router, x_TM)
        return out_TM if layer.post_mlp_norm is None else self._norm(out_TM, layer.post_mlp_norm)

    def _dense(self, layer: LayerWeights, x_TM: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x_TM, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return F.linear(self._activation(gate) * up, layer.down, layer.down_bias)

    def _mixture(self, layer: LayerWeights, router_EM: torch.Tensor, x_TM: torch.Tensor) -> torch.Tensor:
        mixture = self.spec.mixture
        assert mixture is not None
        routes = route(F.linear(x_TM, router_EM), mixture.num_active, mixture.is_normalised)
        return mix(x_TM, routes, layer.gate_up, layer.down, self._activation)
