"""Properties of a corpus as a state machine of hypothesis: every step is also done in plain dictionaries, the oracle.

An index that follows `changes_since` from any earlier generation must end with exactly the stored chunks and vectors.
"""

import contextlib
import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId, chunk_id_of, public_id
from stillroom.core.metadata import Metadata
from stillroom.retrieval.filters.language import parse_filter
from stillroom.retrieval.filters.sql import condition_of
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.sql_rows import SourceFile, SourceUpdate, StoredDocument

NAMES = ("/a.md", "/b.md", "uploads/c.md", "/many.jsonl#1", "/many.jsonl#2")
TEXTS = ("one", "two", "three", "\N{GREEK SMALL LETTER ALPHA}\0\ufdd0", "five")
TEAMS = ("legal", "sales")


def file_of(name: str) -> str:
    return name.partition("#")[0]


def stored(name: str, texts: tuple[str, ...], title: str, team: str, line: int) -> StoredDocument:
    """Make a document with a chunk per text; the vectors depend on text and title."""
    document_id = DocumentId(name)
    chunks = tuple(
        Chunk(chunk_id_of(document_id, at, text), document_id, at, text, title, ("A", team), 2, line + at, line + at)
        for at, text in enumerate(texts)
    )
    vectors = [[len(text), sum(text.encode()), len(title)] for text in texts]
    metadata: Metadata = {"team": team, "odd": 'quote " and \0'}
    content_hash = repr((texts, title, team)).encode().hex()[:40] + f":{line}"
    record = name.partition("#")[2] or None
    numbers = (sum(map(len, texts)), 5.25)
    array = np.array(vectors, dtype=np.float32).reshape(len(texts), 3)
    return StoredDocument(document_id, file_of(name), record, title, content_hash, *numbers, chunks, array, metadata)


documents = st.builds(
    stored,
    st.sampled_from(NAMES),
    st.lists(st.sampled_from(TEXTS), max_size=4).map(tuple),
    st.sampled_from(("T", "Title\0")),
    st.sampled_from(TEAMS),
    st.integers(1, 3),
)
sources = st.builds(
    lambda name, size, is_gone: SourceUpdate(
        name, None if is_gone else SourceFile(name, size, 7, f"hash{size}", {"k": name})
    ),
    st.sampled_from([file_of(name) for name in NAMES]),
    st.integers(-1, 2**40),
    st.booleans(),
)


class Index:
    """The chunks that a search index has made from the changes of a corpus."""

    def __init__(self) -> None:
        self.generation = 0
        self.chunks: dict[ChunkId, bytes] = {}

    def follow(self, corpus: Corpus, num_chunks: int | None = None) -> None:
        changes = corpus.changes_since(self.generation, num_chunks)
        for chunk_id in (*changes.removed, *changes.added):
            self.chunks.pop(chunk_id, None)
        ids, vectors = corpus.embeddings(changes.added)
        self.chunks |= {ChunkId(one): vector.tobytes() for one, vector in zip(ids.tolist(), vectors, strict=True)}
        self.generation = changes.generation


class CorpusModel(RuleBasedStateMachine):
    """Subclasses set `open_corpora`, which opens two views of one new corpus: what one writes, the other reads."""

    @initialize()
    def open(self) -> None:
        self.stack = contextlib.ExitStack()
        self.writers = self.open_corpora(self.stack)
        self.expected: dict[str, StoredDocument] = {}
        self.files: dict[str, SourceFile] = {}
        self.vectors: dict[ChunkId, bytes] = {}
        self.indexes = [Index(), Index()]
        self.last = 0
        """Generation after the last commit."""

    def open_corpora(self, stack: contextlib.ExitStack) -> tuple[Corpus, Corpus]:
        raise NotImplementedError

    def catch_up(self) -> None:
        """Let both views show the last commit."""

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()

    @rule(
        writer=st.integers(0, 1),
        put=st.lists(documents, max_size=3),
        removed=st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        updates=st.lists(sources, max_size=2, unique_by=lambda one: one.path),
    )
    def commit(self, writer: int, put: list[StoredDocument], removed: list[str], updates: list[SourceUpdate]) -> None:
        before = dict(self.expected)
        for document in put:
            self._put(document)
        num_chunks = sum(len(self.expected[name].chunks) for name in removed if name in self.expected)
        is_removing = [name for name in removed if self.expected.pop(name, None) is not None]
        for name in is_removing:
            self._unread(file_of(name))
        for update in updates:
            self.files.pop(update.path, None)
            if update.source is not None:
                self.files[update.path] = update.source
        assert self.writers[writer].commit(put, map(DocumentId, removed), updates).num_removed == num_chunks
        self.catch_up()
        now = self.writers[writer].generation
        is_changed = any(self._differs(before.get(name), self.expected.get(name)) for name in NAMES)
        assert now >= self.last + is_changed, "a change raises the generation"
        assert now <= self.last + bool(put or is_removing), "nothing else does"
        self.last = now

    @rule(name=st.sampled_from(NAMES), writer=st.integers(0, 1))
    def fail(self, name: str, writer: int) -> None:
        """A commit that fails leaves nothing."""
        good, bad = stored(name, TEXTS[:2], "other", "x", 9), stored(name, TEXTS, "T", "x", 9)
        with contextlib.suppress(ValueError):
            self.writers[writer].commit([good, dataclasses.replace(bad, vectors=np.zeros((1, 3), np.float32))])
            raise AssertionError("vectors are missing")
        self.catch_up()

    @rule(at=st.integers(0, 1), reader=st.integers(0, 1), num_chunks=st.sampled_from((None, 1, 2)))
    def index_follows(self, at: int, reader: int, num_chunks: int | None) -> None:
        self.indexes[at].follow(self.writers[reader], num_chunks)

    @invariant()
    def both_views_show_the_documents(self) -> None:
        for corpus in self.writers:
            assert (corpus.generation, corpus.num_documents) == (self.last, len(self.expected))
            assert corpus.num_chunks == sum(len(one.chunks) for one in self.expected.values())
            assert [self._info(info) for info in corpus.documents()] == [
                (one.document_id, one.title, len(one.chunks), one.num_bytes, one.added_at, one.metadata)
                for _, one in sorted(self.expected.items())
            ]
            assert corpus.sources() == self.files
            for name in NAMES:
                self._check_document(corpus, name)
            ids = {chunk.chunk_id for one in self.expected.values() for chunk in one.chunks}
            assert corpus.existing([*ids, ChunkId(17)]) == ids
            for team in TEAMS:
                found = corpus.matching(condition_of(parse_filter(f"team = {team}")))
                wanted = [one for one in self.expected.values() if one.metadata["team"] == team]
                assert found[0] == self.last
                assert found[1].tolist() == sorted(chunk.chunk_id for one in wanted for chunk in one.chunks)

    @invariant()
    def following_index_is_complete(self) -> None:
        for index, corpus in zip(self.indexes, self.writers, strict=True):
            followed = Index()
            followed.generation, followed.chunks = index.generation, dict(index.chunks)
            followed.follow(corpus)
            assert followed.chunks == {
                chunk.chunk_id: vector.tobytes()
                for one in self.expected.values()
                for chunk, vector in zip(one.chunks, one.vectors, strict=True)
            }
            assert followed.generation == self.last
        assert len({corpus.commit_id(self.last) for corpus in self.writers}) == 1
        assert self.writers[0].commit_id(self.last + 1) is None

    def _check_document(self, corpus: Corpus, name: str) -> None:
        document = self.expected.get(name)
        found = corpus.chunks_of(DocumentId(name))
        assert [chunk for chunk, _ in found] == list(document.chunks if document else ())
        if document is None:
            assert corpus.origin_of(DocumentId(name)) is None
            return
        assert [vector.tobytes() for _, vector in found] == [vector.tobytes() for vector in document.vectors]
        assert corpus.document_ids(document.path)[DocumentId(name)] == document.content_hash
        assert [info.document_id for info in corpus.documents_of(public_id(DocumentId(name)))] == [name]
        origin = corpus.origin_of(DocumentId(name))
        assert origin is not None
        assert (origin.path, origin.metadata, origin.record_id) == (
            document.path,
            document.metadata,
            document.record_id,
        )
        if document.chunks:
            last = document.chunks[-1].chunk_id
            before = tuple(chunk.chunk_id for chunk in document.chunks[:-1])
            assert corpus.chunks_before([last], 2) == {last: before[-2:]}

    def _put(self, document: StoredDocument) -> None:
        self.expected[document.document_id] = document

    def _unread(self, path: str) -> None:
        """A file with a removed document is read again by the next `add`; given metadata stays while it has others."""
        known = self.files.get(path)
        if known is not None:
            self.files[path] = dataclasses.replace(known, size=-1, content_hash="")
        if not any(one.path == path for one in self.expected.values()):
            self.files.pop(path, None)

    @staticmethod
    def _info(info: Any) -> tuple[object, ...]:
        return (info.document_id, info.title, info.num_chunks, info.num_bytes, info.added_at, info.metadata)

    @staticmethod
    def _differs(one: StoredDocument | None, other: StoredDocument | None) -> bool:
        if one is None or other is None:
            return one is not other
        return (one.title, one.content_hash) != (other.title, other.content_hash)
