"""Published layouts of quantised weights: which tensors of a checkpoint make up one weight, and how it is computed.

Weights are widened to float32, exactly as each layout defines its numbers. Activations are never rounded, also where a
checkpoint was made for that. To add a layout, add a function, its `Layout`, and a row to
tests/models/test_quantised.py.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from stillroom.models.packed_numbers import fp4_values, scaled, unpack

# N outputs, M inputs, G groups of inputs

Parts = Mapping[str, torch.Tensor]
"""Tensors of one weight by the end of their names."""
Settings = Mapping[str, Any]
"""`quantization_config` of config.json, with what it says about this weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layout of quantised weights."""

    name: str
    """For messages."""
    widen: Callable[[Parts, Settings], torch.Tensor]
    """Returns the weight in float32; raises ValueError, KeyError, IndexError or RuntimeError if the parts do not fit
    together."""
    parts: tuple[str, ...]
    """Ends of the names of the parts. A weight that is not quantised has only the tensor `target`."""
    codes: tuple[str, ...] = (".weight",)
    """The part that holds the codes; one of these."""
    target: str = ".weight"
    """End of the name of the weight."""
    unused: tuple[str, ...] = field(default=())
    """Ends of names that the weights do not depend on: scales of activations and of KV."""


_QWEIGHT = (".qweight",)
_OF_ACTIVATIONS = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".output_zero_point",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)


def _of_gptq(parts: Parts, settings: Settings) -> torch.Tensor:
    """Codes are packed along the inputs, zeros along the outputs. Version 1 stores each zero less one."""
    words, zeros, scales_GN = parts[".qweight"], parts[".qzeros"], parts[".scales"]
    bits = 32 * zeros.shape[1] // scales_GN.shape[1]
    if bits not in (2, 4, 8):
        raise ValueError(f"codes of {bits} bits are not read")
    if (settings.get("checkpoint_format") or settings.get("format") or "gptq") == "gptq":
        zeros = zeros + sum(1 << place for place in range(0, 31, bits))  # with carry, as it was subtracted
    codes_NM, zeros_NG = unpack(words.t(), bits), unpack(zeros, bits).t()[: scales_GN.shape[1]]
    group_of_M = parts.get(".g_idx")
    num_inputs, num_groups = codes_NM.shape[1], len(scales_GN)
    if group_of_M is None:
        group_of_M = torch.arange(num_inputs) // -(-num_inputs // num_groups)
    group_of_M = group_of_M.long()
    scales_NM, zeros_NM = scales_GN.t().float()[:, group_of_M], zeros_NG.float()[:, group_of_M]
    return (codes_NM.float() - zeros_NM) * scales_NM


def _of_awq(parts: Parts, _: Settings) -> torch.Tensor:
    """AutoAWQ's version "gemm": codes of four bits, packed along the outputs, even ones before odd ones."""

    def codes(words: torch.Tensor) -> torch.Tensor:
        eights = unpack(words, 4).reshape(len(words), -1, 8)
        return eights[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1).t()

    return scaled(codes(parts[".qweight"]), parts[".scales"].t(), codes(parts[".qzeros"]))


def _of_compressed_tensors(parts: Parts, settings: Settings) -> torch.Tensor:
    block = settings.get("block_structure")
    if ".weight_packed" not in parts:
        zero = parts.get(".weight_zero_point")
        return scaled(parts[".weight"], parts[".weight_scale"], zero, None if block is None else tuple(block))
    packed, scale = parts[".weight_packed"], parts[".weight_scale"]
    if packed.dtype == torch.uint8:  # fp4
        overall = parts.get(".weight_global_scale")
        return scaled(fp4_values(unpack(packed, 4)), scale if overall is None else scale.float() / overall)
    height, width = parts[".weight_shape"].tolist()
    bits = next((bits for bits in (2, 4, 8) if -(-width * bits // 32) == packed.shape[1]), 0)
    if not bits:
        raise ValueError(f"{packed.shape[1]} words for a row of {width} codes are not of 2, 4 or 8 bits each")
    codes_NM = unpack(packed, bits)[:, :width]
    zero = torch.full(scale.shape, 1 << (bits - 1))
    if ".weight_zero_point" in parts:
        zero = unpack(parts[".weight_zero_point"].t(), bits).t()[:height]
    order_M = parts.get(".weight_g_idx")
    if order_M is None or bool((order_M < 0).any()):
        return scaled(codes_NM, scale, zero)
    group_of_M = order_M.long()
    return (codes_NM.float() - zero.float()[:, group_of_M]) * scale.float()[:, group_of_M]


def _of_fp8(parts: Parts, settings: Settings) -> torch.Tensor:
    scale = parts[".weight_scale_inv"] if ".weight_scale_inv" in parts else parts[".weight_scale"]
    block = settings.get("weight_block_size")
    return scaled(parts[".weight"], scale, block=None if block is None else tuple(block))


def _of_modelopt(parts: Parts, _: Settings) -> torch.Tensor:
    if parts[".weight"].dtype == torch.uint8:  # fp4
        return scaled(
            fp4_values(unpack(parts[".weight"], 4)), parts[".weight_scale"].float() * parts[".weight_scale_2"]
        )
    return scaled(parts[".weight"], parts[".weight_scale"])


def _of_bitsandbytes(parts: Parts, _: Settings) -> torch.Tensor:
    if ".SCB" in parts:  # 8 bits
        return parts[".weight"].float() * (parts[".SCB"].float()[:, None] / 127)
    state_name = next(name for name in parts if ".quant_state." in name)
    state = json.loads(bytes(parts[state_name].tolist()))
    codes = unpack(parts[".weight"].flatten(), 4).reshape(-1, 2).flip(1).flatten()  # the first in the high bits
    scale = parts[".weight.absmax"]
    if ".weight.nested_absmax" in parts:
        values = parts[".weight.nested_quant_map"][scale.int()]
        groups = parts[".weight.nested_absmax"].repeat_interleave(int(state["nested_blocksize"]))
        scale = values * groups[: len(values)] + float(state["nested_offset"])
    numbers = parts[".weight.quant_map"][codes.int()]
    whole = numbers * scale.repeat_interleave(int(state["blocksize"]))[: len(numbers)]
    height, width = state["shape"]
    return whole[: height * width].view(height, width).float()


def _of_mlx(parts: Parts, settings: Settings) -> torch.Tensor:
    """Affine: code * scale + bias."""
    words, scales_NG, biases_NG = parts[".weight"], parts[".scales"], parts[".biases"]
    num_inputs = scales_NG.shape[1] * int(settings["group_size"])
    bits = 32 * words.shape[1] // num_inputs
    codes_NGI = unpack(words, bits).reshape(*scales_NG.shape, -1)
    return (codes_NGI.float() * scales_NG.float()[..., None] + biases_NG.float()[..., None]).flatten(1)


def _of_mxfp4(parts: Parts, _: Settings) -> torch.Tensor:
    """Experts of gpt-oss: blocks of 32 inputs, [experts, N, blocks, bytes]; the model holds them as [experts, M, N]."""
    blocks, scales = parts["_blocks"], parts["_scales"]
    numbers = fp4_values(unpack(blocks, 4)) * torch.exp2(scales.float() - 127)[..., None]
    return numbers.flatten(2).transpose(1, 2)


LAYOUTS: Mapping[str, Layout] = {
    "gptq": Layout(name="GPTQ", widen=_of_gptq, parts=(".qweight", ".qzeros", ".scales", ".g_idx"), codes=_QWEIGHT),
    "awq": Layout(name="AWQ", widen=_of_awq, parts=(".qweight", ".qzeros", ".scales"), codes=_QWEIGHT),
    "compressed-tensors": Layout(
        name="compressed-tensors",
        widen=_of_compressed_tensors,
        parts=(
            ".weight",
            ".weight_packed",
            ".weight_scale",
            ".weight_shape",
            ".weight_zero_point",
            ".weight_g_idx",
            ".weight_global_scale",
        ),
        codes=(".weight", ".weight_packed"),
        unused=_OF_ACTIVATIONS,
    ),
    "fp8": Layout(
        name="FP8", widen=_of_fp8, parts=(".weight", ".weight_scale_inv", ".weight_scale"), unused=_OF_ACTIVATIONS
    ),
    "modelopt": Layout(
        name="ModelOpt",
        widen=_of_modelopt,
        parts=(".weight", ".weight_scale", ".weight_scale_2"),
        unused=_OF_ACTIVATIONS,
    ),
    "bitsandbytes": Layout(
        name="bitsandbytes",
        widen=_of_bitsandbytes,
        parts=(
            ".weight",
            ".weight.absmax",
            ".weight.quant_map",
            ".weight.nested_absmax",
            ".weight.nested_quant_map",
            ".weight.quant_state.bitsandbytes__nf4",
            ".weight.quant_state.bitsandbytes__fp4",
            ".SCB",
        ),
        unused=(".weight_format",),
    ),
    "mlx": Layout(name="MLX", widen=_of_mlx, parts=(".weight", ".scales", ".biases")),
    "mxfp4": Layout(name="MXFP4", widen=_of_mxfp4, parts=("_blocks", "_scales"), codes=("_blocks",), target=""),
}
LAYOUTS = {**LAYOUTS, "fbgemm_fp8": LAYOUTS["fp8"]}
