"""No KV of removed documents is kept, whichever process removed them and when."""

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId, RequestId
from stillroom.core.kv import NO_TENANT, Tier, owner_of
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent
from stillroom.errors import KnowledgeBaseNotFoundError
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.lease_admission import Reuse
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.pieces import PrefixKeys
from stillroom.kvcache.tree.tree_options import TreeOptions
from stillroom.scheduler.limits import SchedulerLimits
from stillroom.scheduler.scheduler import Scheduler
from tests.fakes import ManualClock
from tests.kvcache.prefix_memory import PrefixMemory, PrefixRunner

SIZE = 4


class FakeCorpus:
    """Documents that another process removes."""

    def __init__(self, *documents: int) -> None:
        self.documents = {ChunkId(document) for document in documents}
        self.num_changes = 0
        self.num_asked = 0

    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        self.num_asked += 1
        return self.documents & set(chunk_ids)

    def removed_since(self, num_changes: int) -> tuple[ChunkId, ...]:
        return ()

    def chunks_before(self, chunk_ids: Collection[ChunkId], limit: int) -> dict[ChunkId, tuple[ChunkId, ...]]:
        """Each document is one chunk."""
        return dict.fromkeys(chunk_ids, ())

    def chunks(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, Chunk]:
        return {one: Chunk(one, DocumentId(str(one)), 0, "") for one in chunk_ids if one in self.documents}

    def remove(self, document: int) -> None:
        self.documents.remove(ChunkId(document))
        self.num_changes += 1


class UnreadableCorpus(FakeCorpus):
    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        raise OSError("the disk is gone")


class RemovedCorpus(FakeCorpus):
    """A knowledge base whose folder was deleted."""

    @property
    def num_changes(self) -> int:
        raise KnowledgeBaseNotFoundError

    @num_changes.setter
    def num_changes(self, value: int) -> None:
        assert value == 0

    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        raise KnowledgeBaseNotFoundError


class CorpusFixture:
    """An engine without tensors."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.memory = PrefixMemory(SIZE)
        self.runner = PrefixRunner(self.memory)
        pool = BlockPool(40, SIZE)
        options = TreeOptions(disk_bytes=1000)
        self.tree = KnowledgeTree(pool, self.memory, linear_profile(1e-3, 1e-3, 0.0), options, self.clock.monotonic)
        manager = KVCacheManager(pool, Reuse(self.tree, PrefixKeys(b"m", SIZE)))
        limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=80)
        self.engine = Engine(Scheduler(manager, limits), self.runner, self.clock)

    def request(self, name: str, *documents: int, salt: str = "") -> Request:
        segments = [Segment(SegmentKind.SYSTEM, (40,) * SIZE)]
        segments += [Segment(SegmentKind.CHUNK, (d,) * SIZE, ChunkId(d)) for d in documents]
        prompt = SegmentedPrompt((*segments, Segment(SegmentKind.QUESTION, (30, 31))))
        self.runner.protect(RequestId(name), prompt.token_ids)
        return Request(
            request_id=RequestId(name), prompt=prompt, sampling=SamplingParams(max_tokens=2), cache_salt=salt
        )

    def finish(self) -> None:
        while self.engine.has_work:
            self.engine.step()
        self.engine.check_integrity()

    def read(self, name: str, *documents: int) -> None:
        self.engine.submit(self.request(name, *documents))
        self.finish()

    def stored(self) -> set[ChunkId | None]:
        return {record.chunk_id for record in self.memory.records.values()}


def test_document_removed_by_another_process_is_not_stored_while_idle() -> None:
    fixture, corpus = CorpusFixture(), FakeCorpus(1, 2)
    fixture.engine.follow("", corpus)
    fixture.read("a", 1, 2)
    corpus.remove(2)
    while fixture.engine.do_idle_work():
        pass
    assert fixture.stored() == {None, ChunkId(1)}
    assert fixture.tree.chunk_ids() == {ChunkId(1)}


def test_document_removed_by_another_process_is_dropped_within_seconds_while_idle() -> None:
    fixture, corpus = CorpusFixture(), FakeCorpus(1, 2)
    waits = [fixture.engine.retry_in]
    fixture.engine.follow("", corpus)
    fixture.read("a", 1, 2)
    while fixture.engine.do_idle_work():
        pass
    corpus.remove(2)
    waits.append(fixture.engine.retry_in)
    assert waits == [None, 2.0]
    fixture.clock.advance(2)
    fixture.engine.do_idle_work()
    on_disk = fixture.memory.lower[Tier.DISK]
    assert fixture.tree.chunk_ids() == {ChunkId(1)}
    assert {fixture.memory.records[key].chunk_id for key in on_disk} == {None, ChunkId(1)}


def test_unreadable_corpus_is_reported_once_while_idle(caplog: pytest.LogCaptureFixture) -> None:
    fixture = CorpusFixture()
    fixture.engine.follow("", UnreadableCorpus(1))
    for _ in range(3):
        fixture.engine.do_idle_work()
    assert len(caplog.records) == 1


def test_document_removed_by_another_process_is_dropped_with_the_next_question() -> None:
    fixture, corpus = CorpusFixture(), FakeCorpus(1, 2)
    fixture.engine.follow("", corpus)
    fixture.read("a", 1, 2)
    corpus.remove(2)
    fixture.engine.submit(fixture.request("b", 1))
    assert fixture.tree.chunk_ids() == {ChunkId(1)}


def test_document_removed_between_search_and_prompt_is_not_kept() -> None:
    fixture, corpus = CorpusFixture(), FakeCorpus(1, 2, 3)
    fixture.engine.follow("", corpus)
    found = fixture.request("a", 1, 2, 3)
    corpus.remove(2)
    fixture.engine.catch_up()
    fixture.engine.submit(found)
    fixture.finish()
    assert fixture.tree.chunk_ids() == {ChunkId(1)}


def test_removed_knowledge_base_drops_the_kv_of_its_tenant_only() -> None:
    fixture = CorpusFixture()
    for name, salt in (("a", ""), ("b", "other")):
        fixture.engine.follow(salt, FakeCorpus(1, 2))
        fixture.engine.submit(fixture.request(name, 1, 2, salt=salt))
        fixture.finish()
    while fixture.engine.do_idle_work():
        pass
    fixture.engine.follow("other", RemovedCorpus())
    fixture.engine.catch_up()
    assert {node.owner for node in fixture.tree} == {NO_TENANT}
    on_disk = fixture.memory.lower[Tier.DISK]
    assert {fixture.memory.records[key].owner for key in on_disk} == {NO_TENANT}
    fixture.engine.check_integrity()


def test_running_request_of_a_removed_knowledge_base_keeps_no_kv() -> None:
    fixture = CorpusFixture()
    fixture.engine.follow("", RemovedCorpus())
    fixture.engine.submit(fixture.request("a", 1, 2))
    fixture.finish()
    assert len(fixture.tree) == 0


def test_close_drops_removed_documents_first() -> None:
    fixture, corpus, is_read = CorpusFixture(), FakeCorpus(1, 2), threading.Event()

    def listen(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            is_read.set()

    with AsyncEngine(fixture.engine) as running:
        running.documents_changed("", corpus)
        running.submit(fixture.request("a", 1, 2), listen)
        assert is_read.wait(30)
        corpus.remove(2)
    assert fixture.tree.chunk_ids() == {ChunkId(1)}


def test_documents_of_one_tenant_do_not_affect_another() -> None:
    fixture, corpus = CorpusFixture(), FakeCorpus(1)
    fixture.engine.follow("a", corpus)
    fixture.engine.follow("b", FakeCorpus(2))
    fixture.engine.submit(fixture.request("a", 1, salt="a"))
    fixture.engine.submit(fixture.request("b", 2, salt="b"))
    fixture.finish()
    corpus.remove(1)
    fixture.engine.catch_up()
    assert (fixture.tree.chunk_ids(owner_of("a")), fixture.tree.chunk_ids(owner_of("b"))) == (set(), {ChunkId(2)})


def test_closed_corpus_is_not_read() -> None:
    fixture, corpus = CorpusFixture(), FakeCorpus(1)
    fixture.engine.follow("", corpus)
    fixture.engine.unfollow("")
    fixture.read("a", 1)
    fixture.engine.do_idle_work()
    assert fixture.tree.chunk_ids() == {ChunkId(1)} and corpus.num_asked == 0


def test_unreadable_corpus_stops_no_request(caplog: pytest.LogCaptureFixture) -> None:
    fixture = CorpusFixture()
    fixture.engine.follow("", UnreadableCorpus(1))
    fixture.read("a", 1)
    assert "removed documents cannot be determined" in caplog.text


def test_promoted_sample_keeps_no_kv_of_a_removed_document() -> None:
    fixture = CorpusFixture()
    leader = fixture.request("a", 1, 2)
    fixture.runner.protect(RequestId("b"), leader.prompt.token_ids)
    fixture.engine.submit(leader, replace(leader, request_id=RequestId("b")))
    fixture.engine.scheduler.forget_chunks(lambda chunk_ids: chunk_ids - {ChunkId(2)})
    fixture.engine.cancel(RequestId("a"))
    fixture.finish()
    assert fixture.tree.chunk_ids() == {ChunkId(1)}
