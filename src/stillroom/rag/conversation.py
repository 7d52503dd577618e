"""What stands before a question: earlier turns, each with the documents it was answered from, and a system message.

Nothing is remembered between requests. The documents of an earlier turn are found again by the search that found them
then, so as long as neither documents nor options change, a prompt begins with the tokens of the turns before, and their
KV is used exactly. A chunk stands in a prompt once, in the first turn that found it. Where the prompt gets too long the
oldest turns leave, in powers of two, so that what is left stays the beginning of the next prompts too. Worked example:
docs/conversations.md
"""

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
    """All that stands before a question."""

    turns: tuple[Turn, ...] = ()
    system: str = ""

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
    """Every turn with what its search finds now."""
    first = next(n for n in num_turns_to_drop(len(exchanges)) if len(exchanges) - n <= MAX_TURNS)
    turns = []
    for index, one in enumerate(exchanges[first:], start=first):
        found_around = around(exchanges[:index], one.question, search)
        turns.append(Turn(one, alternate(search(one.question), found_around, top_k)))
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


def num_turns_to_drop(num_turns: int) -> list[int]:
    """How many of the oldest turns may be left out, fewest first: none, then powers of two, in the end all."""
    powers = [0]
    while (power := max(1, 2 * powers[-1])) < num_turns:
        powers.append(power)
    return [*powers, num_turns] if num_turns else powers
