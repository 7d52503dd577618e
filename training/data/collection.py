"""Immutable library that training draws from: passages with their questions, and generated worlds."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from training.data.shards import read_shards
from training.data.spans import SpanKind, find_spans
from training.data.split import Split
from training.data.worlds import World, WorldQuestion

SOURCE_WEIGHTS: Mapping[str, float] = {
    "squad": 0.25,
    "squadshifts-new-wiki": 0.08,
    "tydiqa": 0.1,
    "qed": 0.04,
    "fairytaleqa": 0.05,
    "covid-qa": 0.02,
    "wikipedia-passages": 0.27,
    "musique": 0.02,
    "peps": 0.1,
    "rust-book": 0.07,
}
"""Probability of each source of a passage; encyclopaedic text has the largest share."""


@dataclass(frozen=True, slots=True)
class Passage:
    number: int
    """Position in the library, and id as a chunk."""
    source: str
    title: str
    text: str
    near: tuple[int, ...]
    """Similar passages, most similar first."""
    asked: tuple[tuple[str, str], ...]
    """Questions by people with an answer that occurs in the text."""
    worded: tuple[tuple[str, str, str], ...]
    """Question, answer and kind made by `wording`."""


class Library:
    """The passages and worlds of one split. Draws depend only on the given random numbers."""

    def __init__(self, passages: Sequence[Passage], worlds: Sequence[World]) -> None:
        self.passages = passages
        self.worlds = worlds
        by_source: dict[str, list[int]] = {}
        for passage in passages:
            by_source.setdefault(passage.source, []).append(passage.number)
        self._of_source = list(by_source.values())
        self._bounds = list(accumulate(SOURCE_WEIGHTS.get(name, 0.05) for name in by_source))
        self._asked = [passage.number for passage in passages if passage.asked]

    @classmethod
    def read(cls, folder: Path, split: Split) -> "Library":
        """Read a folder of `python -m training data`; raises FileNotFoundError if it is missing."""
        passages = [_passage(number, row) for number, row in enumerate(read_shards(folder, f"{split}-passages"))]
        worlds = [_world(row) for row in read_shards(folder, f"{split}-worlds")]
        return cls(passages, worlds)

    def any_passage(self, rng: random.Random) -> Passage:
        """Draw a passage by the weights of the sources."""
        at = rng.random() * self._bounds[-1]
        group = next(place for place, bound in enumerate(self._bounds) if at < bound)
        return self.passages[rng.choice(self._of_source[group])]

    def any_asked(self, rng: random.Random) -> Passage:
        """Draw a passage with a question by a person, or any passage if there is none."""
        return self.passages[rng.choice(self._asked)] if self._asked else self.any_passage(rng)

    def any_world(self, rng: random.Random) -> World:
        return rng.choice(self.worlds)

    def any_span(self, rng: random.Random, kind: SpanKind, num_words: int) -> str | None:
        """Draw a span of this kind and length from some passage; None after 8 tries."""
        for _ in range(8):
            text = self.any_passage(rng).text
            found = [s.of(text) for s in find_spans(text) if s.kind == kind and len(s.of(text).split()) == num_words]
            if found:
                return rng.choice(found)
        return None


def _passage(number: int, row: Mapping[str, Any]) -> Passage:
    return Passage(
        number=number,
        source=row["source"],
        title=row["title"],
        text=row["text"],
        near=tuple(row["near"]),
        asked=tuple((question, answer) for question, answer in row["asked"]),
        worded=tuple((question, answer, kind) for question, answer, kind in row["worded"]),
    )


def _world(row: Mapping[str, Any]) -> World:
    return World(tuple(row["chunks"]), tuple(WorldQuestion(**question) for question in row["questions"]))
