"""Past questions as server and command line show them, and the request log under load."""

import contextlib
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId, RequestId, format_chunk_id
from stillroom.errors import CorruptKnowledgeBaseError, UnknownRequestError
from stillroom.rag.answer import Answer, ReuseReport, Source, Timing
from stillroom.rag.records import Records, trace_of
from stillroom.telemetry.trace import TRACE_FILE, TraceLog

CHUNKS = {ChunkId(1): Chunk(ChunkId(1), DocumentId("a.md"), 0, "still there")}


def answer(name: str) -> Answer:
    sources = tuple(
        Source("a.md", format_chunk_id(ChunkId(number)), "text", 0.5, {}, number, "A", 1, 2) for number in (1, 2)
    )
    return Answer(RequestId(name), f"of {name}", (), "stop", sources, Timing(0.1, 0.2, 0.0, 0.3), ReuseReport(9, 4), 2)


@pytest.fixture
def records(tmp_path: Path) -> Records:
    log = TraceLog(tmp_path / TRACE_FILE, keep=10)
    for at, name in enumerate(("req-1", "req-2", "req-3")):
        log.add(name, float(at // 2), trace_of(f"about {name}?", "small", answer(name)))
    return Records(log, lambda chunk_ids: {one: CHUNKS[one] for one in chunk_ids if one in CHUNKS})


def test_recent_lists_the_latest_first_up_to_the_limit(records: Records) -> None:
    found = records.recent(2)

    assert [one.request_id for one in found] == ["req-3", "req-2"]
    assert (found[0].question, found[0].num_sources, found[0].num_cached_tokens) == ("about req-3?", 2, 4)
    assert found[0].timing["ttft_seconds"] == 0.2


def test_record_has_the_text_of_existing_documents_only(records: Records) -> None:
    found = records.get("req-2")

    assert (found["request_id"], found["text"]) == ("req-2", "of req-2")
    assert [source["text"] for source in found["sources"]] == ["still there", None]


@pytest.mark.parametrize("name", ["req-4", ""])
def test_unknown_request_id_is_an_error(records: Records, name: str) -> None:
    with pytest.raises(UnknownRequestError, match="not among the questions remembered"):
        records.get(name)


def test_empty_log_and_damaged_file(tmp_path: Path) -> None:
    records = Records(TraceLog(tmp_path / TRACE_FILE, keep=10), lambda chunk_ids: {})
    assert records.recent() == []
    (tmp_path / TRACE_FILE).write_bytes(b"no database" * 100)
    with pytest.raises(CorruptKnowledgeBaseError, match=r"traces\.sqlite is damaged .* remove it"):
        records.recent()


def test_log_locked_by_another_process_delays_no_answer_and_recovers(tmp_path: Path) -> None:
    log = TraceLog(tmp_path / TRACE_FILE, keep=100)
    log.add("before", 0.0, {})
    assert log.get("before") is not None
    with contextlib.closing(sqlite3.connect(tmp_path / TRACE_FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        log.add("meanwhile", 1.0, {})
        assert time.monotonic() - began < 1.5, "the writer waits two seconds, the caller does not"
        assert [request_id for request_id, _, _ in log.recent(9)] == ["before"], "the writer has dropped this one"
        other.execute("ROLLBACK")
    log.add("after", 2.0, {})
    log.close()
    assert [request_id for request_id, _, _ in log.recent(9)] == ["after", "before"]
    log.close()


def test_closing_while_threads_add_leaves_no_writer(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    for number in range(20):
        log, barrier = TraceLog(tmp_path / f"{number}.sqlite", keep=100), threading.Barrier(5)

        def add_one(log: TraceLog = log, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(20)
            log.add("one", 0.0, {})

        adders = [threading.Thread(target=add_one) for _ in range(4)]
        closer = threading.Thread(target=log.close, daemon=True)
        for adder in adders:
            adder.start()
        barrier.wait(20)
        closer.start()
        for thread in (*adders, closer):
            thread.join(20)
        assert not closer.is_alive()
        log.add("late", 1.0, {})
        log.close()
        assert set(threading.enumerate()) <= threads, "no writer is started after the end"


def test_records_beyond_the_queue_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillroom.telemetry.trace._MAX_PENDING", 2)
    log, go_on = TraceLog(tmp_path / TRACE_FILE, keep=100), threading.Event()
    monkeypatch.setattr(log, "_open", lambda: (go_on.wait(20), TraceLog._open(log))[1])
    for number in range(50):
        log.add(str(number), float(number), {})
    go_on.set()
    log.close()
    assert 0 < len(log.recent(100)) <= 3
    log.close()
