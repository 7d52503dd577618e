"""Loads a checkpoint: the decoder with its weights, the tokenizer, the stop tokens and the fingerprint."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stillroom.config.settings import Dtype, Weights
from stillroom.errors import ConfigError, ModelError, UnsupportedModelError
from stillroom.models import transformers_decoder
from stillroom.models.bundled_models import short_name
from stillroom.models.causal_model import CausalModel
from stillroom.models.checkpoint import WeightFiles, read_json, resolve
from stillroom.models.decoder import Decoder
from stillroom.models.device import torch_device
from stillroom.models.generating import check_generates
from stillroom.models.mixture_of_experts import GatedMlp
from stillroom.models.quantised_files import WidenedFiles, open_weights, quantisation_of
from stillroom.models.spec import AGAIN, ModelSpec, spec_from_config
from stillroom.models.tokenizer import Tokenizer
from stillroom.models.vocabulary import stop_token_ids
from stillroom.models.weights import DecoderWeights, LayerWeights
from stillroom.ops.cpu_codes import BLOCK
from stillroom.ops.linear import Linear

_HEADS = ("lm_head.", "embed_tokens.")
"""The last matrix of a model; rounded to 8 bits at least, because errors of its logits reach the answer directly."""
_BASES = ("model.", "language_model.model.", "model.language_model.")
"""Prefixes of the decoder's tensors; the later ones are those of checkpoints with a vision tower."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The parts of a checkpoint that generation needs."""

    name: str
    decoder: CausalModel
    tokenizer: Tokenizer
    stop_token_ids: frozenset[int]
    fingerprint: bytes
    """Equal for two models exactly if their KV is equal: a hash of the weights, their dtypes, and `ModelSpec` without
    the length of a sequence. This and `NUMERICS_VERSION` identify kept KV; this alone identifies a calibration profile,
    which only measures time."""


def load_model(
    model: str, *, device: str = "auto", dtype: Dtype = "auto", weights: Weights = "checkpoint", max_model_len: int = 0
) -> LoadedModel:
    """Load a checkpoint.

    Args:
        model: a bundled decoder, a folder, a GGUF file, or a hub name.
        max_model_len: see `spec_from_config`.

    Raises:
        ModelNotFoundError: the checkpoint or one of its files is missing.
        UnsupportedModelError: it is a reader, it does not generate text, or its architecture or one of its features is
            not implemented.
        ModelError: its files are damaged or disagree with each other.
        ConfigError: there is no such device.
    """
    folder = resolve(model, _check_config)
    _check_config(folder)
    _own_spec(read_json(folder, "config.json"), max_model_len)  # checked before the tokenizer's library reads it
    tokenizer = Tokenizer.load(folder)
    decoder = load_decoder(folder, device=device, dtype=dtype, weights=weights, max_model_len=max_model_len)
    fingerprint = fingerprint_of(folder, decoder, weights)
    return LoadedModel(short_name(model), decoder, tokenizer, stop_token_ids(folder, tokenizer), fingerprint)


def _check_config(folder: Path) -> None:
    """Raise an error for what config.json alone shows: no weights are needed."""
    check_generates(read_json(folder, "config.json"))
    quantisation_of(folder)


def fingerprint_of(folder: Path, decoder: CausalModel, weights: Weights = "checkpoint") -> bytes:
    dtypes = str(decoder.dtype), str(decoder.activation_dtype)
    parts, quantisation = [*WeightFiles(folder).digests(), decoder.identity, *dtypes, weights], quantisation_of(folder)
    if quantisation is not None:
        parts.append(quantisation.identity)
    return hashlib.sha256("\0".join(parts).encode()).digest()


def load_decoder(
    folder: Path,
    *,
    device: str = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "checkpoint",
    max_model_len: int = 0,
) -> CausalModel:
    """Load only the decoder from a local folder; raises as `load_model`.

    `Decoder` computes the architectures that `ModelSpec` describes, transformers' own model all others.
    """
    config = read_json(folder, "config.json")
    if _own_spec(config, max_model_len) is not None:
        return load_own_decoder(folder, device=device, dtype=dtype, weights=weights, max_model_len=max_model_len)
    if weights != "checkpoint":
        raise ConfigError(f"runtime.weights = {weights!r} is not possible for this architecture; leave it out")
    return transformers_decoder.load(folder, torch_device(device), _torch_dtype(config, dtype), max_model_len)


def load_own_decoder(
    folder: Path,
    *,
    device: str = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "checkpoint",
    max_model_len: int = 0,
) -> Decoder:
    """Load a decoder whose architecture `ModelSpec` describes; raises as `load_model`."""
    config = read_json(folder, "config.json")
    spec = spec_from_config(config, max_model_len)
    target, torch_dtype = torch_device(device), _torch_dtype(config, dtype)
    if weights != "checkpoint" and target.type != "cpu":
        raise ConfigError(f"runtime.weights = {weights!r} runs on a CPU only, not on {target}; leave it out")
    read = _Reader(open_weights(folder), target, torch_dtype, spec.has_offset_norms, weights)
    return Decoder(spec, _load_weights(spec, read))


def _own_spec(config: dict[str, Any], max_model_len: int) -> ModelSpec | None:
    """Return what `Decoder` computes; None: it does not know the architecture or one of its features."""
    try:
        return spec_from_config(config, max_model_len)
    except UnsupportedModelError:
        return None


def _torch_dtype(config: dict[str, Any], dtype: Dtype) -> torch.dtype:
    text = config.get("text_config") or {}
    is_quantised = any(config.get(name) for name in ("quantization_config", "quantization"))
    usual = "bfloat16" if is_quantised else "float32"
    found = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or usual
    name = str(found) if dtype == "auto" else dtype
    if name not in _DTYPES:
        raise UnsupportedModelError(f"weights of dtype {name!r} are not supported; use {', '.join(_DTYPES)}")
    return _DTYPES[name]


class _Reader:
    """Reads tensors of expected shapes and moves them to the device.

    On a CPU, tensors that need no conversion stay memory-mapped. Of all others only the copy is kept, and at most one
    layer's originals are in memory at a time.
    """

    def __init__(
        self,
        files: WeightFiles | WidenedFiles,
        device: torch.device,
        dtype: torch.dtype,
        has_offset_norms: bool,
        weights: Weights,
    ) -> None:
        self.files, self.device, self.dtype = files, device, dtype
        self.has_offset_norms, self.weights = has_offset_norms, weights

    @property
    def is_rounded(self) -> bool:
        return self.weights != "checkpoint"

    def __call__(self, name: str, *shape: int, is_copied: bool = False) -> torch.Tensor:
        """
        Args:
            is_copied: the caller keeps only a copy of the result.
        """
        tensor = self._read(name, shape)
        if not self.files.is_mapped(name):
            return tensor.to(device=self.device, dtype=self.dtype)
        if is_copied or self.device.type != "cpu" or tensor.dtype != self.dtype:
            tensor = self.files.get(name, is_passing=True)
        return tensor.to(device=self.device, dtype=self.dtype)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.files.get(name)
        if tensor.shape != shape:
            raise ModelError(
                f"{self.files.folder}: {name} has shape {tuple(tensor.shape)}, but config.json implies {shape}; {AGAIN}"
            )
        return tensor

    def norm(self, name: str, size: int) -> torch.Tensor:
        """Return the factor of a norm, its offset added.

        Float32 on a CPU, as activations are, and with an offset of 1, beside which half precision would lose small
        weights.
        """
        weight = self._read(name, (size,)).to(self.device)
        if self.has_offset_norms:
            return 1.0 + weight.float()
        return weight.float() if self.device.type == "cpu" else weight.to(self.dtype)

    def linear(self, name: str, height: int, width: int, *, has_bias: bool = False) -> Linear:
        """`name` ends with a dot."""
        return self._stacked([name], [height], width, has_bias)

    def fused(self, whole: str, names: list[str], heights: list[int], width: int, *, has_bias: bool = False) -> Linear:
        """Stack several projections of one input; some checkpoints (Phi-3) have them stacked, as `whole`.

        Names end with a dot.
        """
        if f"{whole}weight" in self.files:
            return self.linear(whole, sum(heights), width, has_bias=has_bias)
        return self._stacked(names, heights, width, has_bias)

    def _stacked(self, names: list[str], heights: list[int], width: int, has_bias: bool) -> Linear:
        sizes, is_copied = list(zip(names, heights, strict=True)), self.is_rounded or len(names) > 1
        parts = [self(f"{name}weight", height, width, is_copied=is_copied) for name, height in sizes]
        bias = torch.cat([self(f"{name}bias", height) for name, height in sizes]) if has_bias else None
        if self.weights == "int4" and width % BLOCK == 0 and not names[0].endswith(_HEADS):
            return Linear.int4(parts, bias)
        if self.is_rounded:
            return Linear.int8(parts, bias, rounds_inputs=self.weights == "w8a8")
        return Linear(parts[0] if len(parts) == 1 else torch.cat(parts), bias)


def _load_weights(spec: ModelSpec, read: _Reader) -> DecoderWeights:
    base = next((b for b in _BASES if b + "embed_tokens.weight" in read.files), _BASES[0])
    if any(name.startswith(f"{base}layers.{spec.num_layers}.") for name in read.files):
        raise ModelError(f"the weights have more layers than config.json says ({spec.num_layers}); {AGAIN}")
    embedding = read(base + "embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    head = base + "embed_tokens." if spec.is_tied else "lm_head."
    is_shared = spec.is_tied and not read.is_rounded
    weights = DecoderWeights(
        embedding_VM=embedding,
        layers=tuple(_load_layer(spec, read, f"{base}layers.{i}.", i) for i in range(spec.num_layers)),
        final_norm=read.norm(base + "norm.weight", spec.hidden_size),
        lm_head=Linear(embedding) if is_shared else read.linear(head, spec.vocab_size, spec.hidden_size),
    )
    read.files.unmap()
    return weights


def _load_layer(spec: ModelSpec, read: _Reader, prefix: str, index: int) -> LayerWeights:
    model = spec.hidden_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = prefix + "self_attn."
    qkv_heights, qkv = [q_size, kv_size, kv_size], [f"{attention}{p}_proj." for p in "qkv"]
    is_sandwich = spec.has_sandwich_norms
    # `post_attention_layernorm` is the norm before the MLP in Llama, and the norm of attention's output in Gemma
    mlp_norm = "pre_feedforward_layernorm" if is_sandwich else "post_attention_layernorm"
    read.files.unmap()  # originals of the layer before
    router, experts = _load_mlp(spec, read, prefix, index)
    return LayerWeights(
        attention_norm=read.norm(prefix + "input_layernorm.weight", model),
        qkv=read.fused(attention + "qkv_proj.", qkv, qkv_heights, model, has_bias=spec.has_qkv_bias),
        q_norm=read.norm(attention + "q_norm.weight", spec.head_dim) if spec.has_qk_norm else None,
        k_norm=read.norm(attention + "k_norm.weight", spec.head_dim) if spec.has_qk_norm else None,
        output=read.linear(attention + "o_proj.", model, q_size, has_bias=spec.has_output_bias),
        post_attention_norm=read.norm(prefix + "post_attention_layernorm.weight", model) if is_sandwich else None,
        mlp_norm=read.norm(f"{prefix}{mlp_norm}.weight", model),
        router=router,
        experts=experts,
        post_mlp_norm=read.norm(prefix + "post_feedforward_layernorm.weight", model) if is_sandwich else None,
    )


def _load_mlp(spec: ModelSpec, read: _Reader, prefix: str, index: int) -> tuple[Linear | None, tuple[GatedMlp, ...]]:
    mixture, mlp, names = spec.mixture, prefix + "mlp.", ("gate_proj", "up_proj", "down_proj")
    if mixture is None or index not in mixture.layers:
        return None, (_load_gated(spec, read, mlp, names, spec.intermediate_size),)
    if prefix + "block_sparse_moe.gate.weight" in read.files:  # Mixtral's own names
        mlp, names = prefix + "block_sparse_moe.", ("w1", "w3", "w2")
    experts = tuple(
        _load_gated(spec, read, f"{mlp}experts.{expert}.", names, mixture.intermediate_size)
        for expert in range(mixture.num_experts)
    )
    # never rounded: the choice of experts can depend on the last bits of the router's logits
    return Linear(read(mlp + "gate.weight", mixture.num_experts, spec.hidden_size)), experts


def _load_gated(spec: ModelSpec, read: _Reader, prefix: str, names: tuple[str, str, str], inner: int) -> GatedMlp:
    gate, up, down = (f"{prefix}{name}." for name in names)
    model, has_bias = spec.hidden_size, spec.has_mlp_bias
    gate_up = read.fused(prefix + "gate_up_proj.", [gate, up], [inner, inner], model, has_bias=has_bias)
    return GatedMlp(gate_up, read.linear(down, model, inner, has_bias=has_bias), spec.activation)
