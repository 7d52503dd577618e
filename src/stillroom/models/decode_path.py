"""Fast path for steps of few rows on a CPU: one compiled call per layer of a plain Llama.

In a step of a few rows (decoding, or a question behind kept KV) the calls between kernels cost as much as attention.
Other layers (query norms, mixtures, other activations) use the decoder's general path; both compute the same numbers
with the same kernels.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stillroom.models.packed import LayerKV, PackedInput
from stillroom.models.spec import ModelSpec
from stillroom.models.weights import LayerWeights
from stillroom.ops import block_attention, cpu_kernels
from stillroom.ops.attention import AttentionPlan
from stillroom.ops.device_attention import DevicePlan
from stillroom.ops.linear import Linear

_EMPTY = np.zeros(0, np.int64)
_NO_SPLITS = (np.zeros((0, 2), np.int64), _EMPTY)
_NO_BLOCKS = ((_EMPTY, _EMPTY), np.zeros((0, 3), np.int64))


class DecodePath:
    """The fast path of one decoder; `of` makes it where it applies."""

    def __init__(self, spec: ModelSpec, layers: list[tuple[Any, Any, Any]], linear: Linear) -> None:
        """
        Args:
            linear: one of the products, which tells from how many rows on others are faster.
        """
        self._epsilon = spec.norm_eps
        self._layers = layers
        self._num_heads = spec.num_heads
        self._linear = linear
        self._limits = [
            np.array([spec.attention_scale, spec.attention_softcap or 0.0, window or 0], dtype=np.float32)
            for window in spec.windows
        ]

    @classmethod
    def of(cls, spec: ModelSpec, layers: tuple[LayerWeights, ...]) -> "DecodePath | None":
        """Return the path; None if the layers are not plain or the kernels cannot read their weights."""
        is_plain = spec.activation == "silu" and spec.mixture is None and spec.local_rope is None
        if not is_plain or spec.has_qk_norm or spec.has_sandwich_norms:
            return None
        found = []
        for layer in layers:
            mlp = layer.experts[0]
            arrays = [linear.kernel_arrays for linear in (layer.qkv, layer.output, mlp.gate_up, mlp.down)]
            if any(pair is None for pair in arrays):
                return None
            matrices, biases = zip(*(pair for pair in arrays if pair is not None), strict=True)
            found.append(((layer.attention_norm.numpy(), layer.mlp_norm.numpy()), matrices, biases))
        return cls(spec, found, layers[0].qkv)

    def supports(self, plan: AttentionPlan | DevicePlan, cache: torch.Tensor) -> bool:
        """Whether a step has few rows, and the kernels can attend from them.

        Args:
            cache: keys of a layer, [S, G, D].
        """
        if not isinstance(plan, AttentionPlan) or not plan.spans:
            return False
        num_rows = plan.spans[-1].query_end
        is_bfloat16 = self._linear.weight.dtype == torch.bfloat16
        if not plan.is_decode_only and not (is_bfloat16 and block_attention.is_supported(cache)):
            return False
        return num_rows == 1 or num_rows <= self._linear.most_rows

    def run(
        self,
        x_TM: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        packed: PackedInput,
        layer_kv: LayerKV,
    ) -> torch.Tensor:
        """Return hidden states [T, M] after all layers; `x_TM` is overwritten."""
        x: NDArray[np.float32] = x_TM.numpy()
        rotation = (rope[0].squeeze(1).numpy(), rope[1].squeeze(1).numpy())
        slots, plan, num_threads = packed.slots_T.numpy(), packed.plan, cpu_kernels.use_threads()
        assert isinstance(plan, AttentionPlan)
        contexts, splits = (plan.contexts, plan.splits) if plan.is_decode_only else (plan.blocks.contexts, _NO_SPLITS)
        for index, (weights, limits) in enumerate(zip(self._layers, self._limits, strict=True)):
            k_SGD, v_SGD = layer_kv(index)
            cache, blocks = (cpu_kernels.array(k_SGD), cpu_kernels.array(v_SGD)), _NO_BLOCKS
            if not plan.is_decode_only:
                blocks = (plan.blocks.seen(int(limits[2])), plan.blocks.tasks(self._num_heads, k_SGD.shape[1]))
            rows = (contexts, splits, blocks)
            cpu_kernels.decode_layer(x, *weights, rotation, slots, cache, *rows, limits, self._epsilon, num_threads)
        return x_TM
