"""Attention masses between chunks: measured while a prompt is computed, kept with its KV, and used by selectors."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from stillroom.backends.assembly import kv_shape
from stillroom.config.settings import TokenSelector
from stillroom.core.batch import Batch, StepResult
from stillroom.core.prompt import SegmentedPrompt
from stillroom.kvstore.device import DeviceStore
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_own_decoder
from stillroom.models.packed import PackedInput
from stillroom.ops.attention import AttentionSpan
from stillroom.ops.attention_mass import attention_weights_reference
from tests.devices import TEST_DEVICE
from tests.engine.engine_fixture import BLOCK, EngineFixture, Oracle, anywhere_fixture, question
from tests.fakes import random_checkpoint


@pytest.fixture(scope="module")
def long_decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("checkpoint")
    random_checkpoint(path, "Llama", num_hidden_layers=2, max_position_embeddings=2048)
    return load_own_decoder(path, device=TEST_DEVICE, dtype="float32")


def slow_masses(decoder: Decoder, token_ids: tuple[int, ...], slots: torch.Tensor) -> torch.Tensor:
    """Return attention [tokens, tokens] of a whole prompt, mean over heads and layers, from explicit weights."""
    total = torch.zeros(len(token_ids), len(token_ids), dtype=torch.float64)

    class WholeMatrix:
        def observe(self, q_THD: torch.Tensor, k_SGD: torch.Tensor, scale: float, *limits: object) -> None:
            weights_HQK = attention_weights_reference(q_THD, k_SGD[slots], scale)
            total.add_(weights_HQK.mean(0).cpu() / decoder.spec.num_layers)

    store = DeviceStore(kv_shape(decoder), 20, BLOCK, torch.device(TEST_DEVICE))
    numbers, slots = torch.arange(len(token_ids), device=TEST_DEVICE), slots.to(TEST_DEVICE)
    span = AttentionSpan(0, len(token_ids), slots, len(token_ids))
    packed = PackedInput(torch.tensor(token_ids, device=TEST_DEVICE), numbers, slots, [span], [len(token_ids) - 1])
    decoder.hidden_states(packed, store.layer, WholeMatrix())
    return total


def test_attention_mass_between_chunks_is_measured_when_they_are_computed(decoder: Decoder) -> None:
    """In pieces of 33 tokens, in steps with another prompt; Equations 3, 4 and 14 from whole attention matrices."""
    fixture = anywhere_fixture(decoder, selector="context")
    one = question("a", 1, 2, 3, 4)
    fixture.submit(question("other", 7, 8))
    fixture.submit(one)
    fixture.finish()
    ids = one.prompt.token_ids
    paid_TT = slow_masses(decoder, ids, torch.randperm(100, generator=torch.Generator().manual_seed(0))[: len(ids)])
    start = 5
    starts = [5]
    for document, length in ((1, 8), (2, 13), (3, 18), (4, 6)):
        (node,) = [node for node in fixture.tree if node.chunk_id == document]
        mass = node.mass
        assert (node.first_position, node.num_tokens) == (start, length) and mass is not None
        own_TT = paid_TT[start : start + length]
        assert mass.token_inter is not None and mass.received is not None
        close(mass.token_inter, own_TT[:, 5:start].sum(1))
        assert mass.intra == pytest.approx(float(own_TT[:, start : start + length].tril(-1).sum()), rel=1e-3)
        assert mass.prefix_lengths == tuple(end - first for first, end in pairwise(starts))
        inter = [own_TT[:, first:end].sum() for first, end in pairwise(starts)]
        close(mass.inter, torch.tensor(inter, dtype=torch.float64))
        start += length
        starts.append(start)


def close(found: NDArray[np.float32], wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(found), wanted.float(), rtol=1e-3, atol=1e-5)


def test_sampled_attention_mass_is_accurate_and_survives_a_restart(decoder: Decoder, tmp_path: Path) -> None:
    fixture = anywhere_fixture(decoder, tmp_path)
    fixture.run(question("a", 1, 2, 3))
    masses = {node.key: node.mass for node in fixture.tree}
    for node in fixture.tree:
        if node.chunk_id is None:
            assert node.mass is None
            continue
        assert node.mass is not None and node.mass.token_inter is None
        assert len(node.mass.prefix) == node.chunk_id - 1 and node.mass.intra > 0
        assert all(node.mass.inter > 0) and 0.5 <= node.mass.impact < 1
    fixture.cache.close()
    again = anywhere_fixture(decoder, tmp_path)
    for node in again.tree:
        before = masses[node.key]
        assert (node.mass is None) == (before is None)
        assert node.mass is None or before is None or node.mass.impact == pytest.approx(before.impact)


LONG = tuple(10 + i * i % 280 for i in range(1000))


def chosen_again(fixture: EngineFixture, *documents: int) -> list[int]:
    """Ask about the documents (0: one of 1,000 tokens); returns the positions that were computed.

    Precondition: the pool has blocks for all of them.
    """
    one = question("-".join(map(str, documents)), *documents)
    segments = tuple(
        replace(segment, token_ids=LONG) if segment.chunk_id == 0 else segment for segment in one.prompt.segments
    )
    positions: list[int] = []
    execute = fixture.engine.runner.execute

    def observed(batch: Batch) -> StepResult:
        for scheduled in batch.sequences:
            if scheduled.positions is not None and not scheduled.is_query_pass:
                positions.extend(scheduled.positions.tolist())
        return execute(batch)

    fixture.engine.runner.execute = observed  # type: ignore[method-assign]
    _, reuse = fixture.run(replace(one, prompt=SegmentedPrompt(segments)))
    fixture.engine.runner.execute = execute  # type: ignore[method-assign]
    assert reuse.has_placed is (documents[0] == 0)
    return positions


def test_selected_tokens_of_a_long_document_are_the_same_after_a_restart(long_decoder: Decoder, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"blocks": 400, "host_tokens": 3000, "disk_records": 300}
    settings: dict[str, Any] = {"mode": "anywhere", "load": "always", "token_selector": "context"}
    stays = EngineFixture(long_decoder, None, **sizes, **settings)
    chosen_again(stays, 1, 0)
    wanted = chosen_again(stays, 0, 1)
    closes = EngineFixture(long_decoder, tmp_path, **sizes, **settings)
    chosen_again(closes, 1, 0)
    closes.cache.close()
    assert chosen_again(EngineFixture(long_decoder, tmp_path, **sizes, **settings), 0, 1) == wanted
    assert not set(range(5, 5 + 150)) <= set(wanted), "more than the first tokens"


@pytest.mark.parametrize("selector", ["context", "received"])
def test_copy_without_attention_mass_is_recomputed_if_the_selector_needs_it(
    decoder: Decoder, oracle: Oracle, tmp_path: Path, selector: TokenSelector
) -> None:
    sampled = anywhere_fixture(decoder, tmp_path, selector="question")
    sampled.run(question("a", 1, 2, 3))
    sampled.cache.close()
    fixture = anywhere_fixture(decoder, tmp_path, selector=selector)
    tokens, reuse = fixture.run(question("b", 3, 2, 1))
    assert not reuse.has_placed and tokens == oracle.answer(question("b", 3, 2, 1))
    _, reuse = fixture.run(question("c", 2, 1, 3))
    assert reuse.has_placed, "from the copies with attention mass"


def test_no_attention_mass_is_measured_without_placing(decoder: Decoder) -> None:
    fixture = EngineFixture(decoder, None, mode="exact")
    fixture.run(question("a", 1, 2))
    assert all(node.mass is None for node in fixture.tree)
