"""Writes quantised checkpoints as the tools that publish them do, and says which weights are in them.

Packing is done one number at a time, in another way than it is undone, and each weight is computed from its numbers in
float64 by the definition of its layout.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.fakes import byte_tokenizer, random_checkpoint

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
GROUP = 32
Tensors = dict[str, torch.Tensor]
Packer = Callable[[np.ndarray, np.random.Generator], tuple[Tensors, np.ndarray]]
"""Makes the parts of a weight, by the ends of their names, and the weight that they stand for."""


def packed(numbers: Any, bits: int) -> torch.Tensor:
    """Pack unsigned numbers [rows, n] into int32 words, the first number in the lowest bits."""
    rows = []
    for row in np.asarray(numbers).astype(int).tolist():
        whole = sum(number << (bits * place) for place, number in enumerate(row))
        num_words = -(-len(row) * bits // 32)
        rows.append(np.frombuffer(whole.to_bytes(4 * num_words, "little"), "<i4"))
    return torch.from_numpy(np.stack(rows).copy())


def _grid(weight: np.ndarray, group_of_M: np.ndarray, top: int, is_symmetric: bool) -> tuple[Any, Any, Any]:
    """Return codes [N, M], float16 scales [N, G] and zeros [N, G] of groups of inputs."""
    groups = range(int(group_of_M.max()) + 1)
    low = np.stack([np.minimum(weight[:, group_of_M == g].min(1), 0) for g in groups], 1)
    high = np.stack([np.maximum(weight[:, group_of_M == g].max(1), 0) for g in groups], 1)
    if is_symmetric:
        high = np.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).astype(np.float16)
    zeros = np.full(scales.shape, (top + 1) // 2) if is_symmetric else np.rint(-low / scales).clip(0, top)
    codes = np.rint(weight / scales[:, group_of_M].astype(float) + zeros[:, group_of_M]).clip(0, top)
    return codes, scales, zeros


def _widened(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_of_M: np.ndarray) -> np.ndarray:
    return np.asarray((codes - zeros[:, group_of_M]) * scales.astype(float)[:, group_of_M])


def gptq(*, bits: int = 4, version: int = 1, has_order: bool = False, is_symmetric: bool = True) -> Packer:
    def pack(weight: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        group_of_M = np.arange(weight.shape[1]) // GROUP
        if has_order:
            rng.shuffle(group_of_M)
        codes, scales, zeros = _grid(weight, group_of_M, 2**bits - 1, is_symmetric)
        stored = packed(zeros.T, bits)
        if version == 1:
            stored = stored - sum(1 << place for place in range(0, 31, bits))
        parts = {
            ".qweight": packed(codes, bits).t(),
            ".qzeros": stored,
            ".scales": torch.from_numpy(scales.T.copy()),
            ".g_idx": torch.from_numpy(group_of_M.astype(np.int32)),
        }
        if not has_order:
            del parts[".g_idx"]
        return parts, _widened(codes, scales, zeros, group_of_M)

    return pack


def awq(weight: np.ndarray, _: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    group_of_M = np.arange(weight.shape[1]) // GROUP
    codes, scales, zeros = _grid(weight, group_of_M, 15, False)

    def in_order(numbers: np.ndarray) -> torch.Tensor:
        return packed(numbers.reshape(len(numbers), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(numbers), -1), 4)

    parts = {".qweight": in_order(codes.T), ".qzeros": in_order(zeros.T), ".scales": torch.from_numpy(scales.T.copy())}
    return parts, _widened(codes, scales, zeros, group_of_M)


def compressed_packed(*, bits: int = 4, is_symmetric: bool = True) -> Packer:
    def pack(weight: np.ndarray, _: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        group_of_M = np.arange(weight.shape[1]) // GROUP
        codes, scales, zeros = _grid(weight, group_of_M, 2**bits - 1, is_symmetric)
        parts = {
            ".weight_packed": packed(codes, bits),
            ".weight_scale": torch.from_numpy(scales),
            ".weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            parts[".weight_zero_point"] = packed(zeros.T, bits).t()
        return parts, _widened(codes, scales, zeros, group_of_M)

    return pack


def compressed_int8(weight: np.ndarray, _: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
    codes = np.rint(weight / scale)
    parts = {".weight": torch.from_numpy(codes.astype(np.int8)), ".weight_scale": torch.from_numpy(scale)}
    return {**parts, ".input_scale": torch.ones(1)}, codes * scale.astype(float)


def fp8(end: str, block: tuple[int, int]) -> Packer:
    """Float8 E4M3, one scale for each block."""

    def pack(weight: np.ndarray, _: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        height, width = (min(size, edge) for size, edge in zip(block, weight.shape, strict=True))
        num_rows, num_columns = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
        scale = np.zeros((num_rows, num_columns), np.float32)
        whole = np.zeros(weight.shape)
        for row in range(num_rows):
            for column in range(num_columns):
                part = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
                scale[row, column] = np.abs(weight[part]).max() / 448
                whole[part] = scale[row, column]
        numbers = torch.from_numpy(weight / whole).to(torch.float8_e4m3fn)
        parts = {".weight": numbers, end: torch.from_numpy(scale)}
        return parts, numbers.double().numpy() * whole

    return pack


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _fp4_codes(numbers: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(numbers[..., None] - FP4).argmin(-1))


def _pairs(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((codes[..., ::2] + 16 * codes[..., 1::2]).astype(np.uint8))


def nvfp4(names: tuple[str, str, str], *, is_divided: bool) -> Packer:
    """FP4 with a float8 scale for 16 inputs, which is divided or multiplied by an overall scale."""

    def pack(weight: np.ndarray, _: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        groups = weight.reshape(len(weight), -1, 16)
        overall = 448 * 6 / np.abs(weight).max() if is_divided else np.abs(weight).max() / (448 * 6)
        factor = overall if is_divided else 1 / overall
        scale = torch.from_numpy(np.abs(groups).max(-1) / 6 * factor).to(torch.float8_e4m3fn)
        overall = np.float32(overall)
        true = scale.double().numpy() / overall if is_divided else scale.double().numpy() * overall
        codes = _fp4_codes(groups / true[..., None])
        of_codes, of_scale, of_overall = names
        parts = {of_codes: _pairs(codes.reshape(weight.shape)), of_scale: scale, of_overall: torch.tensor([overall])}
        return parts, (FP4[codes] * true[..., None]).reshape(weight.shape)

    return pack


def bitsandbytes_4bit(table: np.ndarray, nested_table: np.ndarray) -> Packer:
    """Blocks of 64 inputs, whose scales are rounded to 8 bits in blocks of 256.

    Args:
        table: the 16 float32 numbers that codes stand for.
        nested_table: the 256 float32 numbers that codes of scales stand for.
    """

    def pack(weight: np.ndarray, _: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        blocks = weight.reshape(-1, 64)
        true = np.abs(blocks).max(1)
        offset = float(true.mean())
        padded = np.zeros(-(-len(true) // 256) * 256)
        padded[: len(true)] = true - offset
        nested = np.abs(padded.reshape(-1, 256)).max(1).astype(np.float32)
        nested_of = nested.repeat(256)[: len(true)].astype(float)
        scale_codes = np.abs((true - offset)[:, None] / nested_of[:, None] - nested_table).argmin(1)
        scale = nested_table.astype(float)[scale_codes] * nested_of + offset
        codes = np.abs((blocks / scale[:, None])[..., None] - table).argmin(-1).reshape(-1)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        parts = {
            ".weight": torch.from_numpy((16 * codes[::2] + codes[1::2]).astype(np.uint8))[:, None],
            ".weight.absmax": torch.from_numpy(scale_codes.astype(np.uint8)),
            ".weight.quant_map": torch.from_numpy(table.copy()),
            ".weight.nested_absmax": torch.from_numpy(nested),
            ".weight.nested_quant_map": torch.from_numpy(nested_table.copy()),
            ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }
        return parts, (table.astype(float)[codes].reshape(-1, 64) * scale[:, None]).reshape(weight.shape)

    return pack


def bitsandbytes_8bit(weight: np.ndarray, _: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    largest = np.abs(weight).max(1).astype(np.float32)
    codes = np.rint(weight / largest[:, None] * 127)
    parts = {".weight": torch.from_numpy(codes.astype(np.int8)), ".SCB": torch.from_numpy(largest)}
    parts[".weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return parts, codes * largest[:, None].astype(float) / 127


def mlx(bits: int) -> Packer:
    def pack(weight: np.ndarray, _: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        groups = weight.reshape(len(weight), -1, GROUP)
        low = groups.min(-1).astype(np.float32)
        scale = ((groups.max(-1) - low) / (2**bits - 1)).astype(np.float32)
        codes = np.rint((groups - low[..., None]) / scale[..., None]).clip(0, 2**bits - 1)
        parts = {
            ".weight": packed(codes.reshape(weight.shape), bits).view(torch.uint32),
            ".scales": torch.from_numpy(scale),
            ".biases": torch.from_numpy(low),
        }
        whole = codes * scale[..., None].astype(float) + low[..., None]
        return parts, whole.reshape(weight.shape)

    return pack


def mxfp4(weight_EMN: np.ndarray, _: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """gpt-oss: of each expert, blocks of 32 inputs; the model's own tensor is [experts, inputs, outputs]."""
    groups = np.swapaxes(weight_EMN, 1, 2).reshape(len(weight_EMN), weight_EMN.shape[2], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1) / 6)) + 1
    codes = _fp4_codes(groups / 2.0 ** exponents[..., None])
    parts = {"_blocks": _pairs(codes), "_scales": torch.from_numpy((exponents + 127).astype(np.uint8))}
    whole = (FP4[codes] * 2.0 ** exponents[..., None]).reshape(len(groups), groups.shape[1], -1)
    return parts, np.swapaxes(whole, 1, 2)


def quantised_checkpoint(
    folder: Path, kind: str, pack: Packer, config: dict[str, Any], *, ends: tuple[str, ...] = (), **settings: Any
) -> Any:
    """Write a random checkpoint whose projections are quantised, with a tokenizer.

    Args:
        config: added to config.json.
        ends: of the names of the quantised weights; empty: those of all projections of layers.

    Returns:
        transformers' model with the weights that the folder stands for, in float32.
    """
    from transformers import AutoModelForCausalLM

    random_checkpoint(folder, kind, **{**SIZES, **settings})
    weights, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    wide = dict(weights)
    for name in [one for one in weights if one.endswith(ends or ("_proj.weight",))]:
        stem = name.removesuffix(".weight")
        parts, exact = pack(weights.pop(name).double().numpy(), rng)
        weights |= {stem + end: part.contiguous() for end, part in parts.items()}
        wide[name] = torch.from_numpy(np.ascontiguousarray(exact)).float()
    save_file(wide, folder / "model.safetensors", {"format": "pt"})
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    oracle = copy.deepcopy(oracle)  # the file that it maps is written again
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return oracle
