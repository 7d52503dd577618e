"""Operations on the records of all models without a model, also while a process uses them."""

from dataclasses import replace
from pathlib import Path

from stillroom.core.ids import ChunkId
from stillroom.kvstore.disk import DiskStore
from stillroom.kvstore.files import FolderUsage, clear_all, fingerprints, forget_chunks, path_of, usage
from tests.kvstore.nodes import MODEL, OTHER_MODEL, key, record, sealed


def stored(store: DiskStore) -> list[int]:
    buffer = memoryview(bytearray(1000))
    return [n for n in range(10) if store.read(key(n), buffer)]


def test_forget_chunks_removes_records_of_removed_chunks_and_their_descendants(tmp_path: Path) -> None:
    store, other = DiskStore(tmp_path, MODEL), DiskStore(tmp_path, OTHER_MODEL)
    prompts = [
        record(1, first_position=0),  # the system prompt
        record(2, parent=1, first_position=8, chunk=20),
        record(3, parent=2, first_position=17, chunk=30),
        record(4, parent=3, first_position=27),  # a question after both
        record(5, parent=1, first_position=8, chunk=30),
        record(6, parent=5, first_position=20, chunk=20),
        record(7, parent=5, first_position=20, chunk=40),
    ]
    assert all(store.write(node, *sealed(1)) and other.write(node, *sealed(1)) for node in reversed(prompts))
    assert forget_chunks(tmp_path, lambda chunk: chunk != ChunkId(20)) == 8
    assert stored(store) == stored(other) == [1, 5, 7]
    assert not store.verify_failures, "to a process that uses them they are misses"
    assert forget_chunks(tmp_path, lambda chunk: True) == 0


def test_a_record_is_removed_with_any_chunk_that_its_kv_has_seen(tmp_path: Path) -> None:
    """It may be detached, or its parent's record may be missing."""
    store = DiskStore(tmp_path, MODEL)
    alone = replace(record(1, parent=1, first_position=8, chunk=30), seen=(ChunkId(20), ChunkId(30)))
    orphan = replace(record(2, parent=9, first_position=8, chunk=40), seen=(ChunkId(20), ChunkId(40)))
    other = replace(record(3, parent=3, first_position=8, chunk=30), seen=(ChunkId(30), ChunkId(40)))
    assert all(store.write(one, *sealed(1)) for one in (alone, orphan, other))
    assert forget_chunks(tmp_path, lambda chunk: chunk != ChunkId(20)) == 2
    assert stored(store) == [3]


def test_a_record_that_does_not_say_what_it_has_seen_is_removed(tmp_path: Path) -> None:
    """It is damaged or of another version: it is not used, and its provenance is unknown."""
    store = DiskStore(tmp_path, MODEL)
    assert all(store.write(record(n, first_position=0), *sealed(1)) for n in (1, 2))
    path = path_of(store.folder, key(1))
    content = bytearray(path.read_bytes())
    content[8] ^= 1
    path.write_bytes(content)
    assert forget_chunks(tmp_path, lambda chunk: True) == 1
    assert stored(store) == [2]


def test_usage_counts_every_model_and_clear_all_removes_it(tmp_path: Path) -> None:
    assert usage(tmp_path / "nothing") == [] and clear_all(tmp_path / "nothing") == (0, [])
    store, other = DiskStore(tmp_path, MODEL), DiskStore(tmp_path, OTHER_MODEL)
    assert all(store.write(record(n), *sealed(n)) for n in range(3)) and other.write(record(1), *sealed(1, 10))
    (tmp_path / "mine").write_text("untouched")
    assert fingerprints(tmp_path) == [OTHER_MODEL, MODEL]
    assert usage(tmp_path) == [FolderUsage(OTHER_MODEL, 1, other.num_bytes), FolderUsage(MODEL, 3, store.num_bytes)]
    assert clear_all(tmp_path) == (4, [])
    assert stored(store) == [] and [entry.num_records for entry in usage(tmp_path)] == [0, 0]
    assert store.write(record(1), *sealed(1)) and stored(store) == [1]
    assert (tmp_path / "mine").exists()
