"""Record format: every change of a record's bytes is noticed."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NodeKey, NodeRecord, OwnerTag
from stillroom.kvstore.record import (
    MAX_HEADER_SIZE,
    PAGE_SIZE,
    Defect,
    Header,
    checksum_of,
    encode,
    header_size,
    header_size_of,
    inspect,
    is_intact,
)
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
    notes=st.binary(max_size=300) | st.integers(3700, 9000).map(lambda size: b"n" * size),
    seen=st.sets(st.integers(0, 2**63 - 1).map(ChunkId), max_size=20).map(lambda ids: tuple(sorted(ids))),
)


def file_of(node: NodeRecord, content: bytes, fingerprint: bytes = MODEL) -> bytes:
    return encode(node, fingerprint, len(content), checksum_of(content)) + content


def defect_of(data: bytes, node: NodeRecord) -> Defect | None:
    size = header_size(data[:PAGE_SIZE])
    if isinstance(size, Defect):
        return size
    header = inspect(data[:size], len(data), node.key, MODEL)
    if isinstance(header, Defect):
        return header
    return None if is_intact(data[size:], header.checksum) else Defect.CHECKSUM


@given(RECORDS, KEYS, st.binary())
def test_a_record_survives_a_round_trip(node: NodeRecord, fingerprint: bytes, content: bytes) -> None:
    data = file_of(node, content, fingerprint)
    size = header_size(data[:PAGE_SIZE])
    assert size == header_size_of(node) and data[size:] == content
    header = inspect(data[:size], len(data), node.key, fingerprint)
    assert header == Header(node, fingerprint, len(content), checksum_of(content))
    assert header.file_size == len(data) and is_intact(content, header.checksum)


@pytest.mark.parametrize(("num_notes", "num_pages"), [(0, 1), (3800, 1), (4096, 2), (100_000, 25)])
def test_the_payload_is_page_aligned(num_notes: int, num_pages: int) -> None:
    node = replace(record(1), notes=bytes(num_notes))
    assert header_size_of(node) == num_pages * PAGE_SIZE == file_of(node, b"KV").index(b"KV", PAGE_SIZE)


def test_the_checksum_of_the_payload_is_stored_unchanged() -> None:
    content, damaged = payload(1), payload(2)
    data = encode(record(1), MODEL, len(damaged), checksum_of(content)) + damaged
    assert defect_of(data, record(1)) is Defect.CHECKSUM


@pytest.mark.parametrize("size", [0, 1, PAGE_SIZE + 1, MAX_HEADER_SIZE + PAGE_SIZE, 2**32 - PAGE_SIZE])
def test_a_header_of_impossible_size_is_refused_before_it_is_read(size: int) -> None:
    data = file_of(record(1), b"")
    assert header_size(data[:12] + size.to_bytes(4, "little") + data[16:]) is Defect.CHECKSUM


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
def test_any_changed_bytes_are_noticed(node: NodeRecord, content: bytes, data: st.DataObject) -> None:
    whole = file_of(node, content)
    place = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(st.binary(min_size=1, max_size=40))
    damaged = whole[:place] + other + whole[place + len(other) :]
    assert (defect_of(damaged, node) is None) == (damaged == whole)


def test_the_defect_is_the_first_that_is_found() -> None:
    node, content = record(1), payload(1, 100)
    data = file_of(node, content)
    assert defect_of(b"", node) is Defect.MAGIC
    assert defect_of(b"PNG" + data, node) is Defect.MAGIC
    assert defect_of(data[:100], node) is Defect.SIZE
    assert defect_of(data[:8] + b"\x01" + data[9:], node) is Defect.VERSION
    assert defect_of(data[:-1], node) is Defect.SIZE
    assert defect_of(file_of(record(2), content), node) is Defect.IDENTITY
    assert defect_of(file_of(node, content, OTHER_MODEL), node) is Defect.MODEL
    assert defect_of(data[:8] + b"\x05" + data[9:], node) is Defect.VERSION, "the previous version"
    assert defect_of(data[:PAGE_SIZE] + payload(2, 100), node) is Defect.CHECKSUM


def test_a_header_of_one_node_with_the_payload_of_another_is_noticed() -> None:
    one, two = file_of(record(1), payload(1)), file_of(record(2), payload(2))
    assert defect_of(one[:PAGE_SIZE] + two[PAGE_SIZE:], record(1)) is Defect.CHECKSUM


@pytest.mark.parametrize("wrong", [key(1)[:31], key(1) + b"x"])
def test_keys_have_32_bytes(wrong: bytes) -> None:
    with pytest.raises(AssertionError):
        encode(record(1), wrong, 0, bytes(16))


def test_the_docs_page_lists_the_offsets_of_the_format() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "kv-records.md").read_text()
    rows = [(int(offset), int(size)) for offset, size in re.findall(r"^\| (\d+) \| (\d+) \|", page, re.MULTILINE)]
    ends = [offset + size for offset, size in rows]
    assert [0, *ends] == [*(offset for offset, _ in rows), 219]
    size = header_size_of(replace(record(1), notes=bytes(PAGE_SIZE - 16 - 219)))
    assert size == PAGE_SIZE < header_size_of(replace(record(1), notes=bytes(PAGE_SIZE - 16 - 218)))
