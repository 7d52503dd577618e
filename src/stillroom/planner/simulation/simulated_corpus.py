"""The documents behind simulated prompts, so that prepared KV can be used as in the product."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId
from stillroom.core.prompt import Segment, SegmentedPrompt


@dataclass(frozen=True, slots=True)
class PreparingPrompt:
    """A window of a document."""

    prompt: SegmentedPrompt
    prepares: frozenset[ChunkId]
    """Its chunks whose KV is kept."""


class SimulatedCorpus:
    """A `CorpusView` of documents that never change. Chunks of equal tokens count as the first of them."""

    num_changes = 0

    def __init__(self, documents: Sequence[Sequence[Segment]]) -> None:
        """
        Args:
            documents: chunks of each, in order.
        """
        self._places: dict[ChunkId, tuple[tuple[ChunkId, ...], int]] = {}
        self._ids: dict[tuple[int, ...], ChunkId] = {}
        for chunks in documents:
            path = tuple(chunk.chunk_id for chunk in chunks if chunk.chunk_id is not None)
            for place, (chunk, chunk_id) in enumerate(zip(chunks, path, strict=True)):
                self._places[chunk_id] = path, place
                self._ids.setdefault(chunk.token_ids, chunk_id)

    def chunk_id_of(self, token_ids: tuple[int, ...]) -> ChunkId | None:
        """Return the chunk of these tokens; None if no document has it."""
        return self._ids.get(token_ids)

    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        return set(chunk_ids)

    def removed_since(self, num_changes: int) -> tuple[ChunkId, ...]:
        return ()

    def chunks_before(self, chunk_ids: Collection[ChunkId], limit: int) -> dict[ChunkId, tuple[ChunkId, ...]]:
        found = {}
        for chunk_id in chunk_ids:
            path, place = self._places[chunk_id]
            found[chunk_id] = path[max(0, place - limit) : place]
        return found

    def chunks(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, Chunk]:
        """Without texts: nothing is audited."""
        return {}
