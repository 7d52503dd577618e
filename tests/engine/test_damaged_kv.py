"""Wrong KV never becomes valid: what is damaged in memory is dropped, not served, and never stored."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stillroom.core.batch import Batch, StepResult
from stillroom.core.ids import RequestId
from stillroom.core.kv import Tier
from stillroom.core.request import FinishReason
from stillroom.errors import NonFiniteError
from stillroom.kvcache.tree.node import Node
from stillroom.kvstore.record import Defect
from stillroom.models.decoder import Decoder
from stillroom.runner.decode_graphs import StaticDecoding
from stillroom.runner.torch_runner import TorchRunner
from stillroom.telemetry import catalogue
from tests.engine.test_reuse import BLOCK, House, Oracle, question


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
    house = House(decoder, folder, host_tokens=400, disk_records=40)
    house.run(question("a", 1, 2))
    house.tree.make_room(house.cache.manager.pool.num_blocks)
    assert house.tree.num_nodes(Tier.HOST) > 2 and house.tree.num_nodes(Tier.DEVICE) == 0
    return house


def verify_failures(house: House) -> dict[tuple[str, str], int]:
    failures = house.cache.readings()[catalogue.KV_VERIFY_FAILURES]
    assert isinstance(failures, dict)
    return {labels: count for labels, count in failures.items() if count}


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
    again = House(decoder, tmp_path, host_tokens=400, disk_records=40)
    one = question("b", 1, 2)
    tokens, reuse = again.run(one)
    assert tokens == oracle.answer(one) and reuse.num_cached_tokens == 0


def test_copies_that_were_not_damaged_are_stored_and_served(decoder: Decoder, oracle: Oracle, tmp_path: Path) -> None:
    house = on_host_only(decoder, tmp_path)
    house.cache.close()
    again = House(decoder, tmp_path, host_tokens=400, disk_records=40)
    one = question("b", 1, 2)
    tokens, reuse = again.run(one)
    assert tokens == oracle.answer(one) and reuse.num_cached_tokens > 0
    assert not verify_failures(again)


# NaN on the device

NAN = float("nan")


def poison(house: House, node: Node, which: str = "v_LSGD", layer: int = 0) -> None:
    """Write one NaN into a kept node's KV on the device."""
    assert node.block_ids is not None
    slot = node.block_ids[0] * BLOCK + 1
    getattr(house.cache.device, which)[layer, slot, 0, 2] = NAN


def node_of(house: House, document: int) -> Node:
    return next(node for node in house.tree if node.chunk_id == document)


def assert_refused(house: House, *names: str) -> None:
    for name in names:
        event = house.last[RequestId(name)]
        assert isinstance(event.error, NonFiniteError) and event.finish_reason is FinishReason.ABORTED, name
        assert event.token_id is None


def all_kept_is_finite(house: House) -> bool:
    device = house.cache.device
    return all(device.is_finite(node.block_ids, node.num_tokens) for node in house.tree if node.block_ids is not None)


@pytest.mark.parametrize("which", ["k_LSGD", "v_LSGD"])
def test_a_nan_in_a_kept_document_ends_the_request_over_it_and_is_never_served_again(
    decoder: Decoder, oracle: Oracle, tmp_path: Path, which: str
) -> None:
    house = House(decoder, tmp_path)
    house.run(question("a", 1, 2, 4))
    poison(house, node_of(house, 2), which)
    house.submit(question("b", 1, 2, 4))
    house.finish()
    assert_refused(house, "b")
    assert house.tokens[RequestId("b")] == []
    assert all_kept_is_finite(house)
    again = question("c", 1, 2, 4)
    assert house.run(again)[0] == oracle.answer(again)
    house.cache.close()
    reopened = House(decoder, tmp_path)
    assert reopened.run(again)[0] == oracle.answer(again)


def test_a_nan_in_a_kept_document_is_not_stored_when_the_cache_closes(
    decoder: Decoder, oracle: Oracle, tmp_path: Path
) -> None:
    house = House(decoder, tmp_path)
    house.run(question("a", 1, 2))
    poison(house, node_of(house, 1))
    house.cache.close()
    assert set(verify_failures(house)) == {("device", Defect.NON_FINITE)}
    reopened, again = House(decoder, tmp_path), question("b", 1, 2)
    assert reopened.run(again)[0] == oracle.answer(again)


def test_a_nan_in_a_kept_document_ends_all_samples_and_no_other_request(decoder: Decoder, oracle: Oracle) -> None:
    house = House(decoder, None)
    house.run(question("a", 1, 2))
    poison(house, node_of(house, 2))
    other = question("other", 3)
    group = [question(name, 1, 2) for name in ("b", "b/1", "b/2")]
    house.submit(other)
    house.submit(*group)
    house.finish()
    assert_refused(house, "b", "b/1", "b/2")
    assert house.tokens[other.request_id] == oracle.answer(other)
    assert house.engine.scheduler.num_running == 0


@pytest.mark.parametrize("selector", ["question", "deviation"])
def test_a_nan_in_a_placed_document_drops_its_source(decoder: Decoder, tmp_path: Path, selector: str) -> None:
    changes: dict[str, Any] = {"mode": "anywhere", "load": "always", "recompute_ratio": 0.3, "token_selector": selector}
    house = House(decoder, tmp_path, blocks=60, **changes)
    house.run(question("a", 1, 2, 3))
    source = node_of(house, 3)
    poison(house, source, layer=1)  # which no probe writes before it reads it
    house.submit(question("b", 3, 2, 1))
    house.finish()
    assert_refused(house, "b")
    assert house.tree.get(source.key) is None and all_kept_is_finite(house)


class NaNAt:
    """Computes NaN for one row of the logits, from a step on."""

    def __init__(self, house: House, row: int, num_rows: int) -> None:
        runner = house.engine.runner
        assert isinstance(runner, TorchRunner)
        self._logits, self._row, self._num_rows = runner.decoder.logits, row, num_rows

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._logits(hidden).clone()
        if len(logits) == self._num_rows:
            logits[self._row, 5] = NAN
        return logits


@pytest.mark.parametrize("is_static", [False, True])
def test_nan_in_one_row_of_a_batch_ends_that_request_only(
    decoder: Decoder, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, is_static: bool
) -> None:
    house = House(decoder, None)
    ones = [question(f"r{n}", n) for n in (1, 2, 3)]
    for one in ones:
        house.submit(one)
    if is_static:
        assert isinstance(house.engine.runner, TorchRunner)
        house.engine.runner.decoding = StaticDecoding(decoder, house.cache.device)
    while not all(house.tokens[one.request_id] for one in ones):
        house.step()
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "logits", staticmethod(NaNAt(house, 1, 4 if is_static else 3)))
        house.step()
    house.finish()
    assert_refused(house, "r2")
    assert [house.tokens[one.request_id] for one in ones[::2]] == [oracle.answer(one) for one in ones[::2]]
    assert house.run(question("again", 2))[0] == oracle.answer(ones[1])


def test_nan_in_one_sample_leaves_the_other_samples_alone(
    decoder: Decoder, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(decoder, None)
    group = [question(name, 1) for name in ("a", "a/1", "a/2")]
    house.submit(*group)
    house.step()
    assert house.engine.scheduler.num_running == 3
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "logits", staticmethod(NaNAt(house, 2, 3)))
        house.step()
    house.finish()
    assert_refused(house, "a/2")
    assert [house.tokens[one.request_id] for one in group[:2]] == [oracle.answer(group[0])] * 2


def test_nan_computed_in_a_piece_of_a_prompt_is_not_kept(decoder: Decoder, oracle: Oracle) -> None:
    house = House(decoder, None)
    one = question("a", 1, 2, 5)
    house.submit(one)
    execute = house.engine.runner.execute

    def broken(batch: Batch) -> StepResult:
        result = execute(batch)
        house.cache.device.k_LSGD[1, int(batch.sequences[0].slots[-1])] = NAN
        assert not batch.sequences[0].samples, "there are no logits to see it in"
        return result

    house.engine.runner.execute = broken  # type: ignore[method-assign]
    house.step()
    house.engine.runner.execute = execute  # type: ignore[method-assign]
    house.finish()
    assert_refused(house, "a")
    assert all_kept_is_finite(house)
    again = question("b", 1, 2, 5)
    assert house.run(again)[0] == oracle.answer(again)
