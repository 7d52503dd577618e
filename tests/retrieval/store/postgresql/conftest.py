"""Fixtures: machines that share a knowledge base in a PostgreSQL server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import Clock
from stillroom.retrieval import knowledge_base
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.store.postgresql.postgres_corpus import PostgresCorpus
from tests.crash.worker import SmallEmbedder
from tests.retrieval.store.postgresql.shared_machines import Open, Switch


@pytest.fixture
def open_on(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the knowledge base as a machine of a name; machines share the server and nothing else."""
    monkeypatch.setattr(knowledge_base, "Embedder", SmallEmbedder)
    monkeypatch.setattr(PostgresCorpus, "follow", lambda _: None)
    opened: list[KnowledgeBase] = []

    def open_one(
        machine: str,
        *,
        create: bool = False,
        config: StillroomConfig | None = None,
        user: str = "postgres",
        clock: Clock | None = None,
    ) -> KnowledgeBase:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        url = f"{database.replace('postgres:@', f'{user}:@')}&kb=docs"
        kb = KnowledgeBase.open(url, config or StillroomConfig(), create=create, clock=clock)
        opened.append(kb)
        return kb

    yield open_one
    for kb in opened:
        kb.close()


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "keys.md").write_text("# Keys\n\nRotate the keys of the vault.\n")
    (folder / "cats.md").write_text("# Cats\n\nCats sleep most of the day.\n")
    return folder


@pytest.fixture
def switch(server: Any, database: str) -> Switch:
    return Switch(server, database)
