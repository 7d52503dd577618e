"""`stillroom verify`: damage of every kind is found, reported and repaired if possible; undamaged data is clean."""

import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faiss as _faiss
import numpy as np
import pytest
import tantivy

from stillroom.config.settings import EmbedderConfig
from stillroom.errors import IncompatibleKnowledgeBaseError, KnowledgeBaseBusyError
from stillroom.retrieval import ingest, knowledge_base
from stillroom.retrieval.knowledge_base import KnowledgeBase
from tests.cli.harness import Run, runner
from tests.crash import oracle
from tests.crash.fixture import NUM_FILES, write_docs
from tests.crash.worker import INDEXES, SmallEmbedder, config

faiss: Any = _faiss
KINDS = tuple(INDEXES)

Damage = Callable[[Path], object]
Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def embedder() -> SmallEmbedder:
    return SmallEmbedder(EmbedderConfig())


@pytest.fixture(autouse=True)
def small(embedder: SmallEmbedder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knowledge_base, "Embedder", lambda *_: embedder)
    monkeypatch.setattr(ingest, "_COMMITTED_TOGETHER", 40)


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    write_docs(folder / "docs", 1)
    return folder


@pytest.fixture
def made(templates: Path, tmp_path: Path, embedder: SmallEmbedder) -> Iterator[Callable[[str], Path]]:
    """Copies of knowledge bases with the same documents, by kind of index."""

    def make(kind: str) -> Path:
        if not (templates / kind).exists():
            with KnowledgeBase.open(templates / kind, config(kind), create=True) as kb:
                kb.add([templates / "docs"], metadata={"team": "legal"})
        shutil.copytree(templates / kind, tmp_path / kind)
        return tmp_path / kind

    yield make


def sql(*statements: str) -> Damage:
    def damage(kb: Path) -> None:
        with sqlite3.connect(kb / "corpus.sqlite3") as database:
            for statement in statements:
                database.execute(statement)
        database.close()

    return damage


def flipped(pattern: str, at: float = 0.5) -> Damage:
    """Flip one byte of a file."""

    def damage(kb: Path) -> None:
        path = max(kb.glob(pattern), key=lambda one: one.stat().st_size)
        content = bytearray(path.read_bytes())
        content[int(len(content) * at)] ^= 0xFF
        path.write_bytes(content)

    return damage


def removed(pattern: str) -> Damage:
    def damage(kb: Path) -> None:
        for path in kb.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def dense_arrays(change: Callable[[Arrays], None]) -> Damage:
    """Make a valid dense index with other content."""

    def damage(kb: Path) -> None:
        with np.load(kb / "dense.npz") as found:
            arrays = dict(found)
        change(arrays)
        np.savez(kb / "dense.npz", **arrays)

    return damage


def lose_two(arrays: Arrays) -> None:
    index = faiss.deserialize_index(arrays["flat"])
    index.remove_ids(np.array(faiss.vector_to_array(index.id_map)[:2]))
    arrays["flat"] = faiss.serialize_index(index)


def add_one(arrays: Arrays) -> None:
    index = faiss.deserialize_index(arrays["flat"])
    index.add_with_ids(np.ones((1, index.d), dtype=np.float32), np.array([77]))
    arrays["flat"] = faiss.serialize_index(index)


def swap_ids(arrays: Arrays) -> None:
    arrays["ids"] = arrays["ids"][::-1].copy()


def in_postings(change: Callable[[Any], object]) -> Damage:
    def damage(kb: Path) -> None:
        writer = tantivy.Index.open(str(kb / "sparse")).writer(15_000_000, 1)
        change(writer)
        writer.commit()
        writer.wait_merging_threads()

    return damage


def some_chunk(kb: Path) -> int:
    with sqlite3.connect(kb / "corpus.sqlite3") as database:
        found = int(database.execute("SELECT min(chunk_id) FROM chunks").fetchone()[0])
    database.close()
    return found


def posting(chunk_id: int, body: str) -> tantivy.Document:
    document = tantivy.Document()
    document.add_integer("chunk_id", chunk_id)
    document.add_text("body", body)
    return document


def lose_posting(kb: Path) -> None:
    in_postings(lambda writer: writer.delete_documents_by_term("chunk_id", some_chunk(kb)))(kb)


def change_posting(kb: Path) -> None:
    lose_posting(kb)
    in_postings(lambda writer: writer.add_document(posting(some_chunk(kb), "other words")))(kb)


def damage_sqlite_index(kb: Path) -> None:
    """Make a row that is missing in one of SQLite's own indexes."""
    database = sqlite3.connect(kb / "corpus.sqlite3", isolation_level=None)
    row = database.execute("SELECT * FROM sqlite_master WHERE name = 'vectors_by_generation'").fetchone()
    database.execute("PRAGMA writable_schema = ON")
    database.execute("DELETE FROM sqlite_master WHERE name = 'vectors_by_generation'")
    database.close()
    sql(f"UPDATE vectors SET generation = 4 WHERE generation < 4 AND chunk_id > {ONE}")(kb)
    database = sqlite3.connect(kb / "corpus.sqlite3", isolation_level=None)
    database.execute("PRAGMA writable_schema = ON")
    database.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", row)
    database.close()


def damage_points(kb: Path) -> None:
    from qdrant_client import QdrantClient, models

    client = QdrantClient(path=str(kb / "qdrant"))
    name = client.get_collections().collections[0].name
    vector = [1.0] + [0.0] * 15
    client.upsert(name, [models.PointStruct(id=some_chunk(kb), vector={"dense": vector})])
    client.close()


ONE = "(SELECT chunk_id FROM chunks ORDER BY chunk_id LIMIT 1)"
DAMAGES: dict[str, tuple[str, Damage, str, str, int]] = {
    # kind of index, damage, part and words of the finding, number of documents lost
    "a lost chunk": ("flat", sql(f"DELETE FROM chunks WHERE chunk_id = {ONE}"), "corpus", "not whole", 1),
    "a changed text": ("flat", sql(f"UPDATE chunks SET text = 'x' WHERE chunk_id = {ONE}"), "corpus", "not whole", 1),
    "a lost document": ("flat", sql("DELETE FROM documents WHERE rowid = 4"), "corpus", "chunks without a document", 1),
    "a lost vector": (
        "flat",
        sql(f"DELETE FROM vectors WHERE chunk_id = {ONE}"),
        "vectors",
        "missing or invalid vector",
        0,
    ),
    "a short vector": (
        "flat",
        sql(f"UPDATE vectors SET vector = substr(vector, 5) WHERE chunk_id = {ONE}"),
        "vectors",
        "another dimension",
        0,
    ),
    "a vector of zeros": (
        "hnsw",
        sql(f"UPDATE vectors SET vector = zeroblob(64) WHERE chunk_id = {ONE}"),
        "vectors",
        "missing or invalid vector",
        0,
    ),
    "an orphan vector": (
        "flat",
        sql("INSERT INTO vectors SELECT 99, 1, vector FROM vectors LIMIT 1"),
        "vectors",
        "vectors without a chunk",
        0,
    ),
    "a false tombstone": ("flat", sql(f"INSERT INTO tombstones VALUES ({ONE}, 1)"), "corpus", "contradicts", 0),
    "a generation gone back": ("flat", sql("UPDATE state SET generation = 1"), "corpus", "contradicts", 0),
    "an index of SQLite's own": ("flat", damage_sqlite_index, "corpus", "SQLite's own check", 0),
    "no dense index": ("flat", removed("dense.npz"), "dense", "missing", 0),
    "a flipped byte of vectors": ("ivf_pq", flipped("dense.npz"), "dense", "damaged", 0),
    "a dense index without two chunks": ("flat", dense_arrays(lose_two), "dense", "not in the index", 0),
    "a dense index with an extra chunk": ("flat", dense_arrays(add_one), "dense", "SQLite does not have", 0),
    "a graph with other ids": ("hnsw", dense_arrays(swap_ids), "dense", "other vectors", 0),
    "a flipped byte of a list": ("tiered", flipped("dense.lists", 0.15), "dense", "damaged", 0),
    "a flipped byte of full vectors": ("tiered", flipped("dense.lists", 0.5), "dense", "damaged", 0),
    "a changed point": ("qdrant", damage_points, "dense", "other vectors", 0),
    "no postings": ("flat", removed("sparse"), "sparse", "missing", 0),
    "a flipped byte of terms": ("flat", flipped("sparse/*.term"), "sparse", "checksum", 0),
    "a flipped byte of postings": ("flat", flipped("sparse/*.idx"), "sparse", "checksum", 0),
    "a lost posting": ("flat", lose_posting, "sparse", "not in the index", 0),
    "a posting without a chunk": (
        "flat",
        in_postings(lambda writer: writer.add_document(posting(99, "ghost"))),
        "sparse",
        "SQLite does not have",
        0,
    ),
    "a posting with other words": ("flat", change_posting, "sparse", "other postings", 0),
    "no state of the postings": ("flat", removed("sparse/stillroom.json"), "sparse", "damaged", 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_undamaged_knowledge_base_is_clean(made: Callable[[str], Path], kind: str) -> None:
    steps: list[tuple[int, int]] = []
    with KnowledgeBase.open(made(kind), config(kind)) as kb:
        report = kb.verify(progress=lambda done, total: steps.append((done, total)))
    assert report.is_clean and report.findings == ()
    assert (report.num_documents, report.num_chunks) == (NUM_FILES + 6, 126)
    assert steps == sorted(steps) and steps[-1] == (3 * 126, 3 * 126)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_reported_and_repaired(made: Callable[[str], Path], templates: Path, name: str) -> None:
    kind, damage, part, words, num_lost = DAMAGES[name]
    folder = made(kind)
    before = oracle.documents(folder)
    damage(folder)
    with KnowledgeBase.open(folder, config(kind)) as kb:
        found = kb.verify()
        assert [part, True] in [[finding.part, words in finding.problem] for finding in found.findings], found
        assert not any(finding.is_repaired for finding in found.findings)
        assert kb.verify().findings == found.findings, "verify without repair changes nothing"
        repaired = kb.verify(repair=True)
        assert all(finding.is_repaired for finding in repaired.findings), repaired
        assert kb.verify().is_clean
        assert kb.num_documents == len(before) - num_lost
        for mode in ("dense", "sparse"):
            assert len(kb.search("weighs stones", mode=mode, top_k=120).results) >= 120 - 4 * num_lost
    oracle.check_projections(folder)
    with KnowledgeBase.open(folder, config(kind)) as kb:
        kb.add([templates / "docs"])
        assert kb.verify().is_clean
        assert all(info.metadata.get("team") == "legal" for info in kb.documents()), "given metadata is kept"
    after = oracle.documents(folder)
    assert {key: value[:2] for key, value in after.items()} == {key: value[:2] for key, value in before.items()}
    vectors = oracle.vectors(after)
    assert vectors.keys() == oracle.vectors(before).keys()


def test_index_behind_sqlite_is_reported_and_updated_by_a_search(made: Callable[[str], Path], templates: Path) -> None:
    folder = made("flat")
    old = {name: (folder / name).read_bytes() for name in ("dense.npz",)}
    with KnowledgeBase.open(folder, config("flat")) as kb:
        kb.remove([str(templates / "docs" / "records")])
    for name, content in old.items():
        (folder / name).write_bytes(content)
    with KnowledgeBase.open(folder, config("flat")) as kb:
        (finding,) = kb.verify().findings
        assert "behind SQLite by 1 commits" in finding.problem and "nothing is lost" in finding.meaning
        kb.search("stones")
        assert kb.verify().is_clean, "the search has updated it"


def test_unrepairable_damage_is_reported_and_left_unchanged(made: Callable[[str], Path]) -> None:
    folder = made("flat")
    path = folder / "corpus.sqlite3"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        page = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'vectors'").fetchone()[0]
        size = database.execute("PRAGMA page_size").fetchone()[0]
    database.close()
    content = bytearray(path.read_bytes())
    content[(page - 1) * size : page * size] = b"\xa5" * size
    path.write_bytes(content)
    with KnowledgeBase.open(folder, config("flat")) as kb:
        for _ in range(2):
            (finding,) = kb.verify(repair=True).findings
            assert "backup" in finding.meaning and not finding.is_repaired
    assert (folder / "dense.npz").exists() and (folder / "sparse" / "meta.json").exists()


def test_verify_holds_the_write_lock_and_needs_the_same_embedder_to_repair(made: Callable[[str], Path]) -> None:
    folder = made("flat")
    sql(f"DELETE FROM vectors WHERE chunk_id = {ONE}")(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["embedder"]["fingerprint"] = "other"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with KnowledgeBase.open(folder, config("flat")) as kb, KnowledgeBase.open(folder, config("flat")) as other:
        refused: list[str] = []

        def write_too(done: int, total: int) -> None:
            with pytest.raises(KnowledgeBaseBusyError, match="verify, since"):
                other.remove(["x"])
            refused.append("yes")

        assert not kb.verify(progress=write_too).is_clean and refused
        with pytest.raises(IncompatibleKnowledgeBaseError):
            kb.verify(repair=True)


def test_verify_command_reports_and_repairs(
    made: Callable[[str], Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    run: Run = runner(capfd)
    folder = made("flat")
    clean = run("verify", "--kb", folder, "--kv")
    assert clean.code == 0 and "36 documents, 126 chunks checked in" in clean.out and "no findings" in clean.out
    sql(f"DELETE FROM vectors WHERE chunk_id = {ONE}")(folder)
    found = run("verify", "--kb", folder)
    assert (
        found.code == 1
        and "vectors: chunks with a missing or invalid vector" in found.out
        and "embeds their texts" in found.out
    )
    as_json = run("verify", "--kb", folder, "--json", "--repair")
    assert as_json.code == 1 and as_json.json["num_repaired"] == as_json.json["num_findings"] >= 1
    assert run("verify", "--kb", folder, "--json").json["findings"] == []
    assert run("verify", "--kb", tmp_path / "none").code == 2


def test_backup_taken_during_an_add_is_whole(templates: Path, tmp_path: Path) -> None:
    copies: list[Path] = []

    def back_up(_: object) -> None:
        target = tmp_path / f"copy{len(copies)}"
        target.mkdir()
        with sqlite3.connect(tmp_path / "kb" / "corpus.sqlite3") as source:
            with sqlite3.connect(target / "corpus.sqlite3") as copy:
                source.backup(copy)
            copy.close()
        source.close()
        shutil.copy(tmp_path / "kb" / "manifest.json", target)
        copies.append(target)

    with KnowledgeBase.open(tmp_path / "kb", config("flat"), create=True) as kb:
        kb.add([templates / "docs"], progress=back_up)
        whole = oracle.documents(kb.path)
    counts = []
    for folder in copies[:: len(copies) // 4]:
        with KnowledgeBase.open(folder, config("flat")) as restored:
            restored.search("stones")
            assert restored.verify().is_clean
            counts.append(restored.num_documents)
        assert oracle.documents(folder).items() <= whole.items()
    assert len(set(counts)) > 0 and counts == sorted(counts)


def test_tests_named_in_durability_page_exist() -> None:
    root = Path(__file__).resolve().parents[2]
    named = set(re.findall(r"`(test_\w+)`", (root / "docs" / "durability.md").read_text()))
    there = {
        name for path in root.glob("tests/**/test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 10 and named <= there, named - there
