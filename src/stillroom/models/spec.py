"""The small record that describes a decoder: everything in which the supported architectures differ.

`spec_from_config` reads it from a checkpoint's `config.json`, in the layout of transformers 4 and 5 alike. Adding an
architecture of the Llama family means a line in `_FAMILIES`, and a row in the oracle test.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stillroom.errors import UnsupportedModelError
from stillroom.ops.rope import SUPPORTED_KINDS, RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer of the Llama family: pre-norm, RMSNorm, rotary positions, gated SiLU MLP."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeSpec
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    """Queries and keys are normalised per head before rotation (Qwen3)."""
    is_tied: bool
    """The output projection is the embedding matrix."""
    windows: tuple[int | None, ...]
    """Sliding-window length per layer; None: full attention."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What a `model_type` implies when `config.json` does not say."""

    has_qkv_bias: bool = False
    has_qk_norm: bool = False


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(has_qkv_bias=True),
    "qwen3": _Family(has_qk_norm=True),
}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The record for a parsed `config.json`.

    Raises:
        UnsupportedModelError: an architecture, activation or RoPE scheme that is not implemented, or a missing field.
    """
    model_type = str(config.get("model_type"))
    family = _FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; Stillroom runs {', '.join(sorted(_FAMILIES))}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {config['hidden_act']!r} is not supported; only silu is")
    if config.get("quantization_config"):
        raise UnsupportedModelError("quantised checkpoints are not supported; use the unquantised weights")
    try:
        num_heads = int(config["num_attention_heads"])
        num_layers = int(config["num_hidden_layers"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // num_heads)
        max_positions = int(config.get("max_position_embeddings") or 2048)
        has_bias = bool(config.get("attention_bias", False))
        return ModelSpec(
            model_type=model_type,
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=head_dim,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_positions=max_positions,
            rope=_rope(config, head_dim, max_positions),
            has_qkv_bias=has_bias or family.has_qkv_bias,
            has_output_bias=has_bias,
            has_mlp_bias=bool(config.get("mlp_bias", False)),
            has_qk_norm=family.has_qk_norm,
            is_tied=bool(config.get("tie_word_embeddings", False)),
            windows=_windows(config, num_layers),
        )
    except KeyError as error:
        raise UnsupportedModelError(f"config.json lacks {error.args[0]!r}; the checkpoint is incomplete") from None


def _rope(config: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeSpec:
    """`rope_parameters` (transformers 5), else `rope_theta` with `rope_scaling` (transformers 4)."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind not in SUPPORTED_KINDS:
        raise UnsupportedModelError(
            f"RoPE scaling {kind!r} is not supported; supported are {', '.join(sorted(SUPPORTED_KINDS))}"
        )
    if float(config.get("partial_rotary_factor") or parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModelError("a partial_rotary_factor other than 1 is not supported")
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    return RopeSpec(head_dim, float(theta), max_positions, kind, parameters)


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Which layers slide: `layer_types` where given, else Qwen's `max_window_layers`, else all of them or none."""
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return (None,) * num_layers
    kinds = config.get("layer_types")
    if kinds is not None:
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    first = int(config.get("max_window_layers", 0))
    if config.get("model_type") in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        first = num_layers
    return tuple(int(window) if layer >= first else None for layer in range(num_layers))
