"""Wrong KV never becomes valid: what is damaged in memory is dropped, not served, and never stored."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stillroom.core.kv import Tier
from stillroom.kvstore.record import Defect
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_decoder
from tests.engine.test_reuse import House, Oracle, question
from tests.fakes import random_checkpoint


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("checkpoint")
    random_checkpoint(path, "Llama", num_hidden_layers=2)
    return load_decoder(path, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def oracle(decoder: Decoder) -> Oracle:
    return Oracle(decoder)


# Host memory


def flip_host_copies(house: House) -> None:
    """Flip a high bit in every copy on the host."""
    assert house.cache.tiers is not None
    host = house.cache.tiers.host
    for node in house.tree:
        copy = host.get(node.key)
        if copy is not None:
            copy.kv_2LTGD.view(torch.int32).view(-1)[7] ^= 1 << 28


def on_host_only(decoder: Decoder, folder: Path | None) -> House:
    """A house whose kept documents are on the host, and not on the device."""
    house = House(decoder, folder, host_tokens=400, disk_tokens=400)
    house.run(question("a", 1, 2))
    house.tree.make_room(house.cache.manager.pool.num_blocks)
    assert house.tree.num_nodes(Tier.HOST) > 2 and house.tree.num_nodes(Tier.DEVICE) == 0
    return house


def verify_failures(house: House) -> dict[tuple[str, str], int]:
    figures = house.cache.figures()
    assert figures is not None
    return {labels: count for labels, count in figures.verify_failures.items() if count}


def test_flipped_bits_in_host_memory_are_computed_again(decoder: Decoder, oracle: Oracle) -> None:
    house = on_host_only(decoder, None)
    flip_host_copies(house)
    one = question("b", 1, 2)
    tokens, reuse = house.run(one)
    assert tokens == oracle.answer(one) and reuse.num_cached_tokens == 0
    assert verify_failures(house) == {("host", Defect.CHECKSUM): 1}, "what hangs from it goes with it"


def test_flipped_bits_in_host_memory_are_never_stored(decoder: Decoder, oracle: Oracle, tmp_path: Path) -> None:
    house = on_host_only(decoder, tmp_path)
    flip_host_copies(house)
    house.cache.close()
    assert not list(tmp_path.rglob("*.kv"))
    again = House(decoder, tmp_path, host_tokens=400, disk_tokens=400)
    one = question("b", 1, 2)
    tokens, reuse = again.run(one)
    assert tokens == oracle.answer(one) and reuse.num_cached_tokens == 0


def test_copies_that_were_not_damaged_are_stored_and_served(decoder: Decoder, oracle: Oracle, tmp_path: Path) -> None:
    house = on_host_only(decoder, tmp_path)
    house.cache.close()
    again = House(decoder, tmp_path, host_tokens=400, disk_tokens=400)
    one = question("b", 1, 2)
    tokens, reuse = again.run(one)
    assert tokens == oracle.answer(one) and reuse.num_cached_tokens > 0
    assert not verify_failures(again)
