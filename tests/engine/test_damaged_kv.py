"""Damaged KV is dropped: it is never used and never stored."""

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
from stillroom.runner.decode_graphs import DecodeGraphs, StaticDecoding
from stillroom.runner.torch_runner import TorchRunner
from stillroom.telemetry import catalogue
from tests.engine.engine_fixture import BLOCK, EngineFixture, Oracle, question

# Host memory


def flip_host_copies(fixture: EngineFixture) -> None:
    """Flip a high bit in every copy on the host."""
    assert fixture.cache.tiers is not None
    host = fixture.cache.tiers.host
    for node in fixture.tree:
        copy = host.get(node.key)
        if copy is not None:
            copy.payload.view(torch.int32)[7] ^= 1 << 28


def on_host_only(decoder: Decoder, folder: Path | None) -> EngineFixture:
    """Return a fixture whose kept documents are on the host and not on the device."""
    fixture = EngineFixture(decoder, folder, host_tokens=400, disk_records=40)
    fixture.run(question("a", 1, 2))
    fixture.tree.make_room(fixture.cache.manager.pool.num_blocks)
    assert fixture.tree.num_nodes(Tier.HOST) > 2 and fixture.tree.num_nodes(Tier.DEVICE) == 0
    return fixture


def verify_failures(fixture: EngineFixture) -> dict[tuple[str, str], int]:
    failures = fixture.cache.readings()[catalogue.KV_VERIFY_FAILURES]
    assert isinstance(failures, dict)
    return {labels: count for labels, count in failures.items() if count}


def test_flipped_bits_in_host_memory_are_recomputed(decoder: Decoder, oracle: Oracle) -> None:
    fixture = on_host_only(decoder, None)
    flip_host_copies(fixture)
    one = question("b", 1, 2)
    tokens, reuse = fixture.run(one)
    assert tokens == oracle.answer(one) and reuse.num_cached_tokens == 0
    assert verify_failures(fixture) == {("host", Defect.CHECKSUM): 1}, "its descendants are dropped with it"


def test_flipped_bits_in_host_memory_are_never_stored(decoder: Decoder, oracle: Oracle, tmp_path: Path) -> None:
    fixture = on_host_only(decoder, tmp_path)
    flip_host_copies(fixture)
    fixture.cache.close()
    assert not list(tmp_path.rglob("*.kv"))
    again = EngineFixture(decoder, tmp_path, host_tokens=400, disk_records=40)
    one = question("b", 1, 2)
    tokens, reuse = again.run(one)
    assert tokens == oracle.answer(one) and reuse.num_cached_tokens == 0


def test_undamaged_copies_are_stored_and_used(decoder: Decoder, oracle: Oracle, tmp_path: Path) -> None:
    fixture = on_host_only(decoder, tmp_path)
    fixture.cache.close()
    again = EngineFixture(decoder, tmp_path, host_tokens=400, disk_records=40)
    one = question("b", 1, 2)
    tokens, reuse = again.run(one)
    assert tokens == oracle.answer(one) and reuse.num_cached_tokens > 0
    assert not verify_failures(again)


# NaN on the device

NAN = float("nan")


def poison(fixture: EngineFixture, node: Node, which: str = "v_LSGD", layer: int = 0) -> None:
    """Write one NaN into a kept node's KV on the device."""
    assert node.block_ids is not None
    slot = node.block_ids[0] * BLOCK + 1
    getattr(fixture.cache.device, which)[layer, slot, 0, 2] = NAN


def node_of(fixture: EngineFixture, document: int) -> Node:
    return next(node for node in fixture.tree if node.chunk_id == document)


def assert_refused(fixture: EngineFixture, *names: str) -> None:
    for name in names:
        event = fixture.last[RequestId(name)]
        assert isinstance(event.error, NonFiniteError) and event.finish_reason is FinishReason.ABORTED, name
        assert event.token_id is None


def all_kept_is_finite(fixture: EngineFixture) -> bool:
    device = fixture.cache.device
    return all(device.is_finite(node.block_ids, node.num_tokens) for node in fixture.tree if node.block_ids is not None)


@pytest.mark.parametrize("which", ["k_LSGD", "v_LSGD"])
def test_nan_in_a_kept_document_ends_its_request_and_is_never_used_again(
    decoder: Decoder, oracle: Oracle, tmp_path: Path, which: str
) -> None:
    fixture = EngineFixture(decoder, tmp_path)
    fixture.run(question("a", 1, 2, 4))
    poison(fixture, node_of(fixture, 2), which)
    fixture.submit(question("b", 1, 2, 4))
    fixture.finish()
    assert_refused(fixture, "b")
    assert fixture.tokens[RequestId("b")] == []
    assert all_kept_is_finite(fixture)
    again = question("c", 1, 2, 4)
    assert fixture.run(again)[0] == oracle.answer(again)
    fixture.cache.close()
    reopened = EngineFixture(decoder, tmp_path)
    assert reopened.run(again)[0] == oracle.answer(again)


def test_nan_in_a_kept_document_is_not_stored_when_the_cache_closes(
    decoder: Decoder, oracle: Oracle, tmp_path: Path
) -> None:
    fixture = EngineFixture(decoder, tmp_path)
    fixture.run(question("a", 1, 2))
    poison(fixture, node_of(fixture, 1))
    fixture.cache.close()
    assert set(verify_failures(fixture)) == {("device", Defect.NON_FINITE)}
    reopened, again = EngineFixture(decoder, tmp_path), question("b", 1, 2)
    assert reopened.run(again)[0] == oracle.answer(again)


def test_nan_in_a_kept_document_ends_all_samples_and_no_other_request(decoder: Decoder, oracle: Oracle) -> None:
    fixture = EngineFixture(decoder, None)
    fixture.run(question("a", 1, 2))
    poison(fixture, node_of(fixture, 2))
    other = question("other", 3)
    group = [question(name, 1, 2) for name in ("b", "b/1", "b/2")]
    fixture.submit(other)
    fixture.submit(*group)
    fixture.finish()
    assert_refused(fixture, "b", "b/1", "b/2")
    assert fixture.tokens[other.request_id] == oracle.answer(other)
    assert fixture.engine.scheduler.num_running == 0


@pytest.mark.parametrize("selector", ["question", "deviation"])
def test_nan_in_a_placed_document_drops_its_source(decoder: Decoder, tmp_path: Path, selector: str) -> None:
    changes: dict[str, Any] = {"mode": "anywhere", "load": "always", "recompute_ratio": 0.3, "token_selector": selector}
    fixture = EngineFixture(decoder, tmp_path, blocks=60, **changes)
    fixture.run(question("a", 1, 2, 3))
    source = node_of(fixture, 3)
    poison(fixture, source, layer=1)  # a deviation pass reads it before writing
    fixture.submit(question("b", 3, 2, 1))
    fixture.finish()
    assert_refused(fixture, "b")
    assert fixture.tree.get(source.key) is None and all_kept_is_finite(fixture)


class NaNAt:
    """Computes NaN for one row of the logits, from one step on."""

    def __init__(self, fixture: EngineFixture, row: int, num_rows: int) -> None:
        runner = fixture.engine.runner
        assert isinstance(runner, TorchRunner)
        if isinstance(runner.decoding, DecodeGraphs):
            runner.decoding = None  # a recorded graph computes its own logits
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
    fixture = EngineFixture(decoder, None)
    ones = [question(f"r{n}", n) for n in (1, 2, 3)]
    for one in ones:
        fixture.submit(one)
    if is_static:
        assert isinstance(fixture.engine.runner, TorchRunner)
        fixture.engine.runner.decoding = StaticDecoding(decoder, fixture.cache.device)
    while not all(fixture.tokens[one.request_id] for one in ones):
        fixture.step()
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "logits", staticmethod(NaNAt(fixture, 1, 4 if is_static else 3)))
        fixture.step()
    fixture.finish()
    assert_refused(fixture, "r2")
    assert [fixture.tokens[one.request_id] for one in ones[::2]] == [oracle.answer(one) for one in ones[::2]]
    assert fixture.run(question("again", 2))[0] == oracle.answer(ones[1])


def test_nan_in_one_sample_leaves_the_other_samples_alone(
    decoder: Decoder, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = EngineFixture(decoder, None)
    group = [question(name, 1) for name in ("a", "a/1", "a/2")]
    fixture.submit(*group)
    fixture.step()
    assert fixture.engine.scheduler.num_running == 3
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "logits", staticmethod(NaNAt(fixture, 2, 3)))
        fixture.step()
    fixture.finish()
    assert_refused(fixture, "a/2")
    assert [fixture.tokens[one.request_id] for one in group[:2]] == [oracle.answer(group[0])] * 2


def test_nan_computed_in_a_piece_of_a_prompt_is_not_kept(decoder: Decoder, oracle: Oracle) -> None:
    fixture = EngineFixture(decoder, None)
    one = question("a", 1, 2, 5)
    fixture.submit(one)
    execute = fixture.engine.runner.execute

    def broken(batch: Batch) -> StepResult:
        result = execute(batch)
        fixture.cache.device.k_LSGD[1, int(batch.sequences[0].slots[-1])] = NAN
        assert not batch.sequences[0].samples, "a piece of a prompt has no logits"
        return result

    fixture.engine.runner.execute = broken  # type: ignore[method-assign]
    fixture.step()
    fixture.engine.runner.execute = execute  # type: ignore[method-assign]
    fixture.finish()
    assert_refused(fixture, "a")
    assert all_kept_is_finite(fixture)
    again = question("b", 1, 2, 5)
    assert fixture.run(again)[0] == oracle.answer(again)
