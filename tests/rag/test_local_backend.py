"""Building the local backend refuses unusable KV budgets and models."""

from pathlib import Path

import pytest
import torch

from stillroom.backends.assembly import build_device, kv_shape
from stillroom.backends.local import build_engine
from stillroom.config.settings import RuntimeConfig
from stillroom.core.clock import SystemClock
from stillroom.errors import ConfigError, ModelError
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_decoder
from tests.fakes import random_checkpoint


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    random_checkpoint(tmp_path, "Llama", num_hidden_layers=1)
    return load_decoder(tmp_path, device="cpu")


@pytest.mark.parametrize(("kv_bytes", "message"), [(1, "raise it"), (2**60, "lower it"), (2**90, "lower it")])
def test_kv_budget_too_small_or_too_large_is_refused(decoder: Decoder, kv_bytes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"runtime.kv_bytes={kv_bytes} .*{message}"):
        build_device(decoder, RuntimeConfig(kv_bytes=kv_bytes))


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("number", [1.0, float("nan"), float("inf")])
def test_model_that_computes_nan_is_refused_at_load(decoder: Decoder, block_size: int, number: float) -> None:
    decoder.weights.final_norm[3] = number
    config = RuntimeConfig(kv_bytes=block_size * kv_shape(decoder).bytes_per_token, block_size=block_size)
    if torch.tensor(number).isfinite():
        build_engine(decoder, config, SystemClock())
    else:
        with pytest.raises(ModelError, match="computes NaN"):
            build_engine(decoder, config, SystemClock())
