"""The conversation before a question: earlier turns with their documents, and a system message.

No conversation is stored between requests. The documents of an earlier turn are found again by its search, so a prompt
begins with the tokens of the turns before, and their exact KV is reused, until documents or options change. A chunk
stands in a prompt once, in the first turn that found it. If the prompt gets too long, several of the oldest turns are
dropped at once, so that the beginning stays the same for the next prompts. Worked example: docs/conversations.md
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from stillroom.core.document import Chunk, ScoredChunk
from stillroom.core.ids import ChunkId
from stillroom.retrieval.selection import is_bare, same_text

MAX_TURNS = 64
"""Most turns that are used; of a longer conversation the oldest are dropped."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """An earlier question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Turn:
    """An exchange with its documents."""

    exchange: Exchange
    found: tuple[ScoredChunk, ...]
    """Found by its own search."""

    @property
    def chunks(self) -> list[Chunk]:
        return [scored.chunk for scored in self.found]


@dataclass(frozen=True, slots=True)
class History:
    """Earlier turns and system messages of a prompt, and the beginning of its answer."""

    turns: tuple[Turn, ...] = ()
    system: str = ""
    answer_start: str = ""
    """Beginning of the answer, which the model continues."""

    def without(self, num_turns: int) -> "History":
        """A copy without the oldest `num_turns` turns."""
        return replace(self, turns=self.turns[num_turns:])


NO_HISTORY = History()


Search = Callable[[str], Sequence[ScoredChunk]]


def search_with_previous(earlier: Sequence[Exchange], question: str, search: Search) -> Sequence[ScoredChunk]:
    """Search for a question together with the one before it, which often resolves a pronoun; nothing for the first
    question."""
    return search(f"{earlier[-1].question}\n{question}") if earlier else ()


def merge(found: Sequence[ScoredChunk], others: Sequence[ScoredChunk], top_k: int) -> tuple[ScoredChunk, ...]:
    """Merge two results by score; at most `top_k` chunks, each text once with its higher score. Of equal scores, the
    question's own come first. Table rules and bare headings stay behind the texts (`retrieval.selection`), and what a
    reranker did not read behind what it read, whose scores are of another scale."""
    both = [*zip(found, _comparable(found), strict=True), *zip(others, _comparable(others), strict=True)]
    is_reranked = any("reranker" in scored.scores for scored, _ in both)

    def order(pair: tuple[ScoredChunk, float]) -> tuple[bool, bool, float]:
        scored, score = pair
        return is_bare(scored.chunk), is_reranked and "reranker" not in scored.scores, -score

    kept: dict[Hashable, ScoredChunk] = {}
    for scored, _ in sorted(both, key=order):
        kept.setdefault(same_text(scored.chunk), scored)
    return tuple(kept.values())[:top_k]


def _comparable(results: Sequence[ScoredChunk]) -> list[float]:
    """Return scores that can be compared with those of another question. BM25 grows with the number of words, so its
    scores are divided by the best; all others have a fixed scale."""
    scores = [scored.score for scored in results]
    if any(scored.score != scored.scores.get("sparse") for scored in results):
        return scores
    best = max(scores, default=0.0) or 1.0
    return [score / best for score in scores]


def history_of(exchanges: Sequence[Exchange], system: str, search: Search, top_k: int) -> History:
    """Search again for every turn. A turn without a question gets no chunks."""
    first = num_turns_to_drop(len(exchanges), lambda num_dropped: len(exchanges) - num_dropped <= MAX_TURNS)
    turns = []
    for index, one in enumerate(exchanges[first:], start=first):
        found: tuple[ScoredChunk, ...] = ()
        if one.question.strip():
            found_with_previous = search_with_previous(exchanges[:index], one.question, search)
            found = merge(search(one.question), found_with_previous, top_k)
        turns.append(Turn(one, found))
    return History(tuple(turns), system.strip())


def new_chunks(turns: Iterable[Turn], last: Sequence[Chunk]) -> list[list[Chunk]]:
    """Chunks that each turn, and last the question itself, adds to those before it."""
    seen: set[ChunkId] = set()
    added = []
    for chunks in [*(turn.chunks for turn in turns), last]:
        new = [chunk for chunk in chunks if chunk.chunk_id not in seen]
        seen.update(chunk.chunk_id for chunk in new)
        added.append(new)
    return added


def num_turns_to_drop(num_turns: int, fits: Callable[[int], bool]) -> int:
    """Number of oldest turns to drop: the least number that fits, rounded up to a multiple of the largest power of two
    that is at most half of the turns then left. So at least half of what would fit stays, and the cut moves only after
    that many new turns.

    Args:
        fits: number of dropped turns -> whether the rest fits. Monotonic.
    """
    least = 0 if fits(0) else bisect_left(range(num_turns), True, key=fits)
    half = max(1, (num_turns - least + 1) // 2)
    step = 1 << (half.bit_length() - 1)
    return -(-least // step) * step
