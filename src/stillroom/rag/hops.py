"""Iterative retrieval: several searches for one question, each for what the documents found so far leave open.

RAGCache (section 9) treats the iterations as separate requests and caches the KV of their documents; so does Stillroom
(rag/hop_reading.py). Here are the loop and its report. How to use it: docs/hops.md
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from stillroom.core.document import ScoredChunk
from stillroom.core.ids import ChunkId, RequestId, format_chunk_id
from stillroom.errors import UsageError

MAX_HOPS = 5


class HopEnd(StrEnum):
    """Why no search followed a hop."""

    LIMIT = "limit"
    """The number of hops is reached."""
    NOTHING_NEW = "nothing_new"
    """The search found no document that an earlier hop had not found."""
    DONE = "done"
    """The model needs no more documents, or named nothing to search for."""
    SAME_ANSWER = "same_answer"
    """The new documents did not change the answer."""
    NO_ROOM = "no_room"
    """The prompt has no room for more documents."""


@dataclass(frozen=True, slots=True)
class HopSource:
    """A document that a hop found and no hop before it. `Answer.sources` has its text."""

    document: str
    """This field and the next ones are as in `Source`."""
    chunk_id: str
    score: float
    heading: str
    start_line: int
    end_line: int
    start_page: int
    end_page: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model made of the documents found so far."""

    next_question: str | None
    """What to search for next; None: nothing."""
    answer: str | None = None
    """The answer so far; of a reader its best words, however sure it is. None if the model was asked for the next
    question only, or if there is no answer."""
    is_sure: bool = True
    """Whether the answer so far may be given; False where a reader's is below its threshold."""
    is_full: bool = False
    """Whether the prompt had no room for all documents, so that it has none for more."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Hop:
    """One search, and the reading of all documents found by then."""

    request_id: RequestId
    """Of the answer that the hops lead to."""
    question: str
    """What was searched for; in the first hop, the question itself."""
    sources: tuple[HopSource, ...]
    """The new documents, best first."""
    answer: str | None = None
    """See `Reading.answer`. None also for a hop that is not read on its own, because the answer follows."""
    end: HopEnd | None = None
    """Why no search followed; None if one did."""
    num_prompt_tokens: int = 0
    """Of the reading; 0, like the next two, if the hop was not read on its own."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from a cache."""
    num_generated_tokens: int = 0


OnHop = Callable[[Hop], object]
Search = Callable[[str], Sequence[ScoredChunk]]
"""Text -> chunks, best first."""
Read = Callable[[str, Sequence[ScoredChunk]], Reading]
"""(what the last hop searched for, all chunks so far in the order in which they were found) -> a reading of them."""


def checked_hops(num_hops: int) -> int:
    """Return the number. Raises UsageError: it is out of range."""
    if not 1 <= num_hops <= MAX_HOPS:
        raise UsageError(f"hops={num_hops}; it must be 1 to {MAX_HOPS}")
    return num_hops


def hops(
    request_id: RequestId, question: str, most: int, search: Search, read: Read
) -> Iterator[tuple[Hop, Sequence[ScoredChunk]]]:
    """Search, read, and search again for what the reading asks for.

    The chunks of earlier hops stay in front, in the same order, so that a prompt begins like the one before and the
    exact KV of these chunks is reused. The last hop is not read: the answer to the question follows.

    Args:
        most: most searches.

    Yields:
        Each hop when it is complete, with all chunks found so far.
    """
    kept: dict[ChunkId, ScoredChunk] = {}
    asked, answer = question, None
    for number in range(1, most + 1):
        new = {scored.chunk.chunk_id: scored for scored in search(asked) if scored.chunk.chunk_id not in kept}
        kept |= new
        hop = Hop(request_id, asked, tuple(map(_source, new.values())))
        found = tuple(kept.values())
        if number == most or not new:
            yield replace(hop, end=HopEnd.LIMIT if new else HopEnd.NOTHING_NEW), found
            return
        reading = read(asked, found)
        end = _end(reading, answer)
        yield _with_reading(hop, reading, end), found
        if end is not None:
            return
        assert reading.next_question is not None, "a reading without a next question is the end"
        asked, answer = reading.next_question, reading.answer


def _end(reading: Reading, previous: str | None) -> HopEnd | None:
    """Return why no search follows a reading; None if one does.

    Args:
        previous: the answer of the reading before.
    """
    if reading.next_question is None:
        return HopEnd.DONE
    if reading.answer is not None and reading.answer == previous:
        return HopEnd.SAME_ANSWER
    return HopEnd.NO_ROOM if reading.is_full else None


def _with_reading(hop: Hop, reading: Reading, end: HopEnd | None) -> Hop:
    return replace(
        hop,
        answer=reading.answer,
        end=end,
        num_prompt_tokens=reading.num_prompt_tokens,
        num_cached_tokens=reading.num_cached_tokens,
        num_generated_tokens=reading.num_generated_tokens,
    )


def _source(scored: ScoredChunk) -> HopSource:
    chunk = scored.chunk
    return HopSource(
        document=chunk.document_id,
        chunk_id=format_chunk_id(chunk.chunk_id),
        score=scored.score,
        heading=chunk.heading,
        start_line=chunk.start_line,
        end_line=chunk.end_line,
        start_page=chunk.start_page,
        end_page=chunk.end_page,
    )
