"""Nothing is kept of documents that are gone, whoever removed them and whenever that was."""

import threading
from collections.abc import Collection
from dataclasses import replace

import pytest

from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.kv import NO_TENANT, Tier, owner_of
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.async_engine import AsyncEngine
from stillroom.engine.engine import Engine
from stillroom.engine.events import TokenEvent
from stillroom.errors import KnowledgeBaseNotFoundError
from stillroom.kvcache.blocks.pool import BlockPool
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


class Library:
    """Documents that somebody else removes."""

    def __init__(self, *documents: int) -> None:
        self.documents = {ChunkId(document) for document in documents}
        self.num_changes = 0
        self.num_asked = 0

    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        self.num_asked += 1
        return self.documents & set(chunk_ids)

    def remove(self, document: int) -> None:
        self.documents.remove(ChunkId(document))
        self.num_changes += 1


class Broken(Library):
    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        raise OSError("the disk is gone")


class Removed(Library):
    """As a knowledge base whose folder was deleted."""

    @property
    def num_changes(self) -> int:
        raise KnowledgeBaseNotFoundError

    @num_changes.setter
    def num_changes(self, value: int) -> None:
        assert value == 0

    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        raise KnowledgeBaseNotFoundError


class Reader:
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


def test_what_another_process_removed_is_not_stored_in_an_idle_moment() -> None:
    reader, library = Reader(), Library(1, 2)
    reader.engine.follow("", library)
    reader.read("a", 1, 2)
    library.remove(2)
    while reader.engine.do_idle_work():
        pass
    assert reader.stored() == {None, ChunkId(1)}
    assert reader.tree.chunk_ids() == {ChunkId(1)}


def test_what_another_process_removed_goes_with_the_next_question() -> None:
    reader, library = Reader(), Library(1, 2)
    reader.engine.follow("", library)
    reader.read("a", 1, 2)
    library.remove(2)
    reader.engine.submit(reader.request("b", 1))
    assert reader.tree.chunk_ids() == {ChunkId(1)}


def test_a_document_that_was_removed_between_search_and_prompt_is_not_kept() -> None:
    reader, library = Reader(), Library(1, 2, 3)
    reader.engine.follow("", library)
    found = reader.request("a", 1, 2, 3)
    library.remove(2)
    reader.engine.catch_up()
    reader.engine.submit(found)
    reader.finish()
    assert reader.tree.chunk_ids() == {ChunkId(1)}


def test_a_knowledge_base_that_is_gone_takes_all_of_its_tenants_kv_and_no_others() -> None:
    reader = Reader()
    for name, salt in (("a", ""), ("b", "other")):
        reader.engine.follow(salt, Library(1, 2))
        reader.engine.submit(reader.request(name, 1, 2, salt=salt))
        reader.finish()
    while reader.engine.do_idle_work():
        pass
    reader.engine.follow("other", Removed())
    reader.engine.catch_up()
    assert {node.owner for node in reader.tree} == {NO_TENANT}
    on_disk = reader.memory.lower[Tier.DISK]
    assert {reader.memory.records[key].owner for key in on_disk} == {NO_TENANT}
    reader.engine.check_integrity()


def test_nothing_is_kept_of_a_request_under_way_when_its_knowledge_base_is_gone() -> None:
    reader = Reader()
    reader.engine.follow("", Removed())
    reader.engine.submit(reader.request("a", 1, 2))
    reader.finish()
    assert len(reader.tree) == 0


def test_who_closes_forgets_first_what_is_gone() -> None:
    reader, library, is_read = Reader(), Library(1, 2), threading.Event()

    def listen(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            is_read.set()

    with AsyncEngine(reader.engine) as running:
        running.documents_changed("", library)
        running.submit(reader.request("a", 1, 2), listen)
        assert is_read.wait(30)
        library.remove(2)
    assert reader.tree.chunk_ids() == {ChunkId(1)}


def test_documents_of_one_tenant_say_nothing_of_anothers() -> None:
    reader, library = Reader(), Library(1)
    reader.engine.follow("a", library)
    reader.engine.follow("b", Library(2))
    reader.engine.submit(reader.request("a", 1, salt="a"))
    reader.engine.submit(reader.request("b", 2, salt="b"))
    reader.finish()
    library.remove(1)
    reader.engine.catch_up()
    assert (reader.tree.chunk_ids(owner_of("a")), reader.tree.chunk_ids(owner_of("b"))) == (set(), {ChunkId(2)})


def test_documents_that_are_closed_are_not_asked() -> None:
    reader, library = Reader(), Library(1)
    reader.engine.follow("", library)
    reader.engine.unfollow("")
    reader.read("a", 1)
    reader.engine.do_idle_work()
    assert reader.tree.chunk_ids() == {ChunkId(1)} and library.num_asked == 0


def test_documents_that_cannot_be_seen_stop_nobody(caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader()
    reader.engine.follow("", Broken(1))
    reader.read("a", 1)
    assert "removed documents cannot be determined" in caplog.text


def test_a_sample_that_takes_over_keeps_nothing_of_a_removed_document() -> None:
    reader = Reader()
    leader = reader.request("a", 1, 2)
    reader.runner.protect(RequestId("b"), leader.prompt.token_ids)
    reader.engine.submit(leader, replace(leader, request_id=RequestId("b")))
    reader.engine.scheduler.forget_chunks(lambda chunk_ids: chunk_ids - {ChunkId(2)})
    reader.engine.cancel(RequestId("a"))
    reader.finish()
    assert reader.tree.chunk_ids() == {ChunkId(1)}
