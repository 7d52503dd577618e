"""Makes questions from a sentence by rules, each with a span of the sentence as the answer.

`Ada Lovelace published the notes in 1843.` -> who published the notes in 1843; when did Ada Lovelace publish the notes;
what did Ada Lovelace publish in 1843; and with any span replaced by a blank: `Ada Lovelace published the notes in ___.`
"""

import random
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from training.data.spans import find_spans, occurs
from training.data.verbs import PAST, base_form
from training.data.words import word_set

BLANK = "___"
_AUXILIARIES = "is|are|was|were|has|have|had|can|could|will|would|may|must"
_SUBJECT = r"(?P<subject>[A-Z][\w'-]*(?: [\w'-]+){0,6}?)"
_WITH_AUXILIARY = re.compile(rf"^{_SUBJECT} (?P<verb>{_AUXILIARIES}) (?P<rest>[^;:]{{8,160}})\.$")
_WITH_PAST = re.compile(rf"^{_SUBJECT} (?P<verb>{PAST}) (?P<rest>[^;:]{{6,160}})\.$")
_NAME = r"(?:the )?[A-Z][\w'-]+(?: (?:of |the |de |von )?[A-Z][\w'-]+){0,4}"
_TIME = r"(?:[A-Z][a-z]+ \d{1,2}, \d{4}|\d{1,2} [A-Z][a-z]+ \d{4}|[A-Z][a-z]+ \d{4}|\d{4})"
_WHEN = re.compile(rf",? ?\b(?:in|on|since|until) (?P<answer>{_TIME})(?= |,|$)")
_WHERE = re.compile(r" (?:in|at|near) (?P<answer>[A-Z][\w'-]+(?:,? [A-Z][\w'-]+){0,3})(?= |,|$)")
_DONE = r"(?P<done>[a-z]+ed|written|built|made|led|won|held|sung)"
_ACTIVE = {"written": "wrote", "sung": "sang"}
_BY = re.compile(rf"\b{_DONE} by (?P<answer>{_NAME})(?= |,|$)")
_DONE_WHEN = re.compile(rf"\b{_DONE} (?:in|on) (?P<answer>{_TIME})(?= |,|$)")
_DONE_WHERE = re.compile(
    r"\b(?P<done>located|based|situated|held|built|filmed) (?:in|at) "
    r"(?P<answer>[A-Z][\w'-]+(?:,? [A-Z][\w'-]+){0,3})(?= |,|$)"
)
_MANY = re.compile(
    r"^(?P<answer>[\d,.]*\d|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve) (?P<noun>[a-z]+s)\b"
)
_OBJECT = re.compile(
    r"^(?P<answer>(?:(?:the|an?|his|her|its|their) )?[\w'-]+(?: [\w'-]+){0,4}?)"
    r"(?= (?:in|on|at|by|to|for|from|with|and|as|of|during|after|when|where|who|which|that)\b|,|$)"
)
_NO_OBJECT = re.compile(r"(?:in|on|at|by|to|for|from|with|that|as|into|not|over|under|between|among|through|during)\b")
_DEFINITION = re.compile(
    r"^(?P<answer>(?:an?|the) [\w' -]{4,60}?)(?=,| (?:that|which|who|where|in|on|from|by|[a-z]+ed|written)\b|$)"
)
_PRONOUNS = frozenset({"He", "She"})
_NO_SUBJECT = word_set(
    "It They This These That Those There We You I In On At As If When While After Before His Her Its Their Our My Your "
    "So More Most Many Some Such Since Although Because For By From With To During Under But And Or However Both All "
    "What Who Where Why How Which Each Another Other Here Not No Also Then Thus"
)
_NO_PART_OF_ONE = word_set("is are was were has had have to who which it he she they we that but")
_NO_PLACE = re.compile(r"(?:January|February|March|April|May|June|July|August|September|October|November|December)\b")
_NO_PERSON = word_set(
    "University College Company War Church River City Act Party Island Islands Street Battle Treaty School Museum Club "
    "League Cup Bowl Council Court Empire Kingdom Republic Union States Railway Bridge Park Lake Mountain Festival "
    "Records Studios Games Army Navy Airlines Corporation Institute Society Library Hospital Press Bank Works"
)


@dataclass(frozen=True, slots=True)
class Worded:
    question: str
    answer: str
    kind: str
    """`cloze`, or the question word."""


def cloze(sentence: str, rng: random.Random) -> Worded | None:
    """Replace a random span by a blank, with equal probability of each kind; None if the span is not unique."""
    spans = [span for span in find_spans(sentence) if len(span.of(sentence)) > 1]
    if not spans:
        return None
    kind = rng.choice(sorted({span.kind for span in spans}))
    span = rng.choice([one for one in spans if one.kind == kind])
    answer, rest = span.of(sentence), sentence[: span.start] + BLANK + sentence[span.end :]
    return None if occurs(answer, rest) else Worded(rest, answer, "cloze")


def worded(sentence: str, title: str, known: Collection[str]) -> list[Worded]:
    """Return every question that a rule makes from a sentence.

    Args:
        title: title of the sentence's document, which `he` and `she` refer to if it looks like a person's name.
        known: words of the language, for infinitives.
    """
    found = [*_from_auxiliary(sentence, title), *_from_past(sentence, title, known)]
    return [one for one in found if _is_sound(one, sentence)]


def _is_sound(one: Worded, sentence: str) -> bool:
    """Return whether the answer is in the sentence and not in the question, and brackets and quotes are complete."""
    text = one.question
    is_whole = text.count("(") == text.count(")") and text.count('"') % 2 == 0 and not re.search(r"[(\"] ?\?$", text)
    return 4 <= len(text.split()) <= 26 and is_whole and occurs(one.answer, sentence) and not occurs(one.answer, text)


def _from_auxiliary(sentence: str, title: str) -> Iterator[Worded]:
    match = _WITH_AUXILIARY.match(sentence)
    subject = _subject_of(match, title)
    if match is None or subject is None:
        return
    verb, rest = match["verb"], match["rest"]
    if match["subject"] not in _PRONOUNS:
        yield _who(subject, f"{verb} {_first_clause(rest)}")
    by = _BY.search(rest)
    if by is not None and by.start() < 90 and verb in ("is", "was", "are", "were"):
        yield Worded(f"Who {_ACTIVE.get(by['done'], by['done'])} {_inside(subject)}?", by["answer"], "who")
    definition = _DEFINITION.match(rest)
    if definition is None:
        yield from _asked_about(rest, f"{verb} {_inside(subject)}", "")
    elif verb in ("is", "was"):
        word = "Who" if _is_person(subject) else "What"
        yield Worded(f"{word} {verb} {_inside(subject)}?", definition["answer"], word.lower())
        yield from _done(rest, verb, subject)


def _done(rest: str, verb: str, subject: str) -> Iterator[Worded]:
    """Yield questions from phrases such as `is a film released in 1990` and `is a school located in Ely`."""
    if when := _DONE_WHEN.search(rest):
        yield Worded(f"When was {_inside(subject)} {when['done']}?", when["answer"], "when")
    if where := _DONE_WHERE.search(rest):
        yield Worded(f"Where {verb} {_inside(subject)} {where['done']}?", where["answer"], "where")


def _from_past(sentence: str, title: str, known: Collection[str]) -> Iterator[Worded]:
    match = _WITH_PAST.match(sentence)
    subject = _subject_of(match, title)
    base = base_form(match["verb"], known) if match is not None else None
    if match is None or subject is None or base is None:
        return
    rest = match["rest"]
    if match["subject"] not in _PRONOUNS:
        yield _who(subject, f"{match['verb']} {_first_clause(rest)}")
    asked = f"did {_inside(subject)}"
    yield from _asked_about(rest, asked, f"{base} ")
    if many := _MANY.match(rest):
        tail = _first_clause(rest[many.end() :].strip())
        yield Worded(_closed(f"How many {many['noun']} {asked} {base} {tail}"), many["answer"], "how many")
    elif (thing := _OBJECT.match(rest)) and not _NO_OBJECT.match(rest):
        tail = _first_clause(rest[thing.end() :].strip())
        if not tail or tail.split()[0] not in ("of", "and", "who", "which", "that"):
            yield Worded(_closed(f"What {asked} {base} {tail}"), thing["answer"], "what")


def _asked_about(rest: str, asked: str, verb: str) -> Iterator[Worded]:
    """Yield questions about time and place, with the answer removed from the rest of the sentence."""
    for word, pattern in (("When", _WHEN), ("Where", _WHERE)):
        match = pattern.search(" " + rest)
        if match is None or match.start() > 90 or (word == "Where" and _NO_PLACE.match(match["answer"])):
            continue
        before = (" " + rest)[: match.start()].strip().rstrip(",")
        yield Worded(_closed(f"{word} {asked} {verb}{before}"), match["answer"], word.lower())


def _closed(question: str) -> str:
    return " ".join(question.split()).rstrip(",") + "?"


def _who(subject: str, said: str) -> Worded:
    word = "Who" if _is_person(subject) else "What"
    return Worded(_closed(f"{word} {said}"), subject, word.lower())


def _subject_of(match: re.Match[str] | None, title: str) -> str | None:
    if match is None:
        return None
    subject = match["subject"]
    if subject in _PRONOUNS:
        return title if _is_person(title) else None
    words = subject.split()
    is_none = words[0] in _NO_SUBJECT or len(subject) < 3 or _NO_PART_OF_ONE & set(words[1:])
    return None if is_none else subject


def _is_person(name: str) -> bool:
    words = name.split()
    return (
        2 <= len(words) <= 3
        and all(re.fullmatch(r"[A-Z][a-z'-]+\.?|[A-Z]\.", word) for word in words)
        and not (_NO_PERSON & set(words) or words[0] == "The")
    )


def _inside(subject: str) -> str:
    """Return a subject with a lower-case article."""
    for article in ("The ", "A ", "An "):
        if subject.startswith(article):
            return article.lower() + subject[len(article) :]
    return subject


def _first_clause(text: str) -> str:
    """Return the text up to the first clause boundary, unless fewer than two words would be left."""
    head = re.split(r",(?! \d{4})| (?:but|although|while|whereas) ", text)[0].strip()
    return head if len(head.split()) >= 2 or head == text else text.rstrip(".")
