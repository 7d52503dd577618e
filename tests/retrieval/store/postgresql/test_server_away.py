"""A PostgreSQL server that is away, or refuses a user."""

import datetime
import io
from pathlib import Path

import pytest

from stillroom.config.settings import StillroomConfig
from stillroom.core.clock import VirtualClock
from stillroom.errors import (
    DatabaseRefusedError,
    DatabaseUnavailableError,
    UsageError,
)
from stillroom.retrieval import knowledge_base
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.store.corpus import CopyState
from stillroom.retrieval.uploads import Uploads
from stillroom.telemetry import catalogue
from tests.crash.worker import SmallEmbedder
from tests.retrieval.store.postgresql.shared_machines import Open, Switch, corpus_of, execute, found

pytestmark = pytest.mark.postgres


def test_searches_go_on_without_the_server_and_changes_are_refused(
    open_on: Open, docs: Path, switch: Switch, caplog: pytest.LogCaptureFixture
) -> None:
    a = open_on("a", create=True)
    corpus_of(a)._clock = clock = VirtualClock(1234567.0)
    a.add([docs])
    clock.advance(60.0)
    corpus_of(a).refresh()
    assert corpus_of(a).copy_state == CopyState(answers=True, age_s=0.0)
    clock.advance(5.0)
    assert corpus_of(a).copy_state.readings() == {catalogue.DATABASE_UP: 1.0, catalogue.COPY_AGE: 5.0}
    switch(on=False)
    assert a.search("vault").results
    (docs / "bread.md").write_text("# Bread\n\nBake the bread.\n")
    upload = [("up.md", io.BytesIO(b"# Up\n\nUploaded text.\n"))]
    for change in (lambda: a.add([docs]), lambda: a.remove([str(docs)]), lambda: Uploads(a).add(upload)):
        with pytest.raises(DatabaseUnavailableError, match="nothing was changed"):
            change()
    assert not list((a.path / "uploads").rglob("*.md"))
    a.close()
    again = open_on("a")
    assert "cannot be reached" in caplog.text and "nothing was changed" not in caplog.text
    assert f"whose last change is of {datetime.datetime.fromtimestamp(1234567.0):%Y-%m-%d %H:%M:%S}" in caplog.text
    assert again.corpus.copy_state is not None and not again.corpus.copy_state.answers
    assert again.search("vault").results
    with pytest.raises(DatabaseUnavailableError):
        again.add([docs])
    with pytest.raises(DatabaseUnavailableError):
        open_on("b")
    switch(on=True)
    assert again.add([docs]).num_added == 1, "the same process goes on"
    assert found(open_on("b"), "bake bread")[0] == "bread.md"


def test_password_is_in_no_message_and_no_file(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = database.replace("postgres:@", "postgres:s3cret@").replace("/test", "/no_such_test")
    with pytest.raises(DatabaseUnavailableError, match="createdb") as refused:
        KnowledgeBase.open(url, StillroomConfig())
    assert "s3cret" not in str(refused.value) + caplog.text
    assert not (tmp_path / "cache").exists(), "a failed attempt leaves no folder"
    monkeypatch.setattr(knowledge_base, "Embedder", SmallEmbedder)
    with KnowledgeBase.open(database.replace("postgres:@", "postgres:s3cret@"), StillroomConfig(), create=True):
        files = [path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert files and not any(b"s3cret" in one for one in files)
    assert "s3cret" not in caplog.text


def test_unknown_parameter_of_the_url_is_named(database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match="foo"):
        KnowledgeBase.open(f"{database}&foo=bar", StillroomConfig())


def test_reading_needs_select_and_refused_users_do_not_read_the_copy(open_on: Open, docs: Path, database: str) -> None:
    open_on("a", create=True).add([docs])
    own = database.partition("?")[0].rpartition("/")[2]
    user = f"reader_{own}"
    execute(database, f"CREATE ROLE {user} LOGIN")
    with pytest.raises(DatabaseRefusedError, match=r"permission denied for schema stillroom; grant .* for reading"):
        open_on("b", user=user)
    execute(database, f"GRANT USAGE ON SCHEMA stillroom TO {user}")
    execute(database, f"GRANT SELECT ON ALL TABLES IN SCHEMA stillroom TO {user}")
    b = open_on("b", user=user)
    assert b.num_documents == 2
    with pytest.raises(DatabaseRefusedError, match="for changes"):
        b.remove([str(docs)])
    b.close()
    for refuse in (f"REVOKE SELECT ON stillroom.knowledge_bases FROM {user}", f"ALTER ROLE {user} NOLOGIN"):
        execute(database, refuse)
        with pytest.raises(DatabaseRefusedError):
            open_on("b", user=user)
