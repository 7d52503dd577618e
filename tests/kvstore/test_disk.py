"""Records in files: they survive a restart, and every defect is a counted miss."""

import errno
import logging
import os
import resource
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NodeKey, NodeRecord
from stillroom.kvstore import disk
from stillroom.kvstore.disk import DiskStore, open_disk, shrink_other_models
from stillroom.kvstore.files import folder_of, path_of, remove_file, size_on_disk
from stillroom.kvstore.record import PAGE_SIZE, VERSION, Defect, header_size_of
from tests.kvstore.nodes import MODEL, OTHER_MODEL, key, payload, record, sealed

OVERHEAD = PAGE_SIZE
"""A header without notes."""


def read(store: DiskStore, node: NodeKey, size: int = 1000) -> bytes | None:
    buffer = bytearray(size)
    return bytes(buffer) if store.read(node, memoryview(buffer)) else None


def files_in(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.name != "writer.lock"]


def filled(root: Path, count: int = 3) -> DiskStore:
    store = DiskStore(root, MODEL)
    assert all(store.write(record(n, chunk=n), *sealed(n)) for n in range(count))
    return store


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_records_survive_a_restart(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert store.num_bytes == 3 * (1000 + OVERHEAD)
    store.close()
    again = DiskStore(tmp_path, MODEL)
    assert sorted(again.records(), key=lambda entry: entry[0].num_tokens) == [
        (record(n, chunk=n), 1000 + OVERHEAD) for n in range(3)
    ]
    assert again.num_bytes == store.num_bytes == sum(path.stat().st_size for path in files_in(tmp_path))
    assert [read(again, key(n)) for n in range(3)] == [payload(n) for n in range(3)]
    assert not again.verify_failures


def test_writing_a_node_again_replaces_it(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert store.write(record(1, parent=2), *sealed(9, 500))
    assert store.num_bytes == 2500 + 3 * OVERHEAD
    assert read(store, key(1), 500) == payload(9, 500)


def prepared(n: int) -> NodeRecord:
    return replace(record(n, chunk=n), is_used=False)


def used(store: DiskStore) -> set[int]:
    return {found.num_tokens - 7 for found, _ in store.records() if found.is_used}


def test_record_that_was_used_later_is_used_after_a_restart_also_after_a_kill(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, MODEL)
    assert all(store.write(prepared(n), *sealed(n)) for n in range(4))
    before = {path: path.read_bytes() for path in files_in(tmp_path)}
    for n in (1, 3, 3, 9):
        store.mark_used(key(n))
    assert used(store) == {1, 3} and all(path.read_bytes() == content for path, content in before.items())
    assert used(DiskStore(tmp_path, MODEL)) == {1, 3}, "as another process reads it"
    store.close()
    assert used(DiskStore(tmp_path, MODEL)) == {1, 3}


def test_record_that_was_removed_and_prepared_again_is_unused(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, MODEL)
    assert all(store.write(prepared(n), *sealed(n)) for n in (1, 2))
    for n in (1, 2):
        store.mark_used(key(n))
        store.remove(key(n))
        assert store.write(prepared(n), *sealed(n))
    store.mark_used(key(2))
    store.close()
    assert used(DiskStore(tmp_path, MODEL)) == {2}


def test_torn_list_of_used_records_loses_its_last_key_only(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, MODEL)
    assert all(store.write(prepared(n), *sealed(n)) for n in range(4))
    for n in (0, 2):
        store.mark_used(key(n))
    store.close()
    path = store.folder / "used.keys"
    path.write_bytes(path.read_bytes()[:-5])
    again = DiskStore(tmp_path, MODEL)
    assert used(again) == {0}
    again.mark_used(key(3))
    again.close()
    assert used(DiskStore(tmp_path, MODEL)) == {0, 3}


def test_process_that_only_reads_marks_no_record(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, MODEL)
    assert store.write(prepared(1), *sealed(1))
    DiskStore(tmp_path, MODEL).mark_used(key(1))
    store.close()
    assert used(DiskStore(tmp_path, MODEL)) == set()


def test_removed_records_are_gone(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.remove(key(0))
    store.remove(key(77))
    assert read(store, key(0)) is None and read(store, key(1)) == payload(1)
    for n in (1, 2):
        store.remove(key(n))
    assert store.num_bytes == 0 and not store.records() and not files_in(tmp_path)
    assert not store.verify_failures


@pytest.mark.parametrize(
    ("place", "reason"),
    [(0, Defect.MAGIC), (8, Defect.VERSION), (20, Defect.CHECKSUM), (PAGE_SIZE + 999, Defect.CHECKSUM)],
)
def test_a_flipped_bit_is_a_miss_counted_logged_and_removed(
    tmp_path: Path, place: int, reason: Defect, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(tmp_path)
    flip(path_of(store.folder, key(1)), place)
    assert read(store, key(1)) is None
    assert store.verify_failures == {reason: 1}
    assert reason.value in caplog.text
    assert len(files_in(tmp_path)) == len(store.records()) == 2
    assert store.num_bytes == 2 * (1000 + OVERHEAD)
    assert read(store, key(1)) is None  # now it is missing
    assert store.verify_failures == {reason: 1}


def test_a_record_at_the_path_of_another_node_or_model_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path)
    path_of(store.folder, key(1)).write_bytes(path_of(store.folder, key(0)).read_bytes())
    other = DiskStore(tmp_path, OTHER_MODEL)
    assert other.is_writer and not other.records()
    assert other.write(record(2), *sealed(2))
    path_of(store.folder, key(2)).write_bytes(path_of(other.folder, key(2)).read_bytes())
    assert read(store, key(1)) is None and read(store, key(2)) is None
    assert store.verify_failures == {Defect.IDENTITY: 1, Defect.MODEL: 1}
    assert read(other, key(2)) == payload(2)


def test_a_record_of_another_size_than_asked_for_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert read(store, key(0), 999) is None and read(store, key(1), 1001) is None
    assert store.verify_failures == {Defect.SIZE: 2}


def test_records_of_the_version_before_are_misses_and_removed(tmp_path: Path) -> None:
    filled(tmp_path).close()
    old = path_of(folder_of(tmp_path, MODEL), key(1))
    data = bytearray(old.read_bytes())
    data[8] = VERSION - 1
    old.write_bytes(data)
    store = DiskStore(tmp_path, MODEL)
    assert store.verify_failures == {Defect.VERSION: 1} and read(store, key(1)) is None
    assert not old.exists() and len(store.records()) == 2


def test_a_record_with_a_long_header_survives_a_restart(tmp_path: Path) -> None:
    long = replace(record(1), notes=payload(3, 100_000), seen=tuple(map(ChunkId, range(0, 5000, 5))))
    store = DiskStore(tmp_path, MODEL)
    assert store.write(long, *sealed(1))
    store.close()
    again = DiskStore(tmp_path, MODEL)
    assert again.records() == [(long, path_of(again.folder, key(1)).stat().st_size)]
    assert read(again, key(1)) == payload(1) and again.verify().num_records == 1
    assert next(iter(again.records()))[1] == header_size_of(long) + 1000


def test_a_removed_file_is_a_miss(tmp_path: Path) -> None:
    store = filled(tmp_path)
    path_of(store.folder, key(1)).unlink()
    assert read(store, key(1)) is None
    assert not store.verify_failures and store.num_bytes == 2 * (1000 + OVERHEAD)


def test_a_temporarily_unopenable_record_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    store = filled(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert read(store, key(1)) is None and read(store, key(1)) is None
    assert store.has(key(1)) and not store.verify_failures and caplog.text.count("Too many open files") == 1
    assert read(store, key(1)) == payload(1)


def test_a_disk_that_fails_to_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    store = filled(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", fail)
        assert read(store, key(1)) is None
    assert store.verify_failures == {Defect.UNREADABLE: 1}
    assert read(store, key(0)) == payload(0)


def test_opening_skips_bad_records_removes_temporaries_and_ignores_other_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path, 6).close()
    paths = [path_of(folder_of(tmp_path, MODEL), key(n)) for n in range(6)]
    flip(paths[0], 0)
    flip(paths[1], 100)
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    paths[3].write_bytes(b"")
    paths[4].with_suffix(".tmp").write_bytes(b"half a rec")
    foreign = [tmp_path / "notes.txt", paths[0].parent / "readme", folder_of(tmp_path, MODEL) / "x.kv"]
    for path in foreign:
        path.write_text("mine")
    store = DiskStore(tmp_path, MODEL)
    assert {entry[0].key for entry in store.records()} == {key(4), key(5)}
    assert store.verify_failures == {Defect.MAGIC: 2, Defect.CHECKSUM: 1, Defect.SIZE: 1}
    assert set(files_in(tmp_path)) == {paths[4], paths[5], *foreign}
    assert len(caplog.records) == 1 and "4 stored KV records" in caplog.text


def test_verify_reads_everything_and_names_what_failed(tmp_path: Path) -> None:
    store = filled(tmp_path, 5)
    assert store.write(record(5), *sealed(5, 3000))
    flip(path_of(store.folder, key(2)), PAGE_SIZE + 10)
    path_of(store.folder, key(3)).unlink()
    seen: list[tuple[int, int]] = []
    report = store.verify(lambda done, total: seen.append((done, total)))
    assert report.failures == {key(2): Defect.CHECKSUM}
    assert (report.num_records, report.num_bytes) == (4, 6000 + 4 * OVERHEAD) == (4, store.num_bytes)
    assert seen == [(n, 6) for n in range(1, 7)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_write_that_fails_leaves_nothing_and_warns_once(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(tmp_path)
    real_write = os.write

    def write(descriptor: int, data: memoryview) -> int:
        if len(data) < 600:  # the first bytes still fit
            raise OSError(number, os.strerror(number))
        return real_write(descriptor, data[:400])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        assert not any(store.write(record(n), *sealed(n)) for n in (1, 7, 8))
    assert store.num_write_failures == 3 and len(caplog.records) == 1
    assert read(store, key(1)) is None, "a failed write leaves no older copy"
    assert len(files_in(tmp_path)) == len(store.records()) == 2 and store.num_bytes == 2 * (1000 + OVERHEAD)
    assert store.write(record(7), *sealed(7)) and read(store, key(7)) == payload(7)


def test_a_record_that_exceeds_the_file_size_limit_is_not_stored(tmp_path: Path) -> None:
    store = filled(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        assert not store.write(record(7), *sealed(7, 20_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.num_write_failures == 1 and len(files_in(tmp_path)) == 3


def test_a_write_fails_if_its_shard_is_not_a_folder(tmp_path: Path) -> None:
    store = filled(tmp_path, 0)
    path_of(store.folder, key(1)).parent.write_text("in the way")
    assert not store.write(record(1), *sealed(1)) and store.num_write_failures == 1


def test_a_folder_that_cannot_be_made_or_locked_is_read_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    nowhere = DiskStore(tmp_path / "file" / "kv", MODEL)
    assert not nowhere.is_writer and not nowhere.records() and not nowhere.write(record(1), *sealed(1))
    filled(tmp_path / "kv").close()
    lock = folder_of(tmp_path / "kv", MODEL) / "writer.lock"
    lock.unlink()
    lock.mkdir()
    store = DiskStore(tmp_path / "kv", MODEL)
    assert not store.is_writer and read(store, key(1)) == payload(1)
    assert caplog.text.count("cannot be written") == 2


def test_a_reader_reads_existing_records_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = filled(tmp_path)
    reader = DiskStore(tmp_path, MODEL)
    assert (writer.is_writer, reader.is_writer) == (True, False)
    assert [level for _, level, _ in caplog.record_tuples] == [logging.WARNING]
    assert "another process or instance writes the KV cache of this knowledge base" in caplog.text
    assert not reader.write(record(9), *sealed(9))
    reader.remove(key(0))
    assert [read(reader, key(n)) for n in range(3)] == [payload(n) for n in range(3)]

    assert writer.write(record(5), *sealed(5))
    assert not reader.has(key(5)), "a reader knows the records from when it opened the folder"

    flip(path_of(writer.folder, key(0)), PAGE_SIZE)
    assert read(reader, key(0)) is None and reader.verify_failures == {Defect.CHECKSUM: 1}
    assert not reader.has(key(0)), "it is not offered again"
    assert len(files_in(tmp_path)) == 4, "only the writer removes it"
    assert read(writer, key(0)) is None and len(files_in(tmp_path)) == 3

    writer.close()
    assert (writer.is_writer, reader.is_writer) == (False, False), "a reader stays a reader"
    assert not writer.write(record(9), *sealed(9))
    assert DiskStore(tmp_path, MODEL).is_writer


def test_a_writer_of_a_removed_folder_stops_if_another_process_writes_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = filled(tmp_path / "kv")
    shutil.rmtree(tmp_path / "kv")
    second = DiskStore(tmp_path / "kv", MODEL)
    assert second.is_writer and second.write(record(1), *sealed(5))

    first.remove(key(1))
    assert not first.write(record(1), *sealed(1)) and not first.is_writer
    assert not first.records() and first.num_bytes == 0
    assert read(second, key(1)) == payload(5) and len(files_in(tmp_path)) == 1
    assert caplog.text.count("was removed or replaced while this process used it") == 1
    assert "another process or instance writes the KV cache" in caplog.text


def test_a_writer_of_a_removed_folder_creates_and_locks_it_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(tmp_path / "kv")
    shutil.rmtree(tmp_path / "kv")
    assert store.write(record(7), *sealed(7)) and store.is_writer
    assert [one.key for one, _ in store.records()] == [key(7)] and read(store, key(7)) == payload(7)
    assert not DiskStore(tmp_path / "kv", MODEL).is_writer
    assert caplog.text.count("was removed or replaced while this process used it") == 1


def test_a_writer_whose_lock_file_was_removed_keeps_its_own_records_only(tmp_path: Path) -> None:
    store = filled(tmp_path)
    (store.folder / "writer.lock").unlink()
    other = DiskStore(tmp_path, MODEL)
    assert other.is_writer and other.write(record(8), *sealed(8))
    other.close()
    assert store.write(record(9), *sealed(9)) and store.is_writer
    assert {one.key for one, _ in store.records()} == {key(n) for n in (0, 1, 2, 9)}
    assert len(files_in(tmp_path)) == 4 and store.num_bytes == sum(path.stat().st_size for path in files_in(tmp_path))


def test_the_disk_store_needs_no_torch() -> None:
    script = "import sys, stillroom.kvstore.disk; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_kv_of_the_model_stored_to_least_recently_is_removed_first(tmp_path: Path) -> None:
    size = size_on_disk(1000)
    for seconds, model in enumerate((b"a" * 32, b"b" * 32), start=1):
        store = DiskStore(tmp_path, model)
        for n in range(3):
            assert store.write(record(n), *sealed(n))
            os.utime(path_of(store.folder, key(n)), (100 * seconds + n, 100 * seconds + n))
        store.close()
    own = filled(tmp_path)
    assert shrink_other_models(tmp_path, MODEL, 6 * size) == 6 * size
    assert shrink_other_models(tmp_path, MODEL, 5 * size - 1) == 4 * size
    older, newer = DiskStore(tmp_path, b"a" * 32), DiskStore(tmp_path, b"b" * 32)
    assert [older.has(key(n)) for n in range(3)] == [True, False, False]
    older.close()
    assert shrink_other_models(tmp_path, MODEL, 0) == 3 * size, "the current writer keeps its KV"
    assert all(newer.has(key(n)) and own.has(key(n)) for n in range(3)) and len(files_in(tmp_path)) == 6


def test_a_process_can_become_the_writer_while_its_model_is_shrunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path).close()
    opened: list[Future[DiskStore]] = []

    def removing(path: Path) -> bool:
        if not opened:
            opened.append(pool.submit(DiskStore, tmp_path, MODEL))
            wait(opened, 0.1)
        return remove_file(path)

    monkeypatch.setattr(disk, "remove_file", removing)
    with ThreadPoolExecutor(1) as pool:
        shrink_other_models(tmp_path, OTHER_MODEL, 0)
    assert opened[0].result().is_writer


def test_several_writers_keep_their_kv_each_in_its_own_folder_and_find_it_again(tmp_path: Path) -> None:
    for _ in range(2):
        stores = [open_disk(tmp_path, MODEL, 3) for _ in range(4)]
        assert [store.is_writer for store in stores] == [True, True, True, False]
        assert len({store.folder for store in stores[:3]}) == 3 and stores[3].folder == stores[0].folder
        for number, store in enumerate(stores[:3]):
            if not store.records():
                assert store.write(record(number, chunk=number), *sealed(number))
            assert [one.key for one, _ in store.records()] == [key(number)]
            assert read(store, key(number)) == payload(number)
        for store in stores:
            store.close()
    assert open_disk(tmp_path, MODEL).folder == DiskStore(tmp_path, MODEL).folder, "one writer: the model's own folder"


def test_folders_of_further_writers_are_no_other_models(tmp_path: Path) -> None:
    first, second = (open_disk(tmp_path, MODEL, 2) for _ in range(2))
    assert second.write(record(1), *sealed(1))
    second.close()
    assert shrink_other_models(tmp_path, MODEL, 0, 2) == 0
    again = open_disk(tmp_path, MODEL, 2)
    assert again.has(key(1)), "the first folder is still taken"
    again.close()
    assert first.is_writer
    assert shrink_other_models(tmp_path, OTHER_MODEL, 0) == 0 and not files_in(tmp_path), "to another model they are"
