"""The format: whatever happens to a record's bytes, it is noticed."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NOTES_SIZE, NodeKey, NodeRecord, OwnerTag
from stillroom.kvstore.record import HEADER_SIZE, TRAILER_SIZE, Defect, Header, encode, inspect, is_intact
from tests.kvstore.nodes import MODEL, OTHER_MODEL, key, payload, record

KEYS = st.binary(min_size=32, max_size=32)
COUNTS = st.integers(0, 2**32 - 1)
AMOUNTS = st.floats(min_value=0, allow_nan=False)
RECORDS = st.builds(
    NodeRecord,
    key=KEYS.map(NodeKey),
    parent=KEYS.map(NodeKey),
    first_position=COUNTS,
    num_tokens=COUNTS,
    chunk_id=st.none() | st.integers(0, 2**63 - 1).map(ChunkId),
    avg_cost=AMOUNTS,
    frequency=AMOUNTS,
    content=KEYS,
    owner=st.binary(min_size=8, max_size=8).map(OwnerTag),
    notes=st.binary(max_size=300) | st.just(bytes(NOTES_SIZE)),
)


def file_of(node: NodeRecord, content: bytes, fingerprint: bytes = MODEL) -> bytes:
    header, trailer = encode(node, fingerprint, content)
    return header + content + trailer


def defect_of(data: bytes, node: NodeRecord) -> Defect | None:
    header = inspect(data[:HEADER_SIZE], len(data), node.key, MODEL)
    if isinstance(header, Defect):
        return header
    content, trailer = data[HEADER_SIZE:-TRAILER_SIZE], data[-TRAILER_SIZE:]
    return None if is_intact(data[:HEADER_SIZE], content, trailer) else Defect.CHECKSUM


@given(RECORDS, KEYS, st.binary())
def test_a_record_comes_back_as_it_was_given(node: NodeRecord, fingerprint: bytes, content: bytes) -> None:
    header, trailer = encode(node, fingerprint, content)
    assert (len(header), len(trailer)) == (HEADER_SIZE, TRAILER_SIZE)
    size = HEADER_SIZE + len(content) + TRAILER_SIZE
    assert inspect(header, size, node.key, fingerprint) == Header(node, fingerprint, len(content))
    assert is_intact(header, content, trailer)


def test_the_payload_begins_at_a_page() -> None:
    assert HEADER_SIZE == 4096


def test_every_single_flipped_bit_is_noticed() -> None:
    node = record(1, chunk=5)
    data = file_of(node, payload(1, 100))
    assert defect_of(data, node) is None
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert defect_of(bytes(damaged), node) is not None, bit


def test_every_truncation_is_noticed() -> None:
    node = record(1)
    data = file_of(node, payload(1, 100))
    assert all(defect_of(data[:size], node) is not None for size in range(len(data)))


@given(st.binary(min_size=1))
def test_every_extension_is_noticed(more: bytes) -> None:
    node = record(1)
    assert defect_of(file_of(node, payload(1, 100)) + more, node) is Defect.SIZE


@given(RECORDS, st.binary(min_size=1, max_size=200), st.data())
def test_any_other_bytes_in_any_place_are_noticed(node: NodeRecord, content: bytes, data: st.DataObject) -> None:
    whole = file_of(node, content)
    place = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(st.binary(min_size=1, max_size=40))
    damaged = whole[:place] + other + whole[place + len(other) :]
    assert (defect_of(damaged, node) is None) == (damaged == whole)


def test_the_reason_is_the_first_thing_that_is_wrong() -> None:
    node, content = record(1), payload(1, 100)
    data = file_of(node, content)
    assert defect_of(b"", node) is Defect.MAGIC
    assert defect_of(b"PNG" + data, node) is Defect.MAGIC
    assert defect_of(data[:100], node) is Defect.SIZE
    assert defect_of(data[:8] + b"\x01" + data[9:], node) is Defect.VERSION
    assert defect_of(data[:-1], node) is Defect.SIZE
    assert defect_of(file_of(record(2), content), node) is Defect.IDENTITY
    assert defect_of(file_of(node, content, OTHER_MODEL), node) is Defect.MODEL
    assert defect_of(data[:HEADER_SIZE] + payload(2, 100) + data[-TRAILER_SIZE:], node) is Defect.CHECKSUM


def test_a_header_of_one_node_with_the_payload_of_another_is_noticed() -> None:
    one, two = file_of(record(1), payload(1)), file_of(record(2), payload(2))
    assert defect_of(one[:HEADER_SIZE] + two[HEADER_SIZE:], record(1)) is Defect.CHECKSUM


@pytest.mark.parametrize("wrong", [key(1)[:31], key(1) + b"x"])
def test_keys_have_32_bytes(wrong: bytes) -> None:
    with pytest.raises(AssertionError):
        encode(record(1), wrong, b"")


def test_the_page_about_the_format_has_its_offsets() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "kv-records.md").read_text()
    rows = [(int(offset), int(size)) for offset, size in re.findall(r"^\| (\d+) \| (\d+) \|", page, re.MULTILINE)]
    ends = [offset + size for offset, size in rows]
    assert [0, *ends] == [*(offset for offset, _ in rows), HEADER_SIZE]
