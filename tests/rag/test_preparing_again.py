"""Prepared KV that made room for used KV is prepared again when there is room, and no pass repeats another's work.

The preparer is the product's, over the simulated memory of `PreparedFixture`. Each document is one window.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.backends.document_windows import DocumentWindow
from stillroom.cluster.document_share import DocumentShare
from stillroom.core.cancellation import Cancellation
from stillroom.core.document import Chunk, DocumentInfo
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.core.kv import Tier
from stillroom.rag.preparing import DocumentPreparer
from tests.examples import most_examples
from tests.fakes import ManualClock
from tests.kvcache.prepared_fixture import SIZE, PreparedFixture

NO_DEMAND: Any = type("NoDemand", (), {"of": lambda self, document: 0})()


def with_header(payload_size: int, num_seen: int, notes_size: int) -> int:
    return payload_size + 1


RECORD = with_header(SIZE, 1, 0)


@dataclass
class Corpus:
    """Stands for the knowledge base: document d has the chunks 10 d + 1 to 10 d + n."""

    sizes: dict[int, int] = field(default_factory=dict)
    added_at: dict[int, float] = field(default_factory=dict)
    num_changes: int = 0

    def documents(self) -> list[DocumentInfo]:
        return [DocumentInfo(DocumentId(str(one)), "", num, 0, self.added_at[one]) for one, num in self.sizes.items()]

    def chunks_of(self, document: DocumentId) -> list[Chunk]:
        return [Chunk(ChunkId(one), document, place, "") for place, one in enumerate(self.ids(int(document)))]

    def ids(self, document: int) -> list[int]:
        return [10 * document + number for number in range(1, self.sizes[document] + 1)]


@dataclass
class Windows:
    """Stands for `DocumentWindows`, and computes at once."""

    fixture: PreparedFixture
    num_computed: int = 0
    num_looked_at: int = 0
    may_store: bool = True

    def windows_of(self, chunks: Sequence[Chunk]) -> list[DocumentWindow]:
        self.num_looked_at += 1
        return [DocumentWindow(tuple(chunks), 0)] if chunks else []

    @property
    def num_bytes(self) -> int:
        return 0

    @property
    def num_displaced_bytes(self) -> int:
        return self.fixture.tree.stats.displaced_bytes

    def fits_again(self, num_displaced: int) -> bool:
        return self.fixture.tree.tiers.fits_again(num_displaced)

    def compute(self, window: DocumentWindow, stop: Cancellation) -> bool:
        ids = [chunk.chunk_id for chunk in window.chunks]
        if not self.fixture.manager.has_to_prepare(self.fixture.preparing(ids)):
            return False
        self.num_computed += 1
        system = self.fixture.exact()
        has_system = system is not None and system.is_in(Tier.DISK)
        self.fixture.prepare(ids)
        while self.fixture.manager.store_next():
            self.fixture.check()
        stored = {node.chunk_id for node in self.fixture.tree if node.document_path and node.is_in(Tier.DISK)}
        assert stored.issuperset(ids) or not has_system, "a window was computed that has no room"
        return True


class Service:
    """A server that prepares documents while questions come."""

    def __init__(self, disk_bytes: int, unused_bytes: int) -> None:
        options = {"disk_bytes": disk_bytes, "unused_disk_bytes": unused_bytes, "size_on_disk": with_header}
        self.fixture = PreparedFixture(num_blocks=40, options=options)
        self.clock, self.corpus, self.windows = ManualClock(), Corpus(), Windows(self.fixture)
        self.preparer = self.new_preparer()

    def new_preparer(self) -> DocumentPreparer:
        return DocumentPreparer(
            cast(Any, self.corpus), lambda: cast(Any, self.windows), NO_DEMAND, cast(Any, self.clock)
        )

    def add(self, document: int, num_chunks: int) -> None:
        if document not in self.corpus.sizes:
            self.corpus.num_changes += 1
            self.corpus.sizes[document] = num_chunks
            self.corpus.added_at[document] = float(self.corpus.num_changes)

    def remove(self, document: int) -> None:
        if document in self.corpus.sizes:
            self.fixture.forget(self.corpus.ids(document))
            del self.corpus.sizes[document]
            self.corpus.num_changes += 1

    def ask(self, chunks: Sequence[int]) -> None:
        """Answer from chunks of no document, whose KV then leaves the device for the disk."""
        self.fixture.ask(chunks)
        self.fixture.tree.make_room(40)
        self.fixture.check()

    def wait(self) -> int:
        """Return how many windows the preparer computes after an idle minute."""
        before = self.windows.num_computed
        self.clock.advance(61.0)
        self.preparer.run_if_due()
        return self.windows.num_computed - before

    def prepared(self) -> set[int]:
        """The documents of which every chunk is kept."""
        kept = {path[-1] for path in self.fixture.copies()}
        return {document for document in self.corpus.sizes if kept.issuperset(self.corpus.ids(document))}


def test_documents_whose_kv_made_room_are_prepared_again_when_that_is_free() -> None:
    service = Service(disk_bytes=7 * RECORD, unused_bytes=6 * RECORD)
    service.add(1, 2)
    service.add(2, 2)
    service.add(3, 2)
    assert service.wait() == 3 and service.prepared() == {1, 2, 3}
    service.ask((81, 82, 83))
    lost = {1, 2, 3} - service.prepared()
    assert lost and service.wait() == 0, "there is no room"
    service.fixture.forget((81, 82, 83))
    assert service.wait() == len(lost) and service.prepared() == {1, 2, 3}
    num_looked_at = service.windows.num_looked_at
    assert [service.wait() for _ in range(3)] == [0, 0, 0] and service.windows.num_looked_at == num_looked_at


def test_documents_whose_records_are_damaged_are_prepared_again() -> None:
    service = Service(disk_bytes=7 * RECORD, unused_bytes=6 * RECORD)
    service.add(1, 2)
    service.add(2, 2)
    assert service.wait() == 2
    service.fixture.tree.make_room(40)
    service.fixture.memory.damaged |= {node.key for node in service.fixture.tree if node.chunk_id == 11}
    service.ask((11, 12))
    assert service.prepared() == {2}
    assert service.wait() == 1 and service.prepared() == {1, 2} and service.wait() == 0


def test_pass_says_at_its_begin_and_end_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(disk_bytes=6 * RECORD, unused_bytes=4 * RECORD)
    service.add(1, 2)
    service.add(2, 3)
    with caplog.at_level(logging.INFO, "stillroom.rag.preparing"):
        service.wait()
        service.wait()
    assert [record.getMessage() for record in caplog.records] == [
        "preparing 2 documents, 5 chunks, while no question waits",
        "prepared windows with 4 chunks in 0.0 s; 1 of 2 documents, 4 of 5 chunks are prepared; the budget is full",
    ]


numbers = st.integers(1, 6)
actions = st.one_of(
    st.tuples(st.just("add"), numbers, st.integers(1, 3)),
    st.tuples(st.just("remove"), numbers),
    st.tuples(st.just("ask"), st.lists(st.integers(81, 89), min_size=1, max_size=4, unique=True)),
    st.tuples(st.just("forget"), st.integers(81, 89)),
    st.tuples(st.just("wait")),
)
budgets = st.integers(0, 16 * RECORD)


@given(budgets, budgets, st.lists(actions, max_size=30))
@settings(max_examples=most_examples(100), deadline=None)
def test_preparing_ends_when_nothing_changes(disk: int, unused: int, steps: list[Any]) -> None:
    service = Service(disk, unused)
    for name, *arguments in steps:
        if name == "forget":
            service.fixture.forget(arguments)
        else:
            getattr(service, name)(*arguments)
    service.wait()
    service.wait()
    assert [service.wait() for _ in range(3)] == [0, 0, 0], "without questions, a third pass computes nothing"
    displaced = service.windows.num_displaced_bytes
    if not displaced or service.windows.fits_again(displaced):
        service.preparer = service.new_preparer()
        assert service.wait() == 0, "a restart, which looks at every document, finds nothing left to do"


def test_engine_of_a_cluster_prepares_its_share_and_again_when_that_grows() -> None:
    engines = ["http://a:9100", "http://b:9100"]
    service = Service(disk_bytes=99 * RECORD, unused_bytes=99 * RECORD)
    for document in range(1, 9):
        service.add(document, 1)
    service.preparer.share = share = DocumentShare(waits=True)
    assert service.wait() == 0, "it knows of no front yet"
    share.tell(engines, engines[0], now=0.0)
    own = {document for document in range(1, 9) if share.has(DocumentId(str(document)))}
    assert service.wait() == len(own) and service.prepared() == own and 0 < len(own) < 8
    assert service.wait() == 0
    share.tell(engines[:1], engines[0], now=60.0)
    assert service.wait() == 8 - len(own) and service.prepared() == set(range(1, 9))
