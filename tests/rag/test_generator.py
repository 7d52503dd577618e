"""What a model, its device and its memory must be for a generator to be built."""

from pathlib import Path

import pytest

from stillroom.config.settings import RuntimeConfig
from stillroom.errors import ConfigError
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_decoder
from stillroom.rag.kv_cache import build_device
from tests.fakes import random_checkpoint


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    random_checkpoint(tmp_path, "Llama", num_hidden_layers=1)
    return load_decoder(tmp_path, device="cpu")


@pytest.mark.parametrize(("kv_bytes", "message"), [(1, "raise it"), (2**60, "lower it"), (2**90, "lower it")])
def test_memory_for_kv_that_holds_nothing_or_is_not_there(decoder: Decoder, kv_bytes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"runtime.kv_bytes={kv_bytes} .*{message}"):
        build_device(decoder, RuntimeConfig(kv_bytes=kv_bytes))
