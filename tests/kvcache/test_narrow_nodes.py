"""Prepared KV in 8 and 4 bits: what it counts as, and when it is used."""

import pytest

from stillroom.core.kv import FULL_BITS, Tier
from stillroom.errors import PreparedFullError
from tests.kvcache.prepared_fixture import LENGTH_OF_QUESTION, SIZE, PreparedFixture

PER_TOKEN = 16


def narrow(bits: int = 8, **options: int) -> PreparedFixture:
    sizes = {"host_bytes": 10**6, "disk_bytes": 10**6, "unused_host_bytes": 10**6, "unused_disk_bytes": 10**6}
    return PreparedFixture(options=sizes | {"bytes_per_token": PER_TOKEN, "prepared_bits": bits} | options)


@pytest.mark.parametrize("bits", [8, 4])
def test_only_copies_in_their_documents_context_are_narrow(bits: int) -> None:
    fixture = narrow(bits)
    fixture.prepare((1, 2, 3))
    fixture.ask((9, 8))
    fixture.tree.flush()
    fixture.tree.make_room(fixture.num_blocks)
    fixture.check()
    narrow_bytes, full_bytes = 3 * SIZE * PER_TOKEN * bits // 16, 3 * SIZE * PER_TOKEN  # of the exact: system, 9, 8
    for tier in (Tier.HOST, Tier.DISK):
        assert fixture.tree.num_bytes(tier) == narrow_bytes + full_bytes
    assert {record.bits for record in fixture.memory.records.values() if record.is_in_document} == {bits}
    assert {record.bits for record in fixture.memory.records.values() if not record.is_in_document} == {FULL_BITS}


def test_the_budget_of_prepared_kv_counts_narrow_bytes() -> None:
    fixture = narrow(unused_disk_bytes=3 * SIZE * PER_TOKEN // 2)
    lease = fixture.preparing((1, 2, 3))
    assert fixture.manager.has_to_prepare(lease)
    fixture.prepare((1, 2, 3))
    fixture.tree.flush()
    assert fixture.tree.unused_room() == 0
    with pytest.raises(PreparedFullError):
        fixture.manager.has_to_prepare(fixture.preparing((4,)))


def test_nothing_is_computed_behind_a_narrow_copy() -> None:
    """It would inherit the copy's error. On the device the copy is as it was computed."""
    fixture = narrow()
    fixture.prepare((1, 2, 3), num_tokens=3 * SIZE)  # system, 1, 2
    assert fixture.prepare((1, 2, 3, 4), 3, num_tokens=4 * SIZE) == SIZE, "from the device"
    fixture.tree.make_room(fixture.num_blocks)
    assert fixture.prepare((1, 2, 3, 4)) == 4 * SIZE + LENGTH_OF_QUESTION
    fixture.check()


@pytest.mark.parametrize(("before", "after", "is_used"), [(8, 16, False), (4, 8, False), (16, 8, True), (8, 8, True)])
def test_records_with_fewer_bits_than_the_setting_are_given_back(before: int, after: int, is_used: bool) -> None:
    fixture = narrow(before)
    fixture.prepare((1, 2))
    fixture.tree.flush()
    size = fixture.tree.num_bytes(Tier.DISK)
    fixture.options["prepared_bits"] = after
    fixture.open()
    orphans = fixture.tree.restore(fixture.memory.records.values())
    fixture.check()
    prepared = {key for key, record in fixture.memory.records.items() if record.is_in_document}
    assert set(orphans) == (set() if is_used else prepared)
    assert fixture.copies() == ([(1,), (1, 2)] if is_used else [])
    assert fixture.tree.num_bytes(Tier.DISK) == size if is_used else fixture.tree.num_bytes(Tier.DISK) < size
