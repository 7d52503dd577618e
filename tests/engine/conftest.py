"""Fixtures of the engine tests: a tiny model, and one thread for it."""

from collections.abc import Iterator

import pytest
import torch

from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_own_decoder
from tests.devices import TEST_DEVICE
from tests.fakes import random_checkpoint


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: with a tiny model two threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("checkpoint")
    random_checkpoint(path, "Llama", num_hidden_layers=2)
    return load_own_decoder(path, device=TEST_DEVICE, dtype="float32")
