"""Checks at load whether a model's KV can be reused at another position, which `anywhere` and `prepared` need.

The same tokens are computed alone at two positions. If their KV depends on the position only by the rotation of its
keys (RoPE), rotating the keys of one gives the KV of the other, in every layer. With other position schemes, the
difference is as large as the keys themselves.
"""

import torch

from stillroom.backends.assembly import kv_shape
from stillroom.errors import ConfigError
from stillroom.kvstore.device import DeviceStore
from stillroom.models.causal_model import CausalModel
from stillroom.models.packed import PackedInput
from stillroom.ops.attention import AttentionSpan
from stillroom.ops.rope import rerotate_keys

_NUM_TOKENS = 16
_TOLERANCE = 0.02
"""Largest relative error of a layer: far above the rounding of keys, even in half precision and over long distances,
and far below that of a wrong rotation."""
_TOLERANCE_OF_LATER_LAYERS = 0.1
"""The same behind the first layer, if activations have half precision too (on a GPU): each operation before rounds, and
differently at other positions. An NVIDIA H200 measured 0.029 in 28 layers of random weights while rotation was rounded
to bfloat16 too; without that the difference is not measured."""


def check_placement(decoder: CausalModel, block_size: int) -> None:
    """Compare rotated KV with computed KV, from the first possible position to the last and back.

    Raises:
        ConfigError: they differ.
    """
    last = decoder.spec.max_positions - _NUM_TOKENS
    if last <= 0:
        raise _refused(f"it has room for {decoder.spec.max_positions} tokens only")
    near, far = (kv_at(decoder, first, block_size) for first in (0, last))
    for (k_LTGD, v_LTGD), (other_k_LTGD, other_v_LTGD), start, end in ((near, far, 0, last), (far, near, last, 0)):
        turned_LTGD = rerotate_keys(k_LTGD, decoder.inv_freq_LP, start, end)
        errors_L = torch.maximum(relative_errors(turned_LTGD, other_k_LTGD), relative_errors(v_LTGD, other_v_LTGD))
        tolerances_L = torch.full_like(errors_L, _TOLERANCE)
        if decoder.activation_dtype != torch.float32:
            tolerances_L[1:] = _TOLERANCE_OF_LATER_LAYERS
        if not bool((errors_L <= tolerances_L).all()):
            raise _refused(
                f"KV moved from position {start} to {end} differs by {float(errors_L.max()):.1%} from what is computed "
                "there"
            )


def kv_at(decoder: CausalModel, first_position: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of some tokens from this position on, with nothing before them, each [L, T, G, D]."""
    num_blocks = -(-_NUM_TOKENS // block_size)
    store = DeviceStore(kv_shape(decoder), num_blocks, block_size, decoder.device)
    numbers = torch.arange(_NUM_TOKENS, device=decoder.device)
    spans = [AttentionSpan(0, _NUM_TOKENS, slice(0, _NUM_TOKENS), _NUM_TOKENS)]
    token_ids_T = (numbers * 7919 + 11) % decoder.spec.vocab_size
    packed = PackedInput(token_ids_T, numbers + first_position, numbers, spans, [_NUM_TOKENS - 1])
    decoder.hidden_states(packed, store.layer)
    return store.k_LSGD[:, :_NUM_TOKENS], store.v_LSGD[:, :_NUM_TOKENS]


def relative_errors(found_LTGD: torch.Tensor, wanted_LTGD: torch.Tensor) -> torch.Tensor:
    """Return the relative error of each layer, [L]; NaN if either holds NaN."""
    found, wanted = found_LTGD.float().flatten(1), wanted_LTGD.float().flatten(1)
    errors_L: torch.Tensor = (found - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-12)
    return errors_L


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"reuse.mode=anywhere and prepared are refused for this model: {reason}; use reuse.mode=exact")
