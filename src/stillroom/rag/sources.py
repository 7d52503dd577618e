"""What an answer was made from: the chunks of its prompt, with what found them."""

from collections.abc import Sequence

from stillroom.backends.conversation import History
from stillroom.core.document import ScoredChunk
from stillroom.core.ids import ChunkId, format_chunk_id
from stillroom.rag.answer import Source


def sources_of(prompt: Sequence[ChunkId], found: Sequence[ScoredChunk], history: History) -> tuple[Source, ...]:
    """First what was found for the question, then what is in the prompt from earlier turns, latest first; each in the
    order of the prompt.

    Args:
        prompt: the chunks of the prompt, in order.
        found: what the question's own search found; what it shares with earlier turns stands where it stood then.
    """
    by_turn = [found, *(turn.found for turn in reversed(history.turns))]
    latest: dict[ChunkId, tuple[int, ScoredChunk]] = {}
    for turns_ago, results in enumerate(by_turn):
        for scored in results:
            latest.setdefault(scored.chunk.chunk_id, (turns_ago, scored))
    sources = [_source(position, *latest[chunk_id]) for position, chunk_id in enumerate(prompt, start=1)]
    return tuple(sorted(sources, key=lambda source: (source.turns_ago, source.position)))


def _source(position: int, turns_ago: int, scored: ScoredChunk) -> Source:
    chunk = scored.chunk
    return Source(
        document=chunk.document_id,
        chunk_id=format_chunk_id(chunk.chunk_id),
        text=chunk.text,
        score=scored.score,
        scores=dict(scored.scores),
        position=position,
        heading=chunk.heading,
        start_line=chunk.start_line,
        end_line=chunk.end_line,
        start_page=chunk.start_page,
        end_page=chunk.end_page,
        turns_ago=turns_ago,
    )
