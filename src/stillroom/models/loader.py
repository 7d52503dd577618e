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
from stillroom.ops.linear import Linear

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

    def norm(self, name: str, width: int) -> torch.Tensor:
        """The weight of a norm, in the dtype of activations."""
        weight = self(name, width)
        return weight.float() if self.device.type == "cpu" else weight

    def linear(self, name: str, height: int, width: int, *, has_bias: bool) -> Linear:
        """`name` ends with a dot."""
        return self.fused([name], [height], width, has_bias=has_bias)

    def fused(self, names: list[str], heights: list[int], width: int, *, has_bias: bool) -> Linear:
        """Several projections of one input as one matrix."""
        sizes = list(zip(names, heights, strict=True))
        weights = [self(f"{name}weight", height, width) for name, height in sizes]
        biases = [self(f"{name}bias", height) for name, height in sizes] if has_bias else []
        return Linear(_stacked(weights), _stacked(biases) if biases else None)


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _load_weights(spec: ModelSpec, files: WeightFiles, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    read = _Reader(files, device, dtype)
    embedding = read("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    return DecoderWeights(
        embedding_VM=embedding,
        layers=tuple(_load_layer(spec, read, f"model.layers.{i}.") for i in range(spec.num_layers)),
        final_norm=read.norm("model.norm.weight", spec.hidden_size),
        lm_head=Linear(embedding if spec.is_tied else read("lm_head.weight", spec.vocab_size, spec.hidden_size)),
    )


def _load_layer(spec: ModelSpec, read: _Reader, prefix: str) -> LayerWeights:
    model, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv_heights, qkv = [q_size, kv_size, kv_size], [f"{attention}{p}_proj." for p in "qkv"]
    gate_up = [f"{mlp}{p}_proj." for p in ("gate", "up")]
    return LayerWeights(
        attention_norm=read.norm(prefix + "input_layernorm.weight", model),
        qkv=read.fused(qkv, qkv_heights, model, has_bias=spec.has_qkv_bias),
        q_norm=read.norm(attention + "q_norm.weight", spec.head_dim) if spec.has_qk_norm else None,
        k_norm=read.norm(attention + "k_norm.weight", spec.head_dim) if spec.has_qk_norm else None,
        output=read.linear(attention + "o_proj.", model, q_size, has_bias=spec.has_output_bias),
        mlp_norm=read.norm(prefix + "post_attention_layernorm.weight", model),
        gate_up=read.fused(gate_up, [inner, inner], model, has_bias=spec.has_mlp_bias),
        down=read.linear(mlp + "down_proj.", model, inner, has_bias=spec.has_mlp_bias),
    )
