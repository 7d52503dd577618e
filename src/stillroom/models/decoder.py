"""The decoder: packed tokens in, hidden states and logits out; keys and values are written to their slots.

One class computes every architecture that `ModelSpec` describes. Sequences of a batch are packed back to back without
padding; only attention knows where a sequence ends. Tested against transformers' models (tests/models/test_oracle.py).
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from stillroom.models.decode_path import DecodePath
from stillroom.models.mixture_of_experts import mix, on_device, route
from stillroom.models.packed import LayerKV, PackedInput
from stillroom.models.prefill_path import PrefillPath
from stillroom.models.spec import ModelSpec, without_lengths
from stillroom.models.weights import DecoderWeights, LayerWeights
from stillroom.ops import cpu_kernels
from stillroom.ops.attention_observers import AttentionObserver
from stillroom.ops.cpu_compiler import serialised
from stillroom.ops.rope import RopeSpec, cos_sin, inverse_frequencies, rotate_and_store
from stillroom.ops.row_kernels import rms_norm

# T packed tokens, B rows whose logits are wanted, M model dimension, V vocabulary, S slots,
# H query heads, G key/value heads, D head dimension, E experts

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of this step's positions."""


class Decoder:
    """Weights and their arithmetic; see `CausalModel`."""

    has_fixed_launches = True

    def __init__(self, spec: ModelSpec, weights: DecoderWeights) -> None:
        self.spec = spec
        self.weights = weights
        self.device = weights.embedding_VM.device
        self.dtype = weights.embedding_VM.dtype
        # on a CPU half precision is for storing weights and KV only; arithmetic in it would round without being faster
        self.activation_dtype = torch.float32 if self.device.type == "cpu" else self.dtype
        self._rope = self._frequencies(spec.rope)
        self._local_rope = self._frequencies(spec.local_rope or spec.rope)
        self._decode_path = DecodePath.of(spec, weights.layers)
        self._prefill_path = PrefillPath.of(spec, weights.layers)
        self._device_experts = [on_device(layer.experts) for layer in weights.layers]
        # rounded as a tensor of the model's dtype
        self._embedding_scale = float(torch.tensor(spec.embedding_scale or 1.0, dtype=self.dtype))

    @serialised
    @torch.inference_mode()
    def hidden_states(
        self, packed: PackedInput, layer_kv: LayerKV, observer: AttentionObserver | None = None
    ) -> torch.Tensor:
        """Return the final hidden states [B, M] of the wanted rows, before the last norm.

        Writes this step's K (rotated) and V to their slots.

        Args:
            observer: receives the queries and keys of every layer.
        """
        spec = self.spec
        if self.device.type == "cpu":
            cpu_kernels.use_threads()
        x_TM = F.embedding(packed.token_ids_T, self.weights.embedding_VM).to(self.activation_dtype)
        if spec.embedding_scale is not None:
            x_TM = x_TM * self._embedding_scale
        rope = local_rope = cos_sin(*self._rope, packed.positions_T)
        if spec.local_rope is not None:
            local_rope = cos_sin(*self._local_rope, packed.positions_T)
        path = self._decode_path if observer is None else None
        if path is not None and path.supports(packed.plan, layer_kv(0)[0]):
            return path.run(x_TM, rope, packed, layer_kv)[packed.wanted_B]
        if self._prefill_path is not None and self._prefill_path.supports(len(x_TM)):
            return self._prefill_path.run(x_TM, rope, packed, layer_kv, observer)
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            kv_SGD, window = layer_kv(index), spec.windows[index]
            q_THD = self._queries(layer, x_TM, rope if window is None else local_rope, packed.slots_T, kv_SGD)
            if observer is not None:
                observer.observe(q_THD, kv_SGD[0], spec.attention_scale, window, spec.attention_softcap)
            plan = packed.plan
            if index == last:
                if not len(packed.wanted_B):
                    return x_TM[:0]
                x_TM, q_THD, plan = x_TM[packed.wanted_B], q_THD[packed.wanted_B], packed.last_plan
            out_THD = plan.attend(q_THD, kv_SGD, spec.attention_scale, window, spec.attention_softcap)
            x_TM = x_TM + self._normed(layer.output(out_THD.flatten(1)), layer.post_attention_norm)
            x_TM = x_TM + self._normed(self._mlp(index, x_TM), layer.post_mlp_norm)
        return x_TM

    @property
    def identity(self) -> str:
        """See `CausalModel`."""
        return repr(without_lengths(self.spec))

    @serialised
    @torch.inference_mode()
    def logits(self, hidden_BM: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [B, V] of the tokens that follow these hidden states."""
        logits_BV = self.weights.lm_head(self._normed(hidden_BM, self.weights.final_norm)).float()
        cap = self.spec.logit_softcap
        return logits_BV if cap is None else torch.tanh(logits_BV / cap) * cap

    def first_layers(self, count: int) -> "Decoder":
        """Return a decoder of the first `count` layers, or of all; it shares the weights."""
        spec = replace(self.spec, num_layers=min(count, self.spec.num_layers), windows=self.spec.windows[:count])
        return Decoder(spec, replace(self.weights, layers=self.weights.layers[:count]))

    @property
    def inv_freq_LP(self) -> torch.Tensor:
        """Angle per position for each layer and pair of dimensions: what `ops.rope.rerotate_keys` needs."""
        frequencies = [self._rope if window is None else self._local_rope for window in self.spec.windows]
        return torch.stack([inv_freq for inv_freq, _ in frequencies])

    def _frequencies(self, rope: RopeSpec) -> tuple[torch.Tensor, float]:
        inv_freq, factor = inverse_frequencies(rope)
        return inv_freq.to(self.device), factor

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Normalise in the weight's dtype and return x's dtype; x itself without a weight."""
        return x if weight is None else rms_norm(x.to(weight.dtype), weight, self.spec.norm_eps).to(x.dtype)

    def _queries(
        self,
        layer: LayerWeights,
        x_TM: torch.Tensor,
        rope: Rotation,
        slots_T: torch.Tensor,
        kv_SGD: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return rotated queries [T, H, D]; writes keys and values to their slots."""
        spec = self.spec
        qkv = layer.qkv(self._normed(x_TM, layer.attention_norm))
        qkv = qkv.view(x_TM.shape[0], spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        if layer.q_norm is not None:
            q_THD, k_TGD, v_TGD = torch.split(qkv, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
            qkv = torch.cat((self._normed(q_THD, layer.q_norm), self._normed(k_TGD, layer.k_norm), v_TGD), dim=1)
        return rotate_and_store(qkv, rope, slots_T, kv_SGD)

    def _mlp(self, index: int, x_TM: torch.Tensor) -> torch.Tensor:
        layer, experts = self.weights.layers[index], self._device_experts[index]
        x_TM = self._normed(x_TM, layer.mlp_norm)
        if layer.router is None:
            return layer.experts[0](x_TM)
        mixture = self.spec.mixture
        assert mixture is not None
        routes = route(layer.router(x_TM), mixture.num_active, mixture.is_normalised)
        return mix(x_TM, routes, layer.experts) if experts is None else experts.mix(x_TM, routes)
