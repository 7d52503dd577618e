"""From a checkpoint's folder to a `LoadedModel`: the decoder with its weights, the tokenizer and the end tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stillroom.config.settings import Dtype
from stillroom.errors import ConfigError, ModelError, UnsupportedModelError
from stillroom.models.checkpoint import WeightFiles, read_json, resolve
from stillroom.models.decoder import Decoder, DecoderWeights, LayerWeights
from stillroom.models.spec import ModelSpec, spec_from_config
from stillroom.models.tokenizer import Tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that generation needs from a checkpoint."""

    name: str
    decoder: Decoder
    tokenizer: Tokenizer
    stop_token_ids: frozenset[int]


def load_model(model: str, *, device: str = "auto", dtype: Dtype = "auto") -> LoadedModel:
    """Load a checkpoint: `bundled`, a folder, or a hub name.

    Raises:
        ModelNotFoundError: the checkpoint or one of its files is missing.
        UnsupportedModelError: it needs an architecture or a feature that is not implemented.
        ModelError: its files are damaged or disagree with each other.
        ConfigError: there is no such device.
    """
    folder = resolve(model)
    tokenizer = Tokenizer.load(folder)
    decoder = load_decoder(folder, device=device, dtype=dtype)
    name = model if not Path(model).is_dir() else Path(model).resolve().name
    return LoadedModel(name, decoder, tokenizer, _stop_token_ids(folder, tokenizer))


def load_decoder(folder: Path, *, device: str = "auto", dtype: Dtype = "auto") -> Decoder:
    """Only the decoder, from a local folder; raises as `load_model`."""
    config = read_json(folder, "config.json")
    spec = spec_from_config(config)
    target = torch_device(device)
    torch_dtype = _torch_dtype(config, dtype)
    return Decoder(spec, _load_weights(spec, WeightFiles(folder), target, torch_dtype))


def torch_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a GPU, else the CPU.

    Raises:
        ConfigError: no such device on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None


def _torch_dtype(config: dict[str, Any], dtype: Dtype) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32") if dtype == "auto" else dtype
    if name not in _DTYPES:
        raise UnsupportedModelError(f"weights of dtype {name!r} are not supported; use {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _stop_token_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """End tokens from generation_config.json, config.json and the tokenizer, as far as each names any."""
    ids: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder, name).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


class _Reader:
    """Tensors by name with their expected shape, moved to where they will be used."""

    def __init__(self, files: WeightFiles, device: torch.device, dtype: torch.dtype) -> None:
        self.files, self.device, self.dtype = files, device, dtype

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self.files.get(name)
        if tensor.shape != shape:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}, config.json implies {shape}")
        return tensor.to(device=self.device, dtype=self.dtype)

    def fused(self, names: list[str], heights: list[int], width: int) -> torch.Tensor:
        """Several matrices of one width, stacked."""
        return torch.cat([self(n, h, width) for n, h in zip(names, heights, strict=True)])

    def fused_bias(self, names: list[str], heights: list[int]) -> torch.Tensor:
        return torch.cat([self(n, h) for n, h in zip(names, heights, strict=True)])


def _load_weights(spec: ModelSpec, files: WeightFiles, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    read = _Reader(files, device, dtype)
    embedding = read("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    return DecoderWeights(
        embedding_VM=embedding,
        layers=tuple(_load_layer(spec, read, f"model.layers.{i}.") for i in range(spec.num_layers)),
        final_norm=read("model.norm.weight", spec.hidden_size),
        lm_head_VM=embedding if spec.is_tied else read("lm_head.weight", spec.vocab_size, spec.hidden_size),
    )


def _load_layer(spec: ModelSpec, read: _Reader, prefix: str) -> LayerWeights:
    model, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv_heights, qkv = [q_size, kv_size, kv_size], [f"{attention}{p}_proj." for p in "qkv"]
    gate_up = [f"{mlp}{p}_proj." for p in ("gate", "up")]
    return LayerWeights(
        attention_norm=read(prefix + "input_layernorm.weight", model),
        qkv=read.fused([n + "weight" for n in qkv], qkv_heights, model),
        qkv_bias=read.fused_bias([n + "bias" for n in qkv], qkv_heights) if spec.has_qkv_bias else None,
        q_norm=read(attention + "q_norm.weight", spec.head_dim) if spec.has_qk_norm else None,
        k_norm=read(attention + "k_norm.weight", spec.head_dim) if spec.has_qk_norm else None,
        output=read(attention + "o_proj.weight", model, q_size),
        output_bias=read(attention + "o_proj.bias", model) if spec.has_output_bias else None,
        mlp_norm=read(prefix + "post_attention_layernorm.weight", model),
        gate_up=read.fused([n + "weight" for n in gate_up], [inner, inner], model),
        gate_up_bias=read.fused_bias([n + "bias" for n in gate_up], [inner, inner]) if spec.has_mlp_bias else None,
        down=read(mlp + "down_proj.weight", model, inner),
        down_bias=read(mlp + "down_proj.bias", model) if spec.has_mlp_bias else None,
    )
