"""The documents and chunks of a knowledge base, as they are stored now."""

from collections.abc import Collection, Sequence

from stillroom.core.document import Chunk, DocumentInfo
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.retrieval.store.corpus import Corpus


class StoredDocuments:
    """Reads one corpus. Thread-safe."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        """The documents as stored. Changes go through `KnowledgeBase.add`, `remove` or `writing`."""

    @property
    def identity(self) -> str:
        """Id of this knowledge base and its copies; a new one in the same folder has another."""
        return self.corpus.corpus_id

    @property
    def is_there(self) -> bool:
        """Whether the knowledge base that was opened still exists; one `stat`."""
        return self.corpus.is_there

    def documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        """Return documents in the order of their ids, those after `after`, at most `limit`."""
        return self.corpus.documents(after, limit)

    def documents_of(self, name: str) -> list[DocumentInfo]:
        """Return the document of an id or public id, or the documents of a file's name or path."""
        return self.corpus.documents_of(self.corpus.names.name_of(name))

    @property
    def num_documents(self) -> int:
        """Number of files and of records of JSONL files."""
        return self.corpus.num_documents

    @property
    def num_chunks(self) -> int:
        return self.corpus.num_chunks

    @property
    def num_changes(self) -> int:
        """Number of commits that changed documents, by any process; one cheap read."""
        return self.corpus.generation

    def record_ids(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, str]:
        """Return the JSONL record of each chunk; chunks of other documents are absent."""
        found = self.corpus.chunks(chunk_ids)
        return {chunk_id: chunk.record_id for chunk_id, chunk in found.items() if chunk.record_id is not None}

    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        """Return the ids of the chunks that exist now."""
        return self.corpus.existing(chunk_ids)

    def removed_since(self, num_changes: int) -> tuple[ChunkId, ...]:
        """Return the chunks that were removed after so many changes, and that do not exist now."""
        return self.corpus.removed_since(num_changes)

    def chunks_before(self, chunk_ids: Collection[ChunkId], limit: int) -> dict[ChunkId, tuple[ChunkId, ...]]:
        """Return the chunks before each of these in its document, in order, at most the last `limit`."""
        return self.corpus.chunks_before(chunk_ids, limit)

    def chunks(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, Chunk]:
        """Return the chunks of these ids; removed chunks are absent."""
        return self.corpus.chunks(chunk_ids)

    def chunks_of(self, document_id: DocumentId, offset: int = 0, limit: int | None = None) -> list[Chunk]:
        """Return a document's chunks in order, without the first `offset`, at most `limit`; [] for unknown ids."""
        return self.corpus.bare_chunks_of(document_id, offset, limit)
