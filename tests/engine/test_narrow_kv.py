"""Answers from prepared KV in 8 and 4 bits, through the real stores."""

from pathlib import Path

import pytest

from stillroom.core.kv import Tier
from stillroom.core.reuse import Reason
from stillroom.models.decoder import Decoder
from tests.engine.engine_fixture import question
from tests.engine.prepared_engine import DOCUMENTS, DocumentOracle, Documents, PreparedFixture


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("bits", [16, 8])
def test_answers_from_every_tier_are_those_of_the_documents_context(
    decoder: Decoder, folder: Path, tmp_path: Path, tier: Tier, bits: int
) -> None:
    """With 8 bits this model's greedy tokens happen to be the same; with 16 they must be."""
    sizes = {"host_tokens": 0} if tier is Tier.DISK else {}
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path, bits=bits, **sizes)
    fixture.prepare(1, 2, 3, 4)
    fixture.prepare(6, 5, 7)
    fixture.tree.make_room(fixture.cache.manager.pool.num_blocks)
    one = question("r", 3, 7, 2)
    tokens, reuse = fixture.run(one)
    assert [(one.reason, one.source) for one in reuse.segments[1:4]] == [(Reason.PREPARED, tier)] * 3
    assert {one.variant.bits for one in reuse.segments if one.variant is not None} == {bits}
    assert tokens == DocumentOracle(folder, fixture.corpus).answer(one)
    assert fixture.cache.tiers is not None and fixture.cache.tiers.stats.flows[tier, Tier.DEVICE].num_copies > 0


def test_files_and_host_memory_are_smaller(decoder: Decoder, tmp_path: Path) -> None:
    sizes = {}
    for bits in (16, 8, 4):
        fixture = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path / str(bits), bits=bits)
        fixture.prepare(1, 2, 3, 4)
        fixture.tree.make_room(fixture.cache.manager.pool.num_blocks)
        tiers = fixture.cache.tiers
        assert tiers is not None and tiers.disk is not None
        assert tiers.host.num_bytes == fixture.tree.num_bytes(Tier.HOST)
        assert tiers.disk.num_bytes <= fixture.tree.num_bytes(Tier.DISK)
        sizes[bits] = tiers.host.num_bytes
    assert sizes[4] < sizes[8] < sizes[16]


def test_a_restart_with_more_bits_prepares_again(decoder: Decoder, tmp_path: Path) -> None:
    first = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path, bits=8)
    first.prepare(1, 2)
    first.cache.close()
    same = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path, bits=4)
    assert not same.prepare(1, 2), "records of 8 bits serve where 4 are asked for"
    same.cache.close()
    more = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path, bits=16)
    assert more.prepare(1, 2) and more.reasons(question("r", 2)) == [Reason.PREPARED]
