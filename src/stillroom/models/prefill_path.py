"""Fast path for prefill on a CPU with bfloat16 or int8 weights: bfloat16 between two matrix products.

The decoder's general path widens each product's result to float32 and rounds the next product's input to bfloat16.
Here the kernels between products read and write bfloat16, with the same roundings in the same places, and the kernels
of products (`ops/cpu_panels.py`) compute what follows them. Layers that are not plain use the general path.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from stillroom.models.packed import LayerKV, PackedInput
from stillroom.models.spec import ModelSpec
from stillroom.models.weights import LayerWeights
from stillroom.ops import cpu_kernels
from stillroom.ops.attention_observers import AttentionObserver
from stillroom.ops.cpu_compiler import Floats
from stillroom.ops.linear import are_panels_fastest, is_float32_faster
from stillroom.ops.row_kernels import rms_norm

# T packed tokens, B rows whose hidden states are wanted, M model dimension, S slots, H query heads, G key/value heads,
# D head dimension


class PrefillPath:
    """The fast path of one decoder; `of` makes it where it applies."""

    def __init__(self, spec: ModelSpec, layers: tuple[LayerWeights, ...]) -> None:
        self._spec = spec
        self._layers = layers

    @classmethod
    def of(cls, spec: ModelSpec, layers: tuple[LayerWeights, ...]) -> "PrefillPath | None":
        """Return the path; None unless layers are plain, of a bfloat16 model on a CPU that multiplies it fast."""
        is_plain = spec.activation == "silu" and spec.mixture is None and spec.local_rope is None
        if not is_plain or spec.has_qk_norm or spec.has_sandwich_norms:
            return None
        for layer in layers:
            mlp = layer.experts[0]
            for linear in (layer.qkv, layer.output, mlp.gate_up, mlp.down):
                is_bfloat16 = linear.weight.device.type == "cpu" and linear.dtype == torch.bfloat16
                if not is_bfloat16 or linear.bias is not None:
                    return None
        return None if is_float32_faster() and not are_panels_fastest() else cls(spec, layers)

    def supports(self, num_tokens: int) -> bool:
        """Whether there are enough rows for torch's products."""
        return num_tokens > self._layers[0].qkv.most_rows

    def run(
        self,
        x_TM: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        packed: PackedInput,
        layer_kv: LayerKV,
        observer: AttentionObserver | None,
    ) -> torch.Tensor:
        """Return hidden states [B, M] of the wanted rows after all layers; `x_TM` is overwritten."""
        spec, last = self._spec, len(self._layers) - 1
        rotation = (rope[0].squeeze(1).numpy(), rope[1].squeeze(1).numpy())
        slots, plan = packed.slots_T.numpy(), packed.plan
        for index, layer in enumerate(self._layers):
            kv_SGD = layer_kv(index)
            q_THD = self._queries(layer, x_TM, rotation, slots, kv_SGD)
            window = spec.windows[index]
            if observer is not None:
                observer.observe(q_THD, kv_SGD[0], spec.attention_scale, window, spec.attention_softcap)
            if index < last:
                out_THD = plan.attend(q_THD, kv_SGD, spec.attention_scale, window, spec.attention_softcap)
                layer.output.add_to(x_TM, out_THD.flatten(1).to(torch.bfloat16))
                mlp = layer.experts[0]
                mlp.down.add_to(x_TM, mlp.gate_up.gated_in_bfloat16(self._normed(x_TM, layer.mlp_norm)))
        wanted_B = packed.wanted_B
        if not len(wanted_B):
            return x_TM[:0]
        # the last layer may have few rows, for which `Linear` has other kernels
        out_BHD = packed.last_plan.attend(q_THD[wanted_B], kv_SGD, spec.attention_scale, window, spec.attention_softcap)
        x_BM = x_TM[wanted_B] + layer.output(out_BHD.flatten(1))
        return x_BM + layer.experts[0](rms_norm(x_BM, layer.mlp_norm, spec.norm_eps))

    def _queries(
        self,
        layer: LayerWeights,
        x_TM: torch.Tensor,
        rotation: tuple[Floats, Floats],
        slots: NDArray[np.int64],
        kv_SGD: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return rotated queries, float32 [T, H, D]; writes keys and values to their slots."""
        spec, num_tokens = self._spec, x_TM.shape[0]
        qkv = layer.qkv.in_bfloat16(self._normed(x_TM, layer.attention_norm))
        qkv = qkv.view(num_tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        q_THD = torch.empty((num_tokens, spec.num_heads, spec.head_dim))
        cache = (cpu_kernels.array(kv_SGD[0]), cpu_kernels.array(kv_SGD[1]))
        cpu_kernels.rotate_and_store(cpu_kernels.array(qkv), rotation, slots, cache, q_THD.numpy())
        return q_THD

    def _normed(self, x_TM: torch.Tensor, weight_M: torch.Tensor) -> torch.Tensor:
        out_TM = torch.empty(x_TM.shape, dtype=torch.bfloat16)
        cpu_kernels.rms_norm(x_TM.numpy(), weight_M.numpy(), self._spec.norm_eps, cpu_kernels.array(out_TM))
        return out_TM
