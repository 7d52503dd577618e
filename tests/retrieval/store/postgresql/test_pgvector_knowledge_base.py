"""A knowledge base whose vectors are in pgvector: adding, searching, outages, refusals, moving in and out."""

import re
import threading
import time
from pathlib import Path

import pytest

from stillroom.config.settings import IndexConfig, PgvectorConfig, SearchMode, StillroomConfig
from stillroom.core.document import SearchResult
from stillroom.errors import ConfigError, DatabaseRefusedError, DatabaseUnavailableError, IndexUnavailableError
from stillroom.retrieval import knowledge_base
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.migrating import corpus_digest, migrate, target_manifest
from stillroom.retrieval.store.postgresql import embedding_table
from tests.cli.harness import runner
from tests.crash.worker import SmallEmbedder
from tests.retrieval.store.postgresql.shared_machines import Open, Switch, corpus_of, execute

pytestmark = pytest.mark.postgres

CONFIG = StillroomConfig(index=IndexConfig(kind="pgvector"))
EXACT = StillroomConfig(index=IndexConfig(kind="pgvector"), pgvector=PgvectorConfig(exact=True))
MODES: tuple[SearchMode, ...] = ("hybrid", "dense", "sparse")


@pytest.fixture
def extension(database: str) -> None:
    execute(database, "CREATE EXTENSION vector")


def ranking(result: SearchResult) -> list[tuple[str, float]]:
    return [(str(one.chunk.document_id), round(one.score, 5)) for one in result.results]


@pytest.mark.usefixtures("extension")
def test_answers_equal_those_of_a_flat_index(open_on: Open, docs: Path, tmp_path: Path) -> None:
    a = open_on("a", create=True, config=CONFIG)
    flat = KnowledgeBase.open(tmp_path / "flat", StillroomConfig(), create=True)
    assert a.add([docs]).num_added == flat.add([docs]).num_added == 2
    b = open_on("b", config=EXACT)
    assert b.manifest.index.kind == open_on("c").manifest.index.kind == "pgvector", "the settings are in the database"
    (docs / "keys.md").write_text("# Keys of the vault\n\nRotate the keys of the vault.\n\n## More\n\nBurn old keys.\n")
    assert a.add([docs]).num_updated == 1
    corpus_of(b).refresh()
    with flat:
        flat.add([docs])
        for mode in MODES:
            expected = flat.search("keys of the vault", mode=mode)
            for kb in (a, b) if mode == "dense" else (a,):  # b's postings never had the removed words
                assert ranking(kb.search("keys of the vault", mode=mode)) == ranking(expected)
                filtered = kb.search("keys of the vault", mode=mode, where="title = Cats")
                assert {one.chunk.title for one in filtered.results} <= {"Cats"}
    assert a.digest().vectors == b.digest().vectors
    for kb in (a, b):
        assert not kb.verify().findings
        with corpus_of(kb).reading() as connection:
            assert connection.execute("SELECT sum(length(vector)) FROM vectors").fetchone() == (0,)
        assert not (kb.path / "dense.npz").exists()


@pytest.mark.usefixtures("extension")
def test_removed_document_is_gone_on_every_machine_at_once(open_on: Open, docs: Path, database: str) -> None:
    a, b = open_on("a", create=True, config=CONFIG), open_on("b", create=True, config=CONFIG)
    a.add([docs])
    corpus_of(b).refresh()
    a.remove([str(docs / "cats.md")])
    for mode in ("hybrid", "dense"):  # b has not heard of it
        assert [Path(one.chunk.document_id).name for one in b.search("cats sleep", mode=mode).results] == ["keys.md"]
    execute(database, "DELETE FROM stillroom.knowledge_bases")
    assert execute(database, f"SELECT count(*) FROM {embedding_table.table_of(corpus_of(a)._row.kb)}") == [(0,)]


@pytest.mark.usefixtures("extension")
def test_documented_statement_drops_the_tables_of_dropped_knowledge_bases(open_on: Open, database: str) -> None:
    a = open_on("a", create=True, config=CONFIG)
    with KnowledgeBase.open(f"{database}&kb=kept", CONFIG, create=True) as kept:
        tables = [embedding_table.table_of(corpus_of(one)._row.kb) for one in (a, kept)]
    execute(database, "DELETE FROM stillroom.knowledge_bases WHERE name = 'docs'")
    page = (Path(__file__).parents[4] / "docs/postgresql.md").read_text()
    statement = re.search(r'psql docs -At -c "([^"]*)" \| psql docs', page)
    assert statement is not None
    for (drop,) in execute(database, statement[1].replace("\\$", "$")):
        execute(database, drop)
    left = [execute(database, f"SELECT to_regclass('{table}')") for table in tables]
    assert left == [[(None,)], [(tables[1],)]]


@pytest.mark.usefixtures("extension")
def test_vector_that_another_machine_replaced_is_not_used_for_the_old_text(open_on: Open, docs: Path) -> None:
    a, b = open_on("a", create=True, config=CONFIG), open_on("b", create=True, config=CONFIG)
    path, before = docs / "keys.md", (docs / "keys.md").read_text()
    a.add([docs])
    corpus_of(b).refresh()
    path.write_text(before.replace("# Keys", "# Other"))  # the same chunk under another heading
    a.add([docs])
    (only,) = [one for one in b.corpus.documents() if one.document_id.endswith("keys.md")]
    assert b.corpus.chunks_of(only.document_id) == []
    path.write_text(f"{before}\nMore.\n")
    b.add([docs])
    corpus_of(a).refresh()
    with_keys = next(one for one in a.corpus.documents() if one.document_id.endswith("keys.md"))
    embedder = SmallEmbedder(CONFIG.embedder)
    for chunk, vector in a.corpus.chunks_of(with_keys.document_id):
        assert (vector == embedder.embed_documents([chunk.indexed_text])[0]).all()


@pytest.mark.usefixtures("extension")
def test_words_are_searched_while_the_server_is_away(
    open_on: Open, docs: Path, switch: Switch, caplog: pytest.LogCaptureFixture
) -> None:
    a = open_on("a", create=True, config=CONFIG)
    a.add([docs])
    before = ranking(a.search("vault"))
    switch(on=False)
    for _ in range(2):
        with pytest.raises(IndexUnavailableError, match="cannot be reached.*--mode sparse"):
            a.search("vault")
    assert a.search("vault", mode="sparse").results
    assert a.chunks_of(a.search("vault", mode="sparse").results[0].chunk.document_id), "text is on the machine"
    (docs / "cats.md").write_text("# Cats\n\nCats hunt.\n")
    with pytest.raises(DatabaseUnavailableError, match="nothing was changed"):
        a.add([docs])
    assert [one.part for one in a.verify().findings] == ["dense"]
    a.close()
    again = open_on("a")
    assert again.search("vault", mode="sparse").results
    with pytest.raises(IndexUnavailableError) as refused:
        again.search("vault")
    assert "nothing was changed" not in f"{refused.value}{caplog.text}", "a search changes nothing"
    assert "is away. Searches by words use the copy" in caplog.text and "cannot be reached" not in caplog.text
    switch(on=True)
    assert ranking(again.search("vault")) == before, "the same process goes on"


@pytest.mark.usefixtures("extension")
def test_broken_connection_is_replaced_within_the_search(open_on: Open, docs: Path, database: str) -> None:
    a = open_on("a", create=True, config=CONFIG)
    a.add([docs])
    before = ranking(a.search("vault"))
    execute(database, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'stillroom'")
    assert ranking(a.search("vault")) == before


@pytest.mark.usefixtures("extension")
def test_searches_wait_briefly_for_a_locked_table_and_say_so(open_on: Open, docs: Path, database: str) -> None:
    import psycopg

    a = open_on("a", create=True, config=CONFIG)
    a.add([docs])
    with psycopg.connect(database) as other:
        other.execute(f"LOCK {embedding_table.table_of(corpus_of(a)._row.kb)}")
        for mode in ("hybrid", "dense"):
            with pytest.raises(IndexUnavailableError, match="are locked.*try again later.*--mode sparse"):
                a.search("vault", mode=mode)
        assert a.search("vault", mode="sparse").results
    assert a.search("vault").results


@pytest.mark.usefixtures("extension")
def test_rebuilding_the_index_goes_on_beside_searches(open_on: Open, docs: Path, database: str) -> None:
    import psycopg

    a = open_on("a", create=True, config=CONFIG)
    a.add([docs])
    table = corpus_of(a).embedding_table
    assert table is not None
    name = f"embeddings_{corpus_of(a)._row.kb}"
    execute(database, f"CREATE INDEX {name}_hnsw_ccnew ON stillroom.{name} (chunk_id)")  # left by an interrupted run
    before = ranking(a.search("vault"))
    number = f"SELECT 'stillroom.{name}_hnsw'::regclass::oid, relfilenode FROM pg_class WHERE relname = '{name}_hnsw'"
    old = execute(database, number)
    with psycopg.connect(database) as other:
        other.execute(f"SELECT count(*) FROM stillroom.{name}")  # the rebuilding waits for this transaction
        rebuilding = threading.Thread(target=table.rebuild_index)
        rebuilding.start()
        while not execute(database, "SELECT 1 FROM pg_stat_activity WHERE query LIKE '%CONCURRENTLY stillroom%'"):
            time.sleep(0.01)
        assert ranking(a.search("vault")) == before
        assert rebuilding.is_alive()
    rebuilding.join()
    assert execute(database, number) != old
    indexes = f"SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 'stillroom.{name}'::regclass"
    assert {one for (one,) in execute(database, indexes)} == {f"stillroom.{name}_{end}" for end in ("pkey", "hnsw")}


def test_missing_extension_is_named(open_on: Open, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="as a superuser of the database run: CREATE EXTENSION vector"):
        open_on("a", create=True, config=CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr(embedding_table, "_IS_INSTALLED", "SELECT 0")
        with pytest.raises(ConfigError, match="install pgvector on the server"):
            open_on("a", create=True, config=CONFIG)
    assert execute(database, "SELECT to_regclass('stillroom.knowledge_bases')") == [(None,)], "nothing was made"
    execute(database, "CREATE EXTENSION vector")
    with monkeypatch.context() as patch:
        patch.setattr(embedding_table, "_OLDEST", (99, 0))
        with pytest.raises(ConfigError, match=r"the database has \d+\.\d+.*ALTER EXTENSION vector UPDATE"):
            open_on("a", create=True, config=CONFIG)
    open_on("a", create=True, config=CONFIG)
    assert execute(database, "SELECT version FROM stillroom.format") == [(2,)], "older releases refuse it"


def test_extension_in_a_schema_that_is_not_searched_is_named(open_on: Open, docs: Path, database: str) -> None:
    execute(database, 'CREATE SCHEMA "more types"')
    execute(database, 'CREATE EXTENSION vector SCHEMA "more types"')
    with pytest.raises(ConfigError, match='in the schema "more types".*search_path is "\\$user", public'):
        open_on("a", create=True, config=CONFIG)
    assert execute(database, "SELECT to_regclass('stillroom.knowledge_bases')") == [(None,)], "nothing was made"
    name = database.partition("?")[0].rpartition("/")[2]
    execute(database, f'ALTER DATABASE {name} SET search_path = "$user", public, "more types"')
    a = open_on("a", create=True, config=CONFIG)
    a.add([docs])
    assert len(a.search("vault", mode="dense").results) == 2


def test_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knowledge_base, "Embedder", SmallEmbedder)
    with pytest.raises(ConfigError, match="is a folder; give --kb postgresql://"):
        KnowledgeBase.open(tmp_path / "kb", CONFIG, create=True)
    assert not (tmp_path / "kb").exists()


@pytest.mark.usefixtures("extension")
def test_reading_needs_select_on_the_vectors(open_on: Open, docs: Path, database: str) -> None:
    open_on("a", create=True, config=CONFIG).add([docs])
    user = f"reader_{database.partition('?')[0].rpartition('/')[2]}"
    execute(database, f"CREATE ROLE {user} LOGIN")
    execute(database, f"GRANT USAGE ON SCHEMA stillroom TO {user}")
    execute(database, f"GRANT SELECT ON ALL TABLES IN SCHEMA stillroom TO {user}")
    reader = open_on("b", user=user)
    assert reader.search("vault", mode="dense").results
    kb = corpus_of(reader)._row.kb
    execute(database, f"REVOKE SELECT ON {embedding_table.table_of(kb)} FROM {user}")
    with pytest.raises(IndexUnavailableError, match="permission denied.*grant the user"):
        reader.search("vault", mode="dense")
    with pytest.raises(DatabaseRefusedError):
        reader.remove([str(docs)])


@pytest.mark.usefixtures("extension")
def test_new_table_has_the_grants_of_the_others(
    open_on: Open, docs: Path, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_on("a", create=True)
    name = database.partition("?")[0].rpartition("/")[2]
    reader, writer = f"Reader {name}", f"writer_{name}"
    for user, granted in ((reader, "SELECT"), (writer, "SELECT, INSERT, UPDATE, DELETE")):
        execute(database, f'CREATE ROLE "{user}" LOGIN')
        execute(database, f'GRANT USAGE ON SCHEMA stillroom TO "{user}"')
        execute(database, f'GRANT {granted} ON ALL TABLES IN SCHEMA stillroom TO "{user}"')
    execute(database, f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA stillroom TO {writer}")

    def opened(user: str, kb: str, *, create: bool = False) -> KnowledgeBase:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / user.partition(" ")[0]))
        url = database.replace("postgres:@", f"{user.replace(' ', '%20')}:@")
        return KnowledgeBase.open(f"{url}&kb={kb}", CONFIG, create=create)

    with opened("postgres", "second", create=True) as owner, opened(writer, "second") as changing:
        assert changing.add([docs]).num_added == 2
        with opened(reader, "second") as reading:
            assert len(reading.search("vault", mode="dense").results) == 2
        assert owner.num_documents == 0
    execute(database, f"GRANT CREATE ON SCHEMA stillroom TO {writer}")
    execute(database, f"GRANT REFERENCES ON stillroom.vectors TO {writer}")
    with opened(writer, "third", create=True) as third, opened("postgres", "third") as owner:
        third.add([docs])
        with opened(reader, "third") as reading:
            assert len(reading.search("vault", mode="dense").results) == 2
        corpus_of(owner).refresh()
        owner.remove([str(docs / "cats.md")])


@pytest.mark.usefixtures("extension")
def test_migrating_into_pgvector_and_back_keeps_every_vector(open_on: Open, docs: Path, tmp_path: Path) -> None:
    target = open_on("a", create=True, config=CONFIG)
    with KnowledgeBase.open(tmp_path / "kb", StillroomConfig(), create=True) as folder:
        folder.add([docs])
        report = migrate(folder, target, lambda *_: None)
        assert report.digest == corpus_digest(folder.corpus)
    back = tmp_path / "again"
    manifest = target_manifest(target.manifest, CONFIG.index, back)
    with KnowledgeBase.open(back, StillroomConfig(), create=manifest) as again:
        assert migrate(target, again, lambda *_: None).digest == report.digest
        assert ranking(again.search("vault")) == ranking(target.search("vault"))
    assert manifest.index.kind == "flat"
    hnsw = target_manifest(target.manifest, IndexConfig(kind="hnsw"), back)
    assert hnsw.index.kind == "hnsw"


@pytest.mark.usefixtures("extension")
def test_commands_work_with_vectors_in_pgvector(
    docs: Path, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, url = runner(capfd), f"{database}&kb=cli"
    monkeypatch.setattr(knowledge_base, "Embedder", SmallEmbedder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with KnowledgeBase.open(tmp_path / "kb", StillroomConfig(), create=True) as folder:
        folder.add([docs])
    monkeypatch.setenv("STILLROOM_INDEX__KIND", "pgvector")
    moved = run("migrate", str(tmp_path / "kb"), url)
    assert moved.code == 0, moved.err
    assert "keeps the settings" not in moved.err
    back = run("migrate", url, str(tmp_path / "back"))
    assert back.code == 0 and "keeps the settings" not in back.err, back.err
    flat = f"{database}&kb=flat"
    monkeypatch.delenv("STILLROOM_INDEX__KIND")
    assert run("migrate", str(tmp_path / "kb"), flat).code == 0
    monkeypatch.setenv("STILLROOM_INDEX__KIND", "pgvector")
    existing = run("migrate", str(tmp_path / "kb"), flat)
    assert existing.err.count("keeps the settings") == 1 and "kb=flat keeps the settings" in existing.err, existing.err
    monkeypatch.delenv("STILLROOM_INDEX__KIND")
    refused = run("reembed", "--model", "/other", "--kb", url)
    assert refused.code != 0 and "cannot be changed in place" in refused.err
    with KnowledgeBase.open(url, StillroomConfig()) as kb:
        assert kb.manifest.index.kind == "pgvector"
        found = kb.search("keys of the vault", mode="dense").results
        assert [Path(one.chunk.document_id).name for one in found] == ["keys.md", "cats.md"]
