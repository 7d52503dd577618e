"""Changing the embedder of a knowledge base in PostgreSQL: every machine follows, and none mixes two models."""

from pathlib import Path

import pytest

from stillroom.config.settings import EmbedderConfig, StillroomConfig
from stillroom.core.cancellation import Cancellation
from stillroom.core.document import SearchResult
from stillroom.errors import (
    ChangeCancelledError,
    DatabaseUnavailableError,
    IncompatibleKnowledgeBaseError,
    KnowledgeBaseBusyError,
)
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.store.postgresql import statements
from stillroom.retrieval.store.postgresql.database import ReplacedError
from stillroom.retrieval.store.vector_sets import VectorsReplacedError
from tests.crash.worker import OTHER_MODEL, SmallEmbedder
from tests.retrieval.store.postgresql.shared_machines import Open, Switch, corpus_of, execute

pytestmark = pytest.mark.postgres

OTHER = StillroomConfig(embedder=EmbedderConfig(model=OTHER_MODEL))


def ranking(result: SearchResult) -> list[tuple[str, float]]:
    return [(str(one.chunk.document_id), one.score) for one in result.results]


def write(docs: Path, name: str) -> None:
    (docs / f"{name}.md").write_text(f"# {name}\n\nAbout {name} and the vault.\n")


def test_every_machine_searches_with_the_new_model(open_on: Open, docs: Path, tmp_path: Path) -> None:
    a, b = open_on("a", create=True), open_on("b")
    a.add([docs])
    corpus_of(b).refresh()
    before = ranking(b.search("vault", mode="dense"))
    report = a.reembed(OTHER_MODEL)
    assert (report.is_changed, report.num_embedded, a.model) == (True, 2, OTHER_MODEL)
    assert ranking(b.search("vault", mode="dense")) == before, "until it hears of it"
    corpus_of(b).refresh()
    assert b.model == OTHER_MODEL
    write(docs, "bread")
    b.add([docs])
    corpus_of(a).refresh()
    with KnowledgeBase.open(tmp_path / "fresh", OTHER, create=True) as fresh:
        fresh.add([docs])
        expected = ranking(fresh.search("vault", mode="dense"))
    for kb in (a, b, open_on("c")):
        assert ranking(kb.search("vault", mode="dense")) == expected
        assert not kb.verify().findings
        assert [path.name for path in kb.path.glob("vectors-*")] == ["vectors-1"]
    assert not b.reembed(OTHER_MODEL).is_changed
    assert b.reembed(EmbedderConfig().model).is_changed, "and back"
    corpus_of(a).refresh()
    assert a.model == b.model == EmbedderConfig().model


def test_documents_embedded_with_the_old_model_are_not_committed_after_the_switch(
    open_on: Open, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_on("a", create=True), open_on("b")
    a.add([docs])
    corpus_of(b).refresh()
    write(docs, "bread")
    embed = SmallEmbedder.embed_documents

    def switching(self, *rest):  # type: ignore[no-untyped-def]
        monkeypatch.setattr(SmallEmbedder, "embed_documents", embed)
        found = embed(self, *rest)
        a.reembed(OTHER_MODEL)
        corpus_of(b).refresh()
        return found

    monkeypatch.setattr(SmallEmbedder, "embed_documents", switching)
    with pytest.raises(VectorsReplacedError, match="run the same command again"):
        b.add([docs])
    assert b.num_documents == 2
    assert b.add([docs]).num_added == 1
    assert not b.verify().findings


def test_interrupted_change_continues_and_others_see_nothing_of_it(open_on: Open, docs: Path) -> None:
    a, b = open_on("a", create=True), open_on("b")
    for name in ("bread", "stone"):
        write(docs, name)
    a.add([docs])
    corpus_of(b).refresh()
    stop, seen = Cancellation(), []
    before = ranking(b.search("vault"))

    def stopping(done: object) -> None:
        seen.append(done)
        if len(seen) > 4:
            stop.cancel()

    with pytest.raises(ChangeCancelledError):
        a.reembed(OTHER_MODEL, progress=stopping, stop=stop, num_together=1)
    corpus_of(b).refresh()
    assert ranking(b.search("vault")) == before and a.model == EmbedderConfig().model
    b.remove([str(docs / "stone.md")])
    report = a.reembed(OTHER_MODEL)
    assert report.is_changed and report.num_embedded < report.num_chunks == 3


def test_documents_of_other_machines_are_embedded_too_and_one_machine_changes(open_on: Open, docs: Path) -> None:
    a, b = open_on("a", create=True), open_on("b")
    a.add([docs])
    corpus_of(b).refresh()
    write(docs, "bread")
    done: list[object] = []

    def meanwhile(progress: object) -> None:
        if not done:
            done.append(progress)
            with pytest.raises(KnowledgeBaseBusyError, match="another machine is embedding"):
                b.reembed(OTHER_MODEL)
            b.add([docs])

    assert a.reembed(OTHER_MODEL, progress=meanwhile).num_chunks == 3
    corpus_of(b).refresh()
    assert b.model == OTHER_MODEL and not b.verify().findings


def test_lost_server_changes_nothing_and_the_next_run_does_the_rest(open_on: Open, docs: Path, switch: Switch) -> None:
    a = open_on("a", create=True)
    a.add([docs])
    done: list[object] = []

    def losing(progress: object) -> None:
        if not done:
            done.append(progress)
            switch(on=False)

    with pytest.raises(DatabaseUnavailableError):
        a.reembed(OTHER_MODEL, progress=losing)
    assert a.model == EmbedderConfig().model and a.search("vault").results
    with pytest.raises(DatabaseUnavailableError):
        a.reembed(OTHER_MODEL)
    switch(on=True)
    report = a.reembed(OTHER_MODEL)
    assert (report.is_changed, report.num_embedded) == (True, 0), "the vectors were kept on the machine"


def test_programs_that_know_no_vector_sets_are_shut_out_by_the_switch(
    open_on: Open, docs: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, running = open_on("a", create=True), open_on("b"), open_on("old")
    a.add([docs])
    corpus_of(running).refresh()
    versions = "SELECT version FROM stillroom.format"
    assert execute(database, versions) == [(1,)], "older releases read it"
    a.reembed(OTHER_MODEL)
    a.reembed(EmbedderConfig().model)  # vectors of the old length
    a.reembed(OTHER_MODEL)
    assert execute(database, versions) == [(2,)]
    write(docs, "bread")
    with monkeypatch.context() as patch:  # as the releases before
        as_stored = "SELECT corpus_id, generation, revision FROM stillroom.knowledge_bases WHERE kb = %s"
        patch.setattr(statements, "SELECT_STATE", as_stored)
        patch.setattr(statements, "LOCK_STATE", f"{as_stored} FOR UPDATE")
        patch.setattr(statements, "NEWEST_VERSION", 1)
        with pytest.raises(ReplacedError):
            running.corpus.commit(removed=[one.document_id for one in running.corpus.documents()])
        with pytest.raises(IncompatibleKnowledgeBaseError, match="version 2.* up to 1"):
            open_on("late")
    corpus_of(b).refresh()
    assert b.add([docs]).num_added == 1, "machines of this release follow"
    for kb in (a, b, open_on("c")):
        corpus_of(kb).refresh()
        assert (kb.model, kb.num_documents, len(kb.search("vault").results)) == (OTHER_MODEL, 3, 3)
        assert not kb.verify().findings
