"""Fixtures of the engine tests: a tiny model, its oracle, and one thread for both."""

from pathlib import Path

import pytest

from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_own_decoder
from tests.devices import TEST_DEVICE
from tests.engine.engine_fixture import Oracle
from tests.fakes import random_checkpoint


@pytest.fixture(scope="module", autouse=True)
def one_thread_for_tiny_models(one_thread: None) -> None:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers."""
    path = tmp_path_factory.mktemp("checkpoint")
    random_checkpoint(path, "Llama", num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load_own_decoder(folder, device=TEST_DEVICE, dtype="float32")


@pytest.fixture(scope="module")
def oracle(decoder: Decoder) -> Oracle:
    return Oracle(decoder)
