"""`stillroom verify` prints the repair command only if repairing can help."""

import sqlite3
from pathlib import Path

import pytest

from stillroom.config.settings import StillroomConfig
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.store.document_names import UPLOADS
from stillroom.retrieval.store.folder import CORPUS
from tests.cli.harness import Run


@pytest.fixture
def kb() -> Path:
    """An empty knowledge base whose path needs shell quotes."""
    path = Path("my kb")
    KnowledgeBase.open(path, StillroomConfig(), create=True).close()
    return path


def damage(kb: Path) -> None:
    """Insert a vector without a chunk."""
    with sqlite3.connect(kb / CORPUS) as database:
        database.execute("INSERT INTO vectors VALUES (1, 1, x'00')")


def test_repair_command_is_printed_for_repairable_damage(run: Run, kb: Path) -> None:
    damage(kb)
    found = run("verify", "--kb", kb)
    assert found.code == 1
    assert found.out.splitlines()[-1] == "to repair: stillroom verify --repair --kb 'my kb'"
    assert run("verify", "--kb", kb, "--json").json["repair_command"] == "stillroom verify --repair --kb 'my kb'"

    repaired = run("verify", "--repair", "--kb", kb)
    assert repaired.code == 1 and "repaired" in repaired.out and "to repair" not in repaired.out
    again = run("verify", "--kb", kb)
    assert again.code == 0 and "to repair" not in again.out


def test_no_repair_command_for_damage_that_needs_an_upload(run: Run, kb: Path) -> None:
    (kb / UPLOADS).mkdir()
    (kb / UPLOADS / "lost.md").write_text("Nothing was indexed of it.")
    found = run("verify", "--kb", kb)
    assert found.code == 1 and "uploads: " in found.out and "to repair" not in found.out
    assert run("verify", "--kb", kb, "--json").json["repair_command"] is None
