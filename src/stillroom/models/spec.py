"""`ModelSpec`: the parameters in which the supported decoder architectures differ.

`spec_from_config` reads it from a checkpoint's `config.json`, in the layout of transformers 4 or 5. To add an
architecture, add a line to `_FAMILIES` and a row to tests/models/test_oracle.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stillroom.errors import ModelError, UnsupportedModelError
from stillroom.ops.rope import REQUIRED_NUMBERS, SUPPORTED_KINDS, RopeSpec

AGAIN = "download the checkpoint again"
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSpec:
    """Layers whose MLP is a mixture of experts, of which a router picks some for each token."""

    num_experts: int
    num_active: int
    """Experts per token."""
    intermediate_size: int
    """Inner dimension of one expert."""
    is_normalised: bool
    """Whether the weights of a token's experts add up to 1."""
    layers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm before each block, rotary positions, a gated MLP or a mixture of them."""

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
    """Longest sequence that may run."""
    rope: RopeSpec
    local_rope: RopeSpec | None
    """RoPE of the layers with a sliding window, if it differs (Gemma 3)."""
    activation: str
    """silu | gelu_tanh."""
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    """Queries and keys are normalised per head before rotation (Qwen3, Gemma 3)."""
    has_offset_norms: bool
    """Norms multiply by 1 + weight, in float32 (Gemma)."""
    has_sandwich_norms: bool
    """The outputs of attention and MLP are normalised as well (Gemma)."""
    embedding_scale: float | None
    attention_scale: float
    """Factor on the products of queries and keys."""
    attention_softcap: float | None
    """Attention logits are squeezed into (-cap, cap) by tanh (Gemma 2)."""
    logit_softcap: float | None
    is_tied: bool
    """The output projection is the embedding matrix."""
    windows: tuple[int | None, ...]
    """Sliding-window length per layer; None: full attention."""
    mixture: MixtureSpec | None


def without_lengths(spec: ModelSpec) -> ModelSpec:
    """Clear the lengths that KV does not depend on; only longrope rotates keys by the longest sequence."""

    def cleared(rope: RopeSpec) -> RopeSpec:
        return rope if rope.kind == "longrope" else replace(rope, max_model_len=0)

    local = None if spec.local_rope is None else cleared(spec.local_rope)
    return replace(spec, max_positions=0, rope=cleared(spec.rope), local_rope=local)


_Sliding = Literal["none", "all", "by layer"]


@dataclass(frozen=True, slots=True)
class _Family:
    """Properties that a `model_type` implies, and defaults of fields that `config.json` may omit."""

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    is_gemma: bool = False
    is_partly_rotated: bool = False
    """Whether `partial_rotary_factor` is supported, as in transformers."""
    slides: _Sliding = "all"
    """Layers with a sliding window, if `sliding_window` is set. "by layer": `layer_types` or its older forms say."""
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GEMMA = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA2 = _GEMMA | {
    "sliding_window_pattern": 2,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = _GEMMA | {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
}

_QWEN = {"use_sliding_window": False, "sliding_window": 4096}
_PHI3 = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}

_FAMILIES = {
    "llama": _Family(slides="none"),
    "mistral": _Family(defaults={"sliding_window": 4096}),
    "mixtral": _Family(defaults={"rope_theta": 1e6, "norm_topk_prob": True}),
    "qwen2": _Family(has_qkv_bias=True, slides="by layer", defaults=_QWEN | {"max_window_layers": 28}),
    "qwen3": _Family(has_qk_norm=True, slides="by layer", defaults=_QWEN | {"max_window_layers": 28}),
    "qwen3_moe": _Family(has_qk_norm=True, defaults=_QWEN),
    "phi3": _Family(is_partly_rotated=True, defaults=_PHI3),
    "gemma2": _Family(is_gemma=True, slides="by layer", defaults=_GEMMA2),
    "gemma3_text": _Family(is_gemma=True, has_qk_norm=True, slides="by layer", defaults=_GEMMA3),
}


def spec_from_config(config: Mapping[str, Any], max_model_len: int = 0) -> ModelSpec:
    """Read a parsed `config.json`.

    Args:
        max_model_len: longest sequence that will run; 0: the longest that does not change the model's arithmetic.

    Raises:
        UnsupportedModelError: the architecture, activation or RoPE scheme is not implemented, or a field is missing.
        ModelError: a value is invalid.
    """
    config = _text_part(config)
    model_type = str(config.get("model_type"))
    family = _FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; Stillroom runs {', '.join(sorted(_FAMILIES))}"
        )
    try:
        return _spec({**family.defaults, **config}, family, max_model_len)
    except KeyError as error:
        raise UnsupportedModelError(f"config.json lacks {error.args[0]!r}; the checkpoint is incomplete") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"config.json holds an invalid value ({error}); {AGAIN}") from error


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model of Gemma 3 with a vision tower; other configs unchanged."""
    if config.get("model_type") != "gemma3":
        return config
    return {**config.get("text_config", {}), "model_type": "gemma3_text"}


def _spec(config: Mapping[str, Any], family: _Family, max_model_len: int) -> ModelSpec:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention makes an encoder; Stillroom runs decoders")
    hidden_size, num_layers = _count(config, "hidden_size"), _count(config, "num_hidden_layers")
    num_heads, num_kv_heads, head_dim = _heads(config, hidden_size)
    has_bias = bool(config.get("attention_bias", False))
    windows = _windows(config, family, num_layers)
    rope = _rope(config, family, head_dim, max_model_len)
    return ModelSpec(
        model_type=str(config["model_type"]),
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=rope.max_model_len,
        rope=rope,
        local_rope=_local_rope(config, family, head_dim, max_model_len),
        activation=_activation(config),
        has_qkv_bias=has_bias or family.has_qkv_bias,
        has_output_bias=has_bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        has_qk_norm=family.has_qk_norm,
        has_offset_norms=family.is_gemma,
        has_sandwich_norms=family.is_gemma,
        embedding_scale=hidden_size**0.5 if family.is_gemma else None,
        attention_scale=float(config.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        attention_softcap=_optional(config, "attn_logit_softcapping"),
        logit_softcap=_optional(config, "final_logit_softcapping"),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        windows=windows,
        mixture=_mixture(config, num_layers),
    )


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config[name]
    if type(value) is not int or value < 1:
        raise ModelError(f"config.json: {name} = {value!r}, but it must be a whole number above 0; {AGAIN}")
    return value


def _heads(config: Mapping[str, Any], hidden_size: int) -> tuple[int, int, int]:
    """Return the number of query heads, of key/value heads, and the head dimension."""
    num_heads = _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads") if config.get("num_key_value_heads") else num_heads
    if config.get("head_dim"):
        head_dim, rest = _count(config, "head_dim"), 0
    else:
        head_dim, rest = divmod(hidden_size, num_heads)
    if rest or num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: hidden_size = {hidden_size} must be a multiple of num_attention_heads = {num_heads}, and "
            f"that of num_key_value_heads = {num_kv_heads}; {AGAIN}"
        )
    return num_heads, num_kv_heads, head_dim


def _optional(config: Mapping[str, Any], name: str) -> float | None:
    value = config.get(name)
    return None if value is None else float(value)


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"hidden_act {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _rope(config: Mapping[str, Any], family: _Family, head_dim: int, max_model_len: int) -> RopeSpec:
    """Read `rope_parameters` (transformers 5), else `rope_theta` with `rope_scaling` (transformers 4).

    A longrope model has two sets of frequencies, for sequences within its original length and for longer ones. Kept
    keys cannot change their frequencies, so the longest sequence that may run decides for all: the original length,
    unless `max_model_len` is longer.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters = {**parameters, **(parameters.get("full_attention") or {})}
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if config["model_type"] == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # older names of it
    if kind not in SUPPORTED_KINDS:
        raise UnsupportedModelError(
            f"RoPE scaling {kind!r} is not supported; supported are {', '.join(sorted(SUPPORTED_KINDS))}"
        )
    part = float(config.get("partial_rotary_factor") or parameters.get("partial_rotary_factor") or 1.0)
    if part != 1.0 and not family.is_partly_rotated:
        raise UnsupportedModelError(f"a partial_rotary_factor other than 1 is not supported for {config['model_type']}")
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    max_positions = _count(config, "max_position_embeddings") if config.get("max_position_embeddings") else 2048
    _complete(parameters, kind, config.get("original_max_position_embeddings"), max_positions)
    usual_len = parameters["original_max_position_embeddings"] if kind == "longrope" else max_positions
    return RopeSpec(
        rotary_dim=int(head_dim * part),
        theta=float(theta),
        max_positions=max_positions,
        kind=kind,
        parameters=parameters,
        max_model_len=min(max_model_len or usual_len, max_positions),
    )


def _complete(parameters: dict[str, Any], kind: str, original: int | None, max_positions: int) -> None:
    """Fill in optional numbers of the RoPE scheme.

    Args:
        original: original training length from the top level of the config (Phi-3). It overrides the length in
            `parameters`, as in transformers.

    Raises:
        KeyError: a required number is missing.
    """
    for name in REQUIRED_NUMBERS.get(kind, ()):
        if parameters.get(name) is None and not (kind == "yarn" and name in parameters):
            raise KeyError(name)
    if kind in ("llama3", "yarn", "longrope"):
        original = int(original or parameters.get("original_max_position_embeddings") or max_positions)
        parameters["original_max_position_embeddings"] = original
        if kind == "yarn" and parameters["factor"] is None:
            parameters["factor"] = max_positions / original


def _local_rope(config: Mapping[str, Any], family: _Family, head_dim: int, max_model_len: int) -> RopeSpec | None:
    """Read `rope_parameters.sliding_attention` (transformers 5), else `rope_local_base_freq` (transformers 4)."""
    if "rope_local_base_freq" not in config:
        return None
    own = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    parameters = {"rope_theta": config["rope_local_base_freq"], **own}
    return _rope({**config, "rope_parameters": parameters}, family, head_dim, max_model_len)


def _windows(config: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window; "by layer" families read `layer_types` if given, else their older form."""
    is_off = "use_sliding_window" in family.defaults and not config["use_sliding_window"]
    window = None if is_off or family.slides == "none" else config.get("sliding_window")
    if family.slides != "by layer":
        return (None if window is None else int(window),) * num_layers
    kinds = config.get("layer_types")
    unknown = set(kinds or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(f"layers of type {', '.join(sorted(unknown))} are not supported")
    if window is None:
        return (None,) * num_layers
    if kinds is None:
        kinds = [_layer_type(config, layer) for layer in range(num_layers)]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _layer_type(config: Mapping[str, Any], layer: int) -> str:
    """Return a layer's type by the older forms: every n-th layer is full (Gemma), or the first ones are (Qwen)."""
    if "sliding_window_pattern" in config:
        slides = (layer + 1) % int(config["sliding_window_pattern"]) != 0
    else:
        slides = layer >= int(config["max_window_layers"])
    return "sliding_attention" if slides else "full_attention"


def _mixture(config: Mapping[str, Any], num_layers: int) -> MixtureSpec | None:
    """Read the mixture: every layer (Mixtral), or every `decoder_sparse_step`-th but `mlp_only_layers` (Qwen3-MoE)."""
    num_experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    if config["model_type"] not in ("mixtral", "qwen3_moe") or not num_experts:
        return None
    step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or ()
    return MixtureSpec(
        num_experts=num_experts,
        num_active=int(config["num_experts_per_tok"]),
        intermediate_size=int(config.get("moe_intermediate_size") or config["intermediate_size"]),
        is_normalised=bool(config.get("norm_topk_prob", False)),
        layers=frozenset(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense),
    )
