"""Tenants share a model, and no request of a tenant shows in the answers of another.

The tests use the same documents and questions for all tenants, so that any shared KV or result would be reused.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from stillroom.config.settings import QueryCacheConfig, ReuseConfig, SpeculationConfig, StillroomConfig
from stillroom.core.kv import NO_TENANT, owner_of
from stillroom.engine.engine import Engine
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvstore.disk import DiskStore
from stillroom.kvstore.files import KV_FOLDER, record_paths, usage
from stillroom.rag.answer import Answer, AskOptions
from stillroom.rag.stillroom import Stillroom
from stillroom.telemetry.trace import TRACE_FILE, TraceLog
from tests.kvstore.nodes import key, record, sealed
from tests.rag.countries import TEXTS
from tests.server.fakes import until

pytestmark = pytest.mark.microworld

NO_SPECULATION = SpeculationConfig(mode="off")
"""Without speculation, because a tenant's speculative prompts would be reused by its own next one."""
QUESTION = "What is the capital of Ardun ?"
LONG = " ".join(["What is the river of Corvia ?"] * 30)
"""So long that KV of the question itself is cached."""


def reasons(answer: Answer) -> list[str]:
    return [segment.reason for segment in answer.reuse.segments[:-1]]


@pytest.mark.parametrize("mode", ["exact", "anywhere"])
def test_same_question_on_same_documents_reuses_nothing_of_another_tenant(
    docs: Path, tmp_path: Path, mode: str
) -> None:
    config = StillroomConfig(
        reuse=ReuseConfig(load="always", mode=mode),  # type: ignore[arg-type]
        speculation=NO_SPECULATION,
    )
    with Stillroom.open(tmp_path / "own", config=config) as own:
        own.add(docs)
        first, again = own.ask(QUESTION), own.ask(QUESTION)
        own.ask("What is the river of Corvia ?")
        long = own.ask(LONG)
        assert again.reuse.num_cached_tokens > 0, "a tenant reuses its own KV"
        assert own.ask(LONG).reuse.num_cached_tokens > long.reuse.num_prompt_tokens - 64 - 16

        with own.for_tenant(tmp_path / "a", "a") as a, own.for_tenant(tmp_path / "b", "b") as b:
            for stillroom in (a, b):
                stillroom.add(docs)
                answer = stillroom.ask(QUESTION)
                assert answer.reuse.num_cached_tokens == answer.reuse.num_recomputed_tokens == 0
                assert set(reasons(answer)) == {"never seen"}
                assert (answer.text, answer.token_ids) == (first.text, first.token_ids)
                asked = [one for one in stillroom.ask(LONG).reuse.segments if one.kind == "question"]
                assert {one.source for one in asked} == {"computed"}
                assert stillroom.ask(QUESTION).reuse.num_cached_tokens == again.reuse.num_cached_tokens
            assert own.ask(QUESTION).reuse.num_cached_tokens == again.reuse.num_cached_tokens
        assert own.ask(QUESTION).text == first.text, "closing a tenant leaves the engine running"


def test_raw_prompts_and_kv_on_disk_are_not_shared_between_tenants(docs: Path, tmp_path: Path) -> None:
    import asyncio

    config = StillroomConfig(reuse=ReuseConfig(load="always"), speculation=NO_SPECULATION)

    def continued(stillroom: Stillroom) -> int:
        async def read() -> int:
            [stream] = await stillroom.acontinue(LONG, AskOptions(max_tokens=1))
            async for _ in stream:
                pass
            return stream.answer.reuse.num_cached_tokens

        return asyncio.run(read())

    with Stillroom.open(tmp_path / "own", config=config) as own:
        own.add(docs)
        own.ask(QUESTION)
        assert (continued(own), continued(own) > 0) == (0, True)
        with own.for_tenant(tmp_path / "a", "a") as a:
            a.add(docs)
            assert (continued(a), continued(a) > 0) == (0, True)
    assert usage(tmp_path / "own" / KV_FOLDER)[0].num_records > 0, "KV is on disk"
    with Stillroom.open(tmp_path / "own", config=config) as own:
        with own.for_tenant(tmp_path / "b", "b") as b, own.for_tenant(tmp_path / "a", "a") as a:
            b.add(docs)
            assert b.ask(QUESTION).reuse.num_cached_tokens == 0
            assert continued(b) == 0
            assert continued(a) > 0, "a tenant reuses its own KV"
        assert own.ask(QUESTION).reuse.num_disk_tokens > 0


def test_recreated_knowledge_base_reuses_nothing_of_the_old_one(docs: Path, tmp_path: Path) -> None:
    with Stillroom.open(tmp_path / "own", config=StillroomConfig(speculation=NO_SPECULATION)) as own:
        for folder in ("old", "new"):
            with own.for_tenant(tmp_path / folder, "a") as stillroom:
                stillroom.add(docs)
                assert stillroom.ask(QUESTION).reuse.num_cached_tokens == 0


def test_tenants_share_weights_but_no_search_result_and_no_vector(docs: Path, tmp_path: Path) -> None:
    config = StillroomConfig(query_cache=QueryCacheConfig(similarity=0.95))
    with (
        Stillroom.open(tmp_path / "own", config=config) as own,
        own.for_tenant(tmp_path / "a", "a") as a,
    ):
        for stillroom in (own, a):
            stillroom.add(docs)
            found = stillroom.search(QUESTION)
            assert found.embed_seconds > 0 and found.search_seconds > 0, "it was searched"
            assert stillroom.search(QUESTION).search_seconds == 0, "a tenant's own results are cached"
            assert stillroom._search.num_hits == 1
            assert stillroom._kb._active.opened.embedder._cached.cache_info().misses == 1
        assert a._kb._active.opened.embedder._load() is own._kb._active.opened.embedder._load()


def test_removing_a_document_drops_its_kv_for_that_tenant_only(docs: Path, tmp_path: Path) -> None:
    """Otherwise a tenant could tell, by removing and adding a document, whether another tenant has the same."""
    with (
        Stillroom.open(tmp_path / "own", config=StillroomConfig(speculation=NO_SPECULATION)) as own,
        own.for_tenant(tmp_path / "a", "a") as a,
    ):
        for stillroom in (own, a):
            stillroom.add(docs)
            stillroom.ask(QUESTION)
            stillroom.ask(QUESTION)
        a.remove(str(docs / "ardun.txt"))
        kept = own.ask(QUESTION).reuse.num_cached_tokens
        assert kept > 0
        a.add(docs / "ardun.txt")
        answer = a.ask(QUESTION)
        assert answer.reuse.segments[1].source == "computed"
        assert own.ask(QUESTION).reuse.num_cached_tokens == kept


def test_tenant_without_requests_drops_its_kv_with_its_document(docs: Path, tmp_path: Path) -> None:
    """Its records are in the owner's folder, from an earlier process."""
    with Stillroom.open(tmp_path / "own") as own, own.for_tenant(tmp_path / "a", "a") as a:
        a.add(docs)
        document = a.documents()[0].document_id
        store = DiskStore(tmp_path / "own" / KV_FOLDER, bytes(32))
        mine = record(1, chunk=a.chunks_of(document)[0].chunk_id)
        for node in (replace(mine, owner=owner_of(f"a\0{a._kb.identity}")), replace(mine, key=key(2), parent=key(2))):
            assert store.write(node, *sealed(1))
        store.close()
        a.remove(document)
        assert [path.stem for path in record_paths(store.folder)] == [key(2).hex()], "records of other owners stay"


def test_each_tenant_has_its_own_request_log(docs: Path, tmp_path: Path) -> None:
    with (
        Stillroom.open(tmp_path / "own", config=StillroomConfig(speculation=NO_SPECULATION)) as own,
        own.for_tenant(tmp_path / "a", "a") as a,
    ):
        a.add(docs)
        answer = a.ask(QUESTION)
    logs = [TraceLog(tmp_path / name / TRACE_FILE, keep=0) for name in ("own", "a")]
    assert [log.get(answer.request_id) is not None for log in logs] == [False, True]
    for log in logs:
        log.close()


def test_documents_of_all_tenants_are_counted(docs: Path, tmp_path: Path) -> None:
    with (
        Stillroom.open(tmp_path / "own", config=StillroomConfig(speculation=NO_SPECULATION)) as own,
        own.for_tenant(tmp_path / "a", "a") as a,
    ):
        own.add(docs)
        a.add(docs / "ardun.txt")
        assert "stillroom_documents 4.0" in own.metrics.render().decode()


def test_tags_tell_tenants_apart() -> None:
    assert owner_of("") == NO_TENANT != owner_of("a") != owner_of("b")


def test_no_tenant_is_ready_after_the_engine_has_failed(
    docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Engine) -> bool:
        raise MemoryError

    monkeypatch.setattr(KnowledgeTree, "store_next", lambda _: False)
    with Stillroom.open(tmp_path / "own") as own, own.for_tenant(tmp_path / "a", "a") as a:
        for stillroom in (own, a):
            assert not stillroom.is_ready
            stillroom.add(docs)
            stillroom.ask(QUESTION)
            assert stillroom.is_ready
        monkeypatch.setattr(Engine, "has_work", property(broken))
        own.remove(str(docs / f"{next(iter(TEXTS))}.txt"))  # wakes the engine
        until(lambda: not own.is_ready and not a.is_ready)
    assert not list((tmp_path / "own" / KV_FOLDER).rglob("*.kv")), "KV of a failed engine is not stored"
