"""Several processes on one folder of KV, and killed processes."""

import random
import subprocess
import sys
import time
from pathlib import Path

from stillroom.kvstore.disk import DiskStore
from tests.examples import most_examples
from tests.kvstore.nodes import MODEL, key, payload, record, sealed

ROOT = Path(__file__).resolve().parents[2]
SIZE = 1_000_000

WRITES_UNTIL_KILLED = f"""
import os, sys
from pathlib import Path
from stillroom.kvstore.disk import DiskStore
from tests.kvstore.nodes import MODEL, record, sealed
write = os.write
os.write = lambda descriptor, data: write(descriptor, data[:4096])  # most kills come in the middle of a file
store = DiskStore(Path(sys.argv[1]), MODEL)
assert store.is_writer
contents = [sealed(n, {SIZE}) for n in range(8)]
print("writing", flush=True)
while True:
    for n, content in enumerate(contents):
        assert store.write(record(n), *content)
"""

READS = """
import sys
from pathlib import Path
from stillroom.kvstore.disk import DiskStore
from tests.kvstore.nodes import MODEL, key, payload, record, sealed
store = DiskStore(Path(sys.argv[1]), MODEL)
buffer = bytearray(1000)
is_read = store.read(key(1), memoryview(buffer)) and buffer == payload(1)
print(store.is_writer, len(store.records()), is_read, store.write(record(2), *sealed(2)))
"""


def start(script: str, folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_second_process_only_reads_and_logs_so(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, MODEL)
    assert store.write(record(1), *sealed(1))
    output, errors = start(READS, tmp_path).communicate(timeout=60)
    assert output.split() == ["False", "1", "True", "False"], errors
    assert "another process or instance writes the KV cache of this knowledge base" in errors
    store.close()
    output, errors = start(READS, tmp_path).communicate(timeout=60)
    assert output.split() == ["True", "1", "True", "True"] and not errors


def test_readers_are_not_disturbed_by_a_writer(tmp_path: Path) -> None:
    buffer = bytearray(SIZE)
    contents = [payload(n, SIZE) for n in range(8)]
    with start(WRITES_UNTIL_KILLED, tmp_path) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        while sum(1 for _ in tmp_path.rglob("*.kv")) < 8:
            time.sleep(0.01)
        reader = DiskStore(tmp_path, MODEL)
        for n in [*range(8)] * 25:  # every record is replaced again and again
            assert reader.read(key(n), memoryview(buffer)) and buffer == contents[n]
        assert not reader.is_writer and not reader.verify_failures
        writer.kill()


def test_a_process_killed_at_any_moment_leaves_whole_records_only(tmp_path: Path) -> None:
    delays = random.Random(0)
    num_temporaries = 0
    buffer = bytearray(SIZE)
    for num_kills in range(200):
        if num_kills >= most_examples(20) and num_temporaries > 0:
            break
        with start(WRITES_UNTIL_KILLED, tmp_path) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
            time.sleep(delays.uniform(0, 0.03))
            writer.kill()
        num_temporaries += len(list(tmp_path.rglob("*.tmp")))
        store = DiskStore(tmp_path, MODEL)
        assert store.is_writer and not list(tmp_path.rglob("*.tmp"))
        for n in range(8):
            assert not store.read(key(n), memoryview(buffer)) or buffer == payload(n, SIZE)
        assert not store.verify_failures, "a killed process cannot tear a renamed file"
        store.close()
    assert num_temporaries > 0, "no kill came in the middle of a record"
