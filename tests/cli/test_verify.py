"""`stillroom verify` names the command that repairs, and only where repairing can help."""

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
    """Empty, in a folder whose name needs quotes in a shell."""
    path = Path("my kb")
    KnowledgeBase.open(path, StillroomConfig(), create=True).close()
    return path


def damage(kb: Path) -> None:
    """A vector of no chunk."""
    with sqlite3.connect(kb / CORPUS) as database:
        database.execute("INSERT INTO vectors VALUES (1, 1, x'00')")


def test_what_can_be_repaired_is_said_with_the_command_that_does_it(run: Run, kb: Path) -> None:
    damage(kb)
    found = run("verify", "--kb", kb)
    assert found.code == 1
    assert found.out.splitlines()[-1] == "to repair: stillroom verify --repair --kb 'my kb'"
    assert run("verify", "--kb", kb, "--json").json["repair_command"] == "stillroom verify --repair --kb 'my kb'"

    repaired = run("verify", "--repair", "--kb", kb)
    assert repaired.code == 1 and "repaired" in repaired.out and "to repair" not in repaired.out
    again = run("verify", "--kb", kb)
    assert again.code == 0 and "to repair" not in again.out


def test_no_command_is_named_where_repairing_cannot_help(run: Run, kb: Path) -> None:
    (kb / UPLOADS).mkdir()
    (kb / UPLOADS / "lost.md").write_text("Nothing was indexed of it.")
    found = run("verify", "--kb", kb)
    assert found.code == 1 and "uploads: " in found.out and "to repair" not in found.out
    assert run("verify", "--kb", kb, "--json").json["repair_command"] is None
