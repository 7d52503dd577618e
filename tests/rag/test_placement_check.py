"""Models whose KV can be rotated to another position are accepted, others are refused with the reason."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stillroom.backends.placement_check import check_placement
from stillroom.config.settings import Dtype
from stillroom.errors import ConfigError
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_own_decoder
from tests.fakes import random_checkpoint

ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
KINDS = [
    pytest.param("Llama", {}, id="llama"),
    pytest.param("Qwen3", {}, id="qwen3"),
    pytest.param("Llama", {"max_position_embeddings": 256, "rope_parameters": ROPE}, id="yarn"),
]


def load(path: Path, kind: str, settings: dict[str, Any], dtype: Dtype) -> Decoder:
    random_checkpoint(path, kind, **settings)
    return load_own_decoder(path, device="cpu", dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_models_with_rotary_positions_are_accepted(
    tmp_path: Path, kind: str, settings: dict[str, Any], dtype: Dtype
) -> None:
    check_placement(load(tmp_path, kind, settings, dtype), 8)


def test_wrong_rotation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = load(tmp_path, "Llama", {}, "float32")
    wrong = decoder.inv_freq_LP * 1.01
    monkeypatch.setattr(Decoder, "inv_freq_LP", property(lambda self: wrong))
    with pytest.raises(ConfigError, match="refused for this model: KV moved from position 0"):
        check_placement(decoder, 8)


def test_values_that_depend_on_the_position_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with learned positions, which are added to the embeddings."""
    decoder = load(tmp_path, "Llama", {}, "float32")
    plain = decoder.hidden_states

    def with_positions(packed: Any, layer_kv: Any, watch: Any = None) -> torch.Tensor:
        hidden_BM = plain(packed, layer_kv, watch)
        for layer in range(decoder.spec.num_layers):
            layer_kv(layer)[1][packed.slots_T] += packed.positions_T[:, None, None] * 0.01
        return hidden_BM

    monkeypatch.setattr(decoder, "hidden_states", with_positions)
    with pytest.raises(ConfigError, match="use reuse.mode=exact"):
        check_placement(decoder, 8)
