"""`stillroom cache` and `stillroom calibrate` on real files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NodeKey, NodeRecord
from stillroom.kvstore.disk import DiskStore
from stillroom.kvstore.files import KV_FOLDER
from stillroom.kvstore.record import checksum_of
from stillroom.retrieval.store.folder import CORPUS
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from tests.cli.harness import Run
from tests.retrieval.test_reading_only import read_only

pytestmark = pytest.mark.microworld

MODEL = b"\x07" * 32


@pytest.fixture
def records() -> list[Path]:
    """Three records of 100 bytes each, without a document."""
    Path("kb").mkdir()
    SqliteCorpus(Path("kb") / CORPUS).close()
    store = DiskStore(Path("kb") / KV_FOLDER, MODEL)
    for index in range(3):
        key = NodeKey(bytes([index]) * 32)
        assert store.write(NodeRecord(key, key, 0, 10, None, 1.0, 1.0), bytes(100), checksum_of(bytes(100)))
    store.close()
    return sorted(Path("kb").rglob("*.kv"))


def test_stats_by_model(run: Run, records: list[Path]) -> None:
    found = run("cache", "stats", "--kb", "kb", "--json").json
    assert found["num_records"] == 3 and found["num_bytes"] == sum(path.stat().st_size for path in records)
    assert [model["model"] for model in found["models"]] == [MODEL.hex()]
    assert "3 records" in run("cache", "stats", "--kb", "kb").out


def test_stats_tell_prepared_chunks_and_how_many_were_used(run: Run, records: list[Path]) -> None:
    store = DiskStore(Path("kb") / KV_FOLDER, MODEL)
    for index, (is_in_document, bits) in enumerate(((True, 8), (True, 8), (True, 4), (False, 16)), start=3):
        key = NodeKey(bytes([index]) * 32)
        record = NodeRecord(key, key, 5, 10, ChunkId(index), 1.0, 1.0, is_used=False, bits=bits)
        assert store.write(
            replace(record, is_in_document=is_in_document, seen=(ChunkId(index),)), bytes(100), checksum_of(bytes(100))
        )
    store.mark_used(NodeKey(bytes([4]) * 32))
    store.close()

    found = run("cache", "stats", "--kb", "kb", "--json").json
    expected = {"num_chunks": 4, "num_used": 1, "num_bytes": 4 * 4196, "chunks_by_bits": {"8": 2, "4": 1, "16": 1}}
    assert found["prepared"] == found["models"][0]["prepared"] == expected and found["num_records"] == 7
    shown = run("cache", "stats", "--kb", "kb").out
    assert "  prepared: 4 chunks, 16 KiB in 4, 8 or 16 bits a number, 1 used by questions\n" in shown


def test_verify_reports_and_removes_damaged_records(run: Run, records: list[Path]) -> None:
    assert run("cache", "verify", "--kb", "kb").out == "3 records checked, 0 damaged\n"
    content = bytearray(records[1].read_bytes())
    content[-30] ^= 1
    records[1].write_bytes(content)

    result = run("cache", "verify", "--kb", "kb")

    assert result.code == 1
    assert result.out.splitlines() == [f"damaged: {'01' * 32}  checksum", "3 records checked, 1 damaged"]
    assert "failed verification" not in result.err
    assert run("cache", "verify", "--kb", "kb", "--json").json["num_failures"] == 0


def test_verify_removes_records_of_documents_that_no_longer_exist(run: Run, records: list[Path]) -> None:
    store, key = DiskStore(Path("kb") / KV_FOLDER, MODEL), NodeKey(b"\x09" * 32)
    assert store.write(NodeRecord(key, key, 0, 10, ChunkId(1), 1.0, 1.0), bytes(100), checksum_of(bytes(100)))
    store.close()

    result = run("cache", "verify", "--kb", "kb")

    assert result.code == 0 and sorted(Path("kb").rglob("*.kv")) == records
    assert result.out.splitlines() == [
        "removed 1 record of documents or tenants that no longer exist",
        "3 records checked, 0 damaged",
    ]


def test_clear_removes_everything(run: Run, records: list[Path]) -> None:
    assert run("cache", "clear", "--kb", "kb").out == "removed 3 records\n"
    assert run("cache", "stats", "--kb", "kb", "--json").json["num_bytes"] == 0


def test_clear_exits_1_if_a_record_cannot_be_removed(run: Run, records: list[Path], tmp_path: Path) -> None:
    with read_only(tmp_path / "kb") as view:
        cleared = run("cache", "clear", "--kb", view)
        counts = run("cache", "clear", "--kb", view, "--json")
    assert cleared.code == counts.code == 1
    assert cleared.out == "removed 0 records\n" and "3 records could not be removed; the first: " in cleared.err
    assert counts.json == {"num_removed": 0, "num_failures": 3} and all(path.exists() for path in records)


def test_verify_says_why_it_only_reports_damage(run: Run, records: list[Path], tmp_path: Path) -> None:
    with read_only(tmp_path / "kb") as view:
        barred = run("cache", "verify", "--kb", view)
    assert barred.code == 0 and "cannot be written" in barred.err and "another process" not in barred.err
    assert "a server" not in barred.err and "only reported" in barred.err
    server = DiskStore(Path("kb") / KV_FOLDER, MODEL)
    assert "another process or instance writes the KV cache" in run("cache", "verify", "--kb", "kb").err
    server.close()


def test_unreadable_cache_is_an_error_and_not_empty(run: Run) -> None:
    Path("kb").mkdir()
    (Path("kb") / KV_FOLDER).touch()
    for command in ("stats", "clear", "verify"):
        result = run("cache", command, "--kb", "kb")
        assert result.code == 1 and str(Path("kb") / KV_FOLDER) in result.err


def test_missing_folder_exits_2(run: Run) -> None:
    for command in ("stats", "clear", "verify"):
        result = run("cache", command, "--kb", "nowhere")
        assert result.code == 2 and "name its folder with --kb" in result.err


def test_calibrate_saves_a_profile_that_the_next_start_loads(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stillroom.backends.calibration import load_profile, profile_path
    from stillroom.config.places import cache_root
    from stillroom.models.loader import load_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("STILLROOM_RUNTIME__KV_BYTES", "1MiB")

    found = run("calibrate", "--kb", "kb", "--repeat", 1, "--json").json

    model = load_model("bundled:microworld")
    path = profile_path(cache_root(), model.fingerprint, model.decoder.device)
    assert found["path"] == str(path)
    profile = load_profile(path)
    assert profile is not None
    assert [list(row) for row in profile.seconds] == found["seconds"]
    assert set(found["links"]) == {"host", "disk"}
    path.write_text("{}", encoding="utf-8")
    assert load_profile(path) is None


def test_calibrate_refuses_too_little_kv_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STILLROOM_RUNTIME__KV_BYTES", "60KiB")
    result = run("calibrate", "--kb", "kb", "--repeat", 1)
    assert result.code == 2 and "raise runtime.kv_bytes" in result.err


QUESTION = {
    "chunks": ["The birthplace of Kala Broster was Glanwick . By trade she was a clerk .", "Lolto Glass makes wool ."],
    "question": "What was the trade of Kala Broster ?",
    "answer": "clerk",
}


def test_calibrate_finds_the_smallest_recompute_share(run: Run) -> None:
    other = QUESTION | {"chunks": ["Jecko Bank makes salt .", "Lola Yevman earned a living as a miner ."]}
    Path("questions.jsonl").write_text(json.dumps(QUESTION) + "\n" + json.dumps(other) + "\n")
    found = run("calibrate", "--quality", 0.9, "--questions", "questions.jsonl", "--json").json
    assert [cell["alpha"] for cell in found["cells"]] == sorted(cell["alpha"] for cell in found["cells"])
    good = [cell for cell in found["cells"] if cell["quality"] >= 0.9]
    assert found["alpha"] == min(good, key=lambda cell: cell["mean_overhead"])["alpha"]
    shares = [cell["mean_overhead"] for cell in found["cells"]]
    assert shares == sorted(shares) and shares[0] < shares[-1]
    text = run("calibrate", "--quality", 0.9, "--questions", "questions.jsonl", "--limit", 1).out
    assert "recomputed" in text and f"alpha = {found['alpha']:g}" in text


def test_quality_needs_questions(run: Run) -> None:
    result = run("calibrate", "--quality", 0.9)
    assert result.code == 2 and "--questions" in result.err
