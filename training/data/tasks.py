"""Composes examples: one to six chunks in random order, and several independent questions about them.

A question is by a person, made from a sentence, a sentence with a blank, or a question without an answer in the chunks.
Numbers, dates and names are sometimes replaced by others in chunks and answer alike, so that answers cannot be
memorised.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId
from training.data.cleaning import sentences
from training.data.collection import Library, Passage
from training.data.spans import kind_of, occurs, replace_all
from training.data.wording import cloze
from training.data.worlds import MAX_CHUNKS, SILENT

_MAX_WORDS = 40
"""Maximum words of a sentence with a blank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Probabilities of the kinds of examples and questions."""

    worlds: float = 0.2
    """Examples from generated worlds; all others are over real text."""
    asked: float = 0.5
    """Examples over real text with a passage that has a question by a person."""
    near: float = 0.5
    """Further chunks that are similar to the first; the rest are random."""
    titled: float = 0.8
    """Examples whose chunks have their titles."""
    swapped: float = 0.35
    """Examples in which an answer is replaced by another of its kind."""
    unanswerable: float = 0.15
    """Questions without an answer."""
    clozes: float = 0.3
    """Sentences with a blank among the generated questions."""
    max_chunks: int = MAX_CHUNKS
    max_questions: int = 8
    ramp: float = 0.15
    """Share of the run, at its beginning, in which the maximum number of chunks grows from 1 to `max_chunks`."""


@dataclass(frozen=True, slots=True)
class Branch:
    question: str
    answer: str
    kind: str


@dataclass(frozen=True, slots=True)
class Example:
    chunks: tuple[Chunk, ...]
    branches: tuple[Branch, ...]


def compose(library: Library, mixture: Mixture, rng: random.Random, progress: float) -> Example:
    """Compose an example.

    Args:
        progress: progress of the run, 0 to 1.

    Returns:
        An example that is determined by the arguments.
    """
    grown = min(1.0, progress / mixture.ramp) if mixture.ramp else 1.0
    limit = 1 + round((mixture.max_chunks - 1) * grown)
    if library.worlds and rng.random() < mixture.worlds:
        return _of_world(library, mixture, rng)
    return _of_text(library, mixture, rng, limit)


def new_chunk(number: int, text: str, title: str = "") -> Chunk:
    return Chunk(ChunkId(number), DocumentId(f"d{number}"), 0, text, title=title)


def _of_world(library: Library, mixture: Mixture, rng: random.Random) -> Example:
    world = library.any_world(rng)
    chunks = tuple(new_chunk(place, text) for place, text in enumerate(world.chunks))
    silent = [one for one in world.questions if one.answer == SILENT]
    telling = [one for one in world.questions if one.answer != SILENT]
    chosen = rng.sample(telling, min(len(telling), mixture.max_questions))
    chosen += rng.sample(silent, min(len(silent), max(1, round(mixture.unanswerable * len(chosen)))))
    rng.shuffle(chosen)
    return Example(chunks, tuple(Branch(one.text, one.answer, one.kind) for one in chosen))


def _of_text(library: Library, mixture: Mixture, rng: random.Random, max_chunks: int) -> Example:
    first = library.any_asked(rng) if rng.random() < mixture.asked else library.any_passage(rng)
    passages = _with_others(library, first, rng.randint(1, max_chunks), mixture.near, rng)
    rng.shuffle(passages)
    is_titled = rng.random() < mixture.titled
    branches = _questions(library, passages, mixture, rng)
    chunks = tuple(new_chunk(one.number, one.text, one.title if is_titled else "") for one in passages)
    example = Example(chunks, tuple(branches))
    return _swapped(example, library, rng) if rng.random() < mixture.swapped else example


def _with_others(library: Library, first: Passage, count: int, near: float, rng: random.Random) -> list[Passage]:
    found = {first.number: first}
    for _ in range(4 * count):
        if len(found) >= count:
            break
        is_near = first.near and rng.random() < near
        other = library.passages[rng.choice(first.near)] if is_near else library.any_passage(rng)
        found[other.number] = other
    return list(found.values())


def _questions(library: Library, passages: Sequence[Passage], mixture: Mixture, rng: random.Random) -> list[Branch]:
    """Take questions from the chunks in turn until there are enough."""
    pools = [_pool(passage, mixture, rng) for passage in passages]
    found: list[Branch] = []
    while len(found) < mixture.max_questions and any(pools):
        for pool in pools:
            if pool and len(found) < mixture.max_questions:
                found.append(pool.pop())
    answers = [one.text for one in passages]
    for place in range(len(found)):
        if rng.random() < mixture.unanswerable and (silent := _silent(library, passages, answers, mixture, rng)):
            found[place] = silent
    rng.shuffle(found)
    return found


def _pool(passage: Passage, mixture: Mixture, rng: random.Random) -> list[Branch]:
    """Return the questions of one passage, generated ones first and those by people last, to be popped."""
    made = [Branch(question, answer, kind) for question, answer, kind in passage.worded]
    rng.shuffle(made)
    cut = [one for one in sentences(passage.text) if len(one.split()) <= _MAX_WORDS]
    for sentence in rng.sample(cut, min(len(cut), 3)):
        blank = cloze(sentence, rng)
        if blank is not None:
            made.insert(rng.randrange(len(made) + 1), Branch(blank.question, blank.answer, blank.kind))
    blanks = [one for one in made if one.kind == "cloze"]
    others = [one for one in made if one.kind != "cloze"]
    mixed: list[Branch] = []
    while blanks or others:
        pool = blanks if blanks and (not others or rng.random() < mixture.clozes) else others
        mixed.append(pool.pop())
    asked = [Branch(vary(question, rng), answer, "asked") for question, answer in passage.asked]
    rng.shuffle(asked)
    return [*mixed, *asked]


def vary(question: str, rng: random.Random) -> str:
    """Randomly drop the capital and the question mark of a question."""
    bare = question.rstrip("? ")
    style = rng.random()
    if style < 0.2:
        return bare[:1].lower() + bare[1:]
    return bare[:1].upper() + bare[1:] + "?"


def _silent(
    library: Library, passages: Sequence[Passage], texts: Sequence[str], mixture: Mixture, rng: random.Random
) -> Branch | None:
    """Return a question about an absent passage that is similar to one of these; None if it has an answer here."""
    present = {one.number for one in passages}
    candidates = [number for one in passages for number in one.near if number not in present]
    absent = library.passages[rng.choice(candidates)] if candidates else library.any_passage(rng)
    pool = _pool(absent, replace(mixture, clozes=0.2), rng)
    if absent.number in present or not pool:
        return None
    one = pool[-1] if rng.random() < 0.6 else rng.choice(pool)
    return None if any(occurs(one.answer, text) for text in texts) else Branch(one.question, SILENT, "unanswerable")


def _swapped(example: Example, library: Library, rng: random.Random) -> Example:
    """Replace one answer by another of its kind in all chunks, questions and answers."""
    able = [one for one in example.branches if one.answer != SILENT and one.kind != "cloze" and kind_of(one.answer)]
    if not able:
        return example
    old = rng.choice(able).answer
    kind = kind_of(old)
    assert kind is not None
    new = library.any_span(rng, kind, len(old.split()))
    texts = [one.text for one in example.chunks] + [one.title for one in example.chunks]
    if new is None or any(occurs(new, text) for text in texts) or any(occurs(old, one.title) for one in example.chunks):
        return example
    chunks = tuple(replace(one, text=replace_all(one.text, old, new)) for one in example.chunks)
    branches = tuple(
        Branch(replace_all(one.question, old, new), replace_all(one.answer, old, new), one.kind)
        for one in example.branches
    )
    return Example(chunks, branches)
