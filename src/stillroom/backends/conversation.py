"""What stands before a question: earlier turns, each with the documents it was answered from, and a system message.

Nothing is remembered between requests. The documents of an earlier turn are found again by the search that found them
then, so as long as neither documents nor options change, a prompt begins with the tokens of the turns before, and their
KV is used exactly. A chunk stands in a prompt once, in the first turn that found it. Where the prompt gets too long the
oldest turns leave, several at once, so that what is left stays the beginning of the next prompts too. Worked example:
docs/conversations.md
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from stillroom.core.document import Chunk, ScoredChunk
from stillroom.core.ids import ChunkId

MAX_TURNS = 64
"""Most turns that are looked at; of a longer conversation the oldest are left out."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question that was asked before, and its answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Turn:
    """An exchange as it stands in a prompt."""

    exchange: Exchange
    found: tuple[ScoredChunk, ...]
    """What its own search found."""

    @property
    def chunks(self) -> list[Chunk]:
        return [scored.chunk for scored in self.found]


@dataclass(frozen=True, slots=True)
class History:
    """All that stands around a question."""

    turns: tuple[Turn, ...] = ()
    system: str = ""
    answer_start: str = ""
    """How the answer begins; it stands behind the question, and the model continues it."""

    def without(self, num_turns: int) -> "History":
        """Without the oldest turns."""
        return replace(self, turns=self.turns[num_turns:])


NOTHING = History()


Search = Callable[[str], Sequence[ScoredChunk]]


def around(earlier: Sequence[Exchange], question: str, search: Search) -> Sequence[ScoredChunk]:
    """What is found for a question together with the one before it, which often says what `it` is; nothing for the
    first."""
    return search(f"{earlier[-1].question}\n{question}") if earlier else ()


def alternate(found: Sequence[ScoredChunk], found_around: Sequence[ScoredChunk], top_k: int) -> tuple[ScoredChunk, ...]:
    """The best of both by turns, first what the question finds by itself; at most `top_k`."""
    both = (scored for pair in zip_longest(found, found_around) for scored in pair if scored is not None)
    kept: dict[ChunkId, ScoredChunk] = {}
    for scored in both:
        kept.setdefault(scored.chunk.chunk_id, scored)
    return tuple(kept.values())[:top_k]


def history_of(exchanges: Sequence[Exchange], system: str, search: Search, top_k: int) -> History:
    """Every turn with what its search finds now; nothing for one that asks nothing."""
    first = num_turns_to_drop(len(exchanges), lambda num_dropped: len(exchanges) - num_dropped <= MAX_TURNS)
    turns = []
    for index, one in enumerate(exchanges[first:], start=first):
        found: tuple[ScoredChunk, ...] = ()
        if one.question.strip():
            found_around = around(exchanges[:index], one.question, search)
            found = alternate(search(one.question), found_around, top_k)
        turns.append(Turn(one, found))
    return History(tuple(turns), system.strip())


def new_chunks(turns: Iterable[Turn], last: Sequence[Chunk]) -> list[list[Chunk]]:
    """What each turn, and in the end the question itself, adds to the chunks before."""
    seen: set[ChunkId] = set()
    added = []
    for chunks in [*(turn.chunks for turn in turns), last]:
        new = [chunk for chunk in chunks if chunk.chunk_id not in seen]
        seen.update(chunk.chunk_id for chunk in new)
        added.append(new)
    return added


def num_turns_to_drop(num_turns: int, fits: Callable[[int], bool]) -> int:
    """How many of the oldest turns are left out: the least number that fits, rounded up to a multiple of the largest
    power of two within half of what is then left. So at least half of what would fit stays, and the cut stays where it
    is until as many turns have come.

    Args:
        fits: whether what is left fits without so many; if so, also without more.
    """
    least = 0 if fits(0) else bisect_left(range(num_turns), True, key=fits)
    half = max(1, (num_turns - least + 1) // 2)
    step = 1 << (half.bit_length() - 1)
    return -(-least // step) * step
