"""Metadata in `add`: given, from sidecars, changed without embedding again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stillroom.core.metadata import Metadata
from stillroom.retrieval import ingest
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.store.sql_rows import CommitReport
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from tests.retrieval.conftest import MakeFile, OpenKb


def metadata(kb: KnowledgeBase) -> dict[str, Metadata]:
    return {Path(info.document_id).name: info.metadata for info in kb.documents()}


def test_given_metadata_overrides_the_file_and_is_kept(
    open_kb: OpenKb, docs: Path, make_file: MakeFile, refuse_to_embed: Callable[[], None]
) -> None:
    path = make_file("a.md", "---\nteam: sales\nyear: 2020\n---\nText.\n")
    make_file("b.txt", "Other text.")
    kb = open_kb()
    kb.add([docs])
    assert metadata(kb) == {"a.md": {"team": "sales", "year": 2020}, "b.txt": {}}
    generation = kb.generation
    refuse_to_embed()
    assert kb.add([docs], metadata={"team": "legal"}).num_updated == 2
    legal: Metadata = {"team": "legal"}
    assert metadata(kb) == {"a.md": {"team": "legal", "year": 2020}, "b.txt": legal}
    assert kb.generation > generation, "what was cached of filters and questions is no longer right"
    assert kb.add([docs]).num_unchanged == 2
    path.write_text("---\nteam: sales\nyear: 2021\n---\nText.\n")
    assert kb.add([docs]).num_updated == 1
    assert metadata(kb)["a.md"] == {"team": "legal", "year": 2021}
    assert kb.add([path], metadata={"team": None}).num_updated == 1
    assert metadata(kb) == {"a.md": {"team": "sales", "year": 2021}, "b.txt": legal}


def test_sidecar_changes_and_removal_are_noticed(
    open_kb: OpenKb, make_file: MakeFile, refuse_to_embed: Callable[[], None]
) -> None:
    path = make_file("a.txt", "Text.")
    kb = open_kb()
    kb.add([path])
    refuse_to_embed()
    for year in (2020, 2021):
        beside = make_file("a.txt.metadata.json", json.dumps({"year": year}))
        assert kb.add([path]).num_updated == 1
        assert metadata(kb) == {"a.txt": {"year": year}}
    beside.write_text("{")
    report = kb.add([path])
    assert len(report.failures) == 1 and metadata(kb) == {"a.txt": {"year": 2021}}
    beside.unlink()
    assert kb.add([path]).num_updated == 1
    assert metadata(kb) == {"a.txt": {}}


def test_removed_record_keeps_given_metadata_of_the_others(open_kb: OpenKb, make_file: MakeFile) -> None:
    path = make_file("c.jsonl", '{"_id": "a", "text": "x"}\n{"_id": "b", "text": "y", "metadata": {"year": 1}}\n')
    kb = open_kb()
    kb.add([path], metadata={"team": "legal"})
    kb.remove([f"{path}#a"])
    assert (kb.add([path]).num_added, kb.num_documents) == (1, 2)
    assert metadata(kb) == {"c.jsonl#a": {"team": "legal"}, "c.jsonl#b": {"team": "legal", "year": 1}}
    kb.remove([str(path)])
    kb.add([path])
    assert metadata(kb)["c.jsonl#a"] == {}, "removing a file removes its given metadata"


def test_reused_chunks_are_committed_as_often_as_embedded_ones(
    open_kb: OpenKb, docs: Path, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        make_file(f"{number}.md", f"# Number {number}\n\n## Keys\n\nIron.\n\n## Cats\n\nSoft.\n")
    monkeypatch.setattr(ingest, "_COMMITTED_TOGETHER", 4)
    sizes: list[int] = []
    commit = SqliteCorpus.commit

    def counted(self: SqliteCorpus, documents: list[object], *others: object) -> CommitReport:
        sizes.append(len(documents))
        return commit(self, documents, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(SqliteCorpus, "commit", counted)
    kb = open_kb()
    kb.add([docs])
    assert sizes[:3] == [2, 2, 2]
    sizes.clear()
    assert kb.add([docs], metadata={"team": "legal"}).num_updated == 6
    assert sizes[:3] == [2, 2, 2]
