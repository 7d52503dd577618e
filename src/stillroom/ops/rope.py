"""Rotary position embedding: inverse frequencies of each scaling scheme, and the rotation (rotate-half).

The schemes are those of transformers; tests compare each with it.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from stillroom.ops import cpu_kernels
from stillroom.ops.device_attention import current_gpu, has_kernels, row_kernels_of_gpu

# T tokens, H query heads, G key/value heads, D head dimension, P pairs of rotated dimensions


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of a checkpoint's rotary embedding."""

    rotary_dim: int
    """Leading dimensions of a head that are rotated; usually all."""
    theta: float
    max_positions: int
    """Longest sequence by the checkpoint's config."""
    kind: str = "default"
    """default | linear | llama3 | yarn | longrope."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """The scheme's parameters from the checkpoint."""
    max_model_len: int = 0
    """Longest sequence that will run; longrope has other frequencies for long sequences."""


SUPPORTED_KINDS = frozenset({"default", "linear", "llama3", "yarn", "longrope"})
REQUIRED_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
"""Required parameters of each kind. A null factor of yarn means the ratio of the new to the original length."""


def inverse_frequencies(spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """Return the angle per position of each pair of dimensions, float32 [D / 2], and the factor on cos and sin."""
    assert spec.kind in SUPPORTED_KINDS, spec.kind
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim
    plain = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return plain / float(spec.parameters["factor"]), 1.0
    if spec.kind == "llama3":
        return _llama3(plain, spec), 1.0
    if spec.kind == "yarn":
        return _yarn(plain, spec)
    if spec.kind == "longrope":
        return _longrope(plain, spec)
    return plain, 1.0


def _llama3(plain: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Llama 3.1: stretches long wavelengths by `factor`, keeps short ones, blends those between."""
    factor = float(spec.parameters["factor"])
    low, high = float(spec.parameters["low_freq_factor"]), float(spec.parameters["high_freq_factor"])
    old_length = float(spec.parameters["original_max_position_embeddings"])
    num_rotations = old_length * plain / (2 * math.pi)  # full rotations within the original context
    keep = ((num_rotations - low) / (high - low)).clamp(0.0, 1.0)
    return plain / factor * (1 - keep) + plain * keep


def _yarn(plain: torch.Tensor, spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): blends by number of rotations, and scales attention."""
    numbers = spec.parameters
    factor = float(numbers["factor"])
    old_length = float(numbers.get("original_max_position_embeddings") or spec.max_positions)

    def dimension_of(num_rotations: float) -> float:
        return spec.rotary_dim * math.log(old_length / (num_rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = dimension_of(float(numbers.get("beta_fast") or 32))
    high = dimension_of(float(numbers.get("beta_slow") or 1))
    if numbers.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    ramp = (torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1.0 - ramp.clamp(0.0, 1.0)
    return plain / factor * (1 - keep) + plain * keep, _yarn_attention_factor(factor, numbers)


def _yarn_attention_factor(factor: float, numbers: dict[str, Any]) -> float:
    def m_scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if numbers.get("attention_factor") is not None:
        return float(numbers["attention_factor"])
    if numbers.get("mscale") and numbers.get("mscale_all_dim"):
        return m_scale(float(numbers["mscale"])) / m_scale(float(numbers["mscale_all_dim"]))
    return m_scale(1.0)


def _longrope(plain: torch.Tensor, spec: RopeSpec) -> tuple[torch.Tensor, float]:
    """LongRoPE (arXiv 2402.13753): a searched factor for each pair of dimensions, in one set per range of lengths."""
    numbers = spec.parameters
    old_length = int(numbers["original_max_position_embeddings"])
    factors = numbers["long_factor" if spec.max_model_len > old_length else "short_factor"]
    stretch = float(numbers.get("factor") or spec.max_positions / old_length)
    attention_factor = numbers.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(stretch) / math.log(old_length)) if stretch > 1 else 1.0
    return plain / torch.tensor(factors, dtype=torch.float32), float(attention_factor)


def cos_sin(inv_freq: torch.Tensor, factor: float, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of each position and pair of dimensions, each float32 [T, 1, P]."""
    angles_T1P = (positions_T.float()[:, None] * inv_freq[None, :])[:, None, :]
    return angles_T1P.cos() * factor, angles_T1P.sin() * factor


def rotate_and_store(
    qkv: torch.Tensor,
    cos_sin_T1P: tuple[torch.Tensor, torch.Tensor],
    slots_T: torch.Tensor,
    kv_SGD: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Rotate the queries and keys of `qkv` [T, H + 2 G, D], write keys and values to their slots.

    Args:
        cos_sin_T1P: float32 or the dtype of `qkv`; float32 rotates without rounding in between.

    Returns:
        The rotated queries [T, H, D].
    """
    num_kv_heads = kv_SGD[0].shape[1]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    if cpu_kernels.has_kernel(qkv, kv_SGD[0]):
        cos_sin = (cos_sin_T1P[0].squeeze(1).numpy(), cos_sin_T1P[1].squeeze(1).numpy())
        q_THD = qkv.new_empty((qkv.shape[0], num_heads, qkv.shape[2]))
        kv = (cpu_kernels.array(kv_SGD[0]), cpu_kernels.array(kv_SGD[1]))
        cpu_kernels.rotate_and_store(qkv.numpy(), cos_sin, slots_T.numpy(), kv, q_THD.numpy())
        return q_THD
    if has_kernels(qkv.device):
        with current_gpu(qkv.device):
            rotated_THD: torch.Tensor = row_kernels_of_gpu().rotate_and_store(qkv, cos_sin_T1P, slots_T, kv_SGD)
        return rotated_THD
    q_THD, k_TGD, v_TGD = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    kv_SGD[0].index_copy_(0, slots_T, rotate(k_TGD, *cos_sin_T1P).to(kv_SGD[0].dtype))
    kv_SGD[1].index_copy_(0, slots_T, v_TGD.to(kv_SGD[1].dtype))
    return rotate(q_THD, *cos_sin_T1P).to(qkv.dtype)


def rerotate_keys(
    k_LTGD: torch.Tensor, inv_freq_LP: torch.Tensor, first_position: int, new_first_position: int
) -> torch.Tensor:
    """Return the keys of consecutive tokens from `first_position` on, rotated to `new_first_position` on.

    The result is a new tensor of the same shape and dtype. A scheme's factor on cos and sin is in the keys already. The
    angle is the difference of the angles that the decoder uses, float32 rounding included, so that the result differs
    from freshly rotated keys by the rounding of keys alone, at any position.

    Args:
        inv_freq_LP: from `inverse_frequencies`, for each layer; on the device of the keys.
    """
    cos_LTP, sin_LTP = rerotation(k_LTGD.shape[1], inv_freq_LP, first_position, new_first_position)
    return rotate(k_LTGD.float(), cos_LTP[:, :, None], sin_LTP[:, :, None]).to(k_LTGD.dtype)


def rerotation(
    num_tokens: int, inv_freq_LP: torch.Tensor, first_position: int, new_first_position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of `rerotate_keys`, float32 [L, T, P]; [1, T, P] if all layers rotate alike."""
    angles_LTP = _angles(num_tokens, inv_freq_LP, new_first_position) - _angles(num_tokens, inv_freq_LP, first_position)
    return angles_LTP.cos().float(), angles_LTP.sin().float()


def rotation_from_zero(
    num_tokens: int, inv_freq_LP: torch.Tensor, first_position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of the rotation from position 0 to consecutive positions from this one on; shapes as of
    `rerotation`."""
    angles_LTP = _angles(num_tokens, inv_freq_LP, first_position)
    return angles_LTP.cos().float(), angles_LTP.sin().float()


def _angles(num_tokens: int, inv_freq_LP: torch.Tensor, first_position: int) -> torch.Tensor:
    """The angles of consecutive positions, as the decoder rounds them, float64 [L, T, P]; [1, T, P] if layers agree."""
    positions_T = torch.arange(first_position, first_position + num_tokens, device=inv_freq_LP.device)
    return (positions_T.float()[None, :, None] * of_distinct_layers(inv_freq_LP)[:, None, :]).double()


def of_distinct_layers(inv_freq_LP: torch.Tensor) -> torch.Tensor:
    """Return [1, P] if all layers rotate alike, else [L, P]."""
    is_same = len(inv_freq_LP) == 1 or bool((inv_freq_LP == inv_freq_LP[0]).all())
    return inv_freq_LP[:1] if is_same else inv_freq_LP


def rotate(x_THD: torch.Tensor, cos_T1P: torch.Tensor, sin_T1P: torch.Tensor) -> torch.Tensor:
    """Rotate every head of every token to its position; same shape and dtype.

    Pairs are (i, i + P); dimensions from 2 P on stay as they are.
    """
    num_pairs = cos_T1P.shape[-1]
    first, second, rest = torch.split(x_THD, [num_pairs, num_pairs, x_THD.shape[-1] - 2 * num_pairs], dim=-1)
    return torch.cat((first * cos_T1P - second * sin_T1P, second * cos_T1P + first * sin_T1P, rest), dim=-1)
