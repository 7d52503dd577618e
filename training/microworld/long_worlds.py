"""Generates worlds of long documents with microworld's own names, relations and sentences.

A document is a row of sections, each about one entity: a chunk that names the entity, then up to ten chunks that say
"she" or "the ship". A fact in the n-th of them can be answered only by a reader that looks n chunks back. Each section
states the relations of its type in another order, so every question has rivals: other entities with the same relation.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from training.data.split import Split

MAX_DISTANCE = 10
"""Most chunks between a fact and the chunk that names its subject."""
_TYPES = {"person": 4, "ship": 2, "firm": 2, "town": 2}
"""Types of entities, with their weights."""
_P_MAIN = 0.75
"""Probability that a section is about the document's main type."""
_P_FILLER = 0.25
"""Probability of a filler sentence after a chunk's facts."""


@dataclass(frozen=True, slots=True)
class LongQuestion:
    text: str
    answer: str
    kind: str
    """`single`, `split`, `twohop` or `chain`, as microworld's."""
    document: int
    needed: tuple[int, ...]
    """Chunks of the document that the answer needs, the one that names the subject first."""
    distance: int
    """Chunks between the fact and the chunk that names its subject; 0 if that states it."""


@dataclass(frozen=True, slots=True)
class LongWorld:
    documents: tuple[tuple[str, ...], ...]
    questions: tuple[LongQuestion, ...]
    stated: dict[str, tuple[tuple[int, int], ...]]
    """(document, chunk) by the text of a question without its subject: chunks that state its relation."""
    relation_of: tuple[str, ...]
    """The key of `stated` of each question."""


@dataclass(frozen=True, slots=True)
class _Fact:
    entity: Any
    relation: str
    value: Any
    document: int
    named_in: int
    stated_in: int


def make_world(generator: Any, rng: random.Random, split: Split, lengths: Sequence[int]) -> LongWorld:
    """Make a world with one document for each length in chunks; at most about 80 chunks have names enough."""
    maker = _Maker(generator, rng, split)
    documents = tuple(maker.document(number, length) for number, length in enumerate(lengths))
    return maker.world(documents)


class _Maker:
    def __init__(self, generator: Any, rng: random.Random, split: Split) -> None:
        self._generator, self._rng = generator, rng
        self._names = generator.World(rng, split)
        self._facts: list[_Fact] = []
        self._entities: list[Any] = []

    def document(self, number: int, length: int) -> tuple[str, ...]:
        rng = self._rng
        chunks: list[str] = []
        main = rng.choices(list(_TYPES), list(_TYPES.values()))[0]
        while len(chunks) < length:
            kind = main if rng.random() < _P_MAIN else rng.choice(list(_TYPES))
            chunks += self._section(
                number, len(chunks), kind, min(length - len(chunks) - 1, rng.randint(0, MAX_DISTANCE))
            )
        return tuple(chunks)

    def world(self, documents: tuple[tuple[str, ...], ...]) -> LongWorld:
        stated: dict[str, list[tuple[int, int]]] = {}
        for fact in self._facts:
            stated.setdefault(_relation(fact), []).append((fact.document, fact.stated_in))
        asked = [pair for fact in self._facts for pair in self._questions(fact)]
        kept = [(question, key) for question, key in asked if len(stated[key]) > 1]  # a question without rivals is easy
        return LongWorld(
            documents,
            tuple(question for question, _ in kept),
            {key: tuple(places) for key, places in stated.items()},
            tuple(key for _, key in kept),
        )

    def _section(self, document: int, start: int, kind: str, num_more: int) -> list[str]:
        """A chunk that names a new entity, and `num_more` chunks that do not."""
        rng, entity = self._rng, self._names.entity(kind)
        self._entities.append(entity)
        relations = list(self._generator.REL[kind])
        rng.shuffle(relations)
        num_first = rng.randint(1, 3) if num_more < len(relations) - 1 else 1
        left = relations[num_first:]
        places = sorted(rng.sample(range(num_more), min(num_more, len(left))))
        stated = [relations[:num_first], *([] for _ in range(num_more))]
        for place, relation in zip(places, left, strict=False):
            stated[1 + place].append(relation)
        chunks = []
        for offset, own in enumerate(stated):
            facts = [_Fact(entity, one, self._value(kind, one), document, start, start + offset) for one in own]
            self._facts += facts
            chunks.append(self._text(facts, is_named=offset == 0))
        return chunks

    def _value(self, kind: str, relation: str) -> Any:
        wanted = self._generator.REL[kind][relation][0]
        known = [one for one in self._entities[:-1] if one.type == wanted]
        return self._rng.choice(known) if known and self._rng.random() < 0.7 else self._names.value(wanted)

    def _text(self, facts: Sequence[_Fact], *, is_named: bool) -> str:
        generator, rng = self._generator, self._rng
        sentences: list[str] = []
        for fact in facts:
            entity, names = fact.entity, is_named and not sentences
            subject, other = generator.PRON[entity.pron]
            if names:
                subject = other = generator.subj_name(entity)
            form = rng.choice(generator.REL[entity.type][fact.relation][1])
            sentences.append(form.format(S=subject, s=subject, O=other, V=generator.vname(fact.value)))
        if not sentences or rng.random() < _P_FILLER:
            sentences += rng.sample(generator.FILLER, 1 if sentences else rng.randint(1, 2))
        return "<chunk> " + " ".join(map(generator.cap, sentences)) + " </chunk>"

    def _questions(self, fact: _Fact) -> Iterator[tuple[LongQuestion, str]]:
        generator, rng, entity = self._generator, self._rng, fact.entity
        _, _, forms, phrase = generator.REL[entity.type][fact.relation]
        distance = fact.stated_in - fact.named_in
        needed = (fact.named_in, fact.stated_in) if distance else (fact.named_in,)
        subject, answer = generator.subj_name(entity), generator.vname(fact.value)
        kind = "split" if distance else "single"
        text = rng.choice(forms).format(S=subject)
        yield LongQuestion(text, answer, kind, fact.document, needed, distance), _relation(fact)
        if not phrase or distance:
            return
        for hop in self._facts:
            is_link = hop.entity is fact.value and hop.document == fact.document and hop.stated_in == hop.named_in
            if is_link:
                forms = generator.REL[hop.entity.type][hop.relation][2]
                text = rng.choice(forms).format(S=phrase.format(S=subject))
                needed, last = (fact.named_in, hop.stated_in), generator.vname(hop.value)
                yield LongQuestion(text, last, "twohop", fact.document, needed, 0), _relation(hop)
                both = f"{text} {generator.BOTH}"
                yield LongQuestion(both, f"{answer} {last}", "chain", fact.document, needed, 0), _relation(hop)


def _relation(fact: _Fact) -> str:
    return f"{fact.entity.type} {fact.relation}"


def retrieve(world: LongWorld, number: int, num_chunks: int, rng: random.Random) -> list[tuple[int, int]]:
    """Return (document, chunk) of a search result for a question, in the order of the documents.

    It has the chunks that the answer needs; then chunks that state the same relation of other subjects; then others.
    """
    question = world.questions[number]
    needed = [(question.document, chunk) for chunk in question.needed]
    rivals = list(world.stated[world.relation_of[number]])
    others = [(name, chunk) for name, document in enumerate(world.documents) for chunk in range(len(document))]
    rng.shuffle(rivals)
    rng.shuffle(others)
    return sorted(list(dict.fromkeys([*needed, *rivals, *others]))[:num_chunks])
