"""Sentences with known support, made of questions that people asked about passages.

A question and its answer become a statement ("Who wrote Emma?", "Jane Austen": "Jane Austen wrote Emma."). It is true;
with another answer of the same kind it is false. A sentence of a passage that is not among the sources is not supported
by them. Only titles are used that no model was trained on.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from stillroom.core.sentences import sentences
from stillroom.errors import UsageError

CaseKind = Literal["true statement", "other answer", "other passage"]

_NUM_SOURCES = 4
_MIN_SENTENCE_CHARS = 40
_WH = r"(?:what|which|who|whom|whose|when|where|how many|how much|how long|how old)"
_AUXILIARY = r"(?:do|does|did|is|are|was|were|can|could|has|have|had|will|would|should)"


@dataclass(frozen=True, slots=True)
class SupportCase:
    """A sentence, sources, and whether they support it."""

    kind: CaseKind
    sentence: str
    sources: tuple[tuple[str, str], ...]
    """Text and heading of each."""

    @property
    def is_true(self) -> bool:
        return self.kind == "true statement"


def is_held_out(title: str) -> bool:
    """Whether a title of `reading-qa` is kept from training; the rule of `training/reader/examples.py`."""
    return _hash(title) % 25 == 7


def is_for_testing(title: str) -> bool:
    """Whether a title measures the thresholds; the other titles choose them."""
    return _hash(f"test/{title}") % 2 == 0


def _hash(text: str) -> int:
    return blake2b(text.encode(), digest_size=4).digest()[0]


def statement_of(question: str, answer: str) -> str | None:
    """Return a question and its answer as a statement; None if the question has another form."""
    asked = question.strip().rstrip("?. ")
    if match := re.match(r"(?:what|who) (is|are|was|were) (?!the\b.* of\b$)(.+)$", asked, re.IGNORECASE):
        return _sentence(f"{match[2]} {match[1]} {answer}")
    if match := re.match(rf"(?:when|where|in what \w+|in which \w+) {_AUXILIARY} (.+)$", asked, re.IGNORECASE):
        return _sentence(f"{match[1]}, {answer}")
    if match := re.match(rf"{_WH} (.+?) {_AUXILIARY} (.+)$", asked, re.IGNORECASE):
        return _sentence(f"{match[2]} {answer} ({match[1]})" if len(match[1].split()) < 4 else f"{match[2]} {answer}")
    if match := re.match(rf"{_WH} {_AUXILIARY} (.+)$", asked, re.IGNORECASE):
        return _sentence(f"{match[1]} {answer}")
    if match := re.match(
        r"(?:who|what|which \w+|what \w+) (\w+(?:ed|s|ught|ote|ew|an|ook|ade|ave|eld|on|id)\b.+)$", asked, re.IGNORECASE
    ):
        return _sentence(f"{answer} {match[1]}")
    return None


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def answer_kind(answer: str) -> str:
    """Return the kind of an answer, so that a false one is not told by its form."""
    if re.search(r"\b1\d{3}\b|\b20\d\d\b", answer):
        return "year"
    if re.search(r"\d", answer):
        return "number"
    words = answer.split()
    is_name = any(word[0].isupper() for word in words)
    return f"{'name' if is_name else 'phrase'} of {min(len(words), 4)}"


def read_cases(folder: Path, *, is_test: bool, limit: int, seed: int) -> list[SupportCase]:
    """Return about `limit` cases, half of them true, in random order.

    Raises:
        UsageError: the folder does not hold the data set, or too little of it.
    """
    try:
        passages = _rows(folder / "passages.jsonl", ("_id", "title", "text"))
        questions = _rows(folder / "questions.jsonl", ("passage", "question", "answers"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--data {folder}: {error}; give a folder with passages.jsonl and questions.jsonl") from None
    kept = {
        one["_id"]: one for one in passages if is_held_out(one["title"]) and is_for_testing(one["title"]) == is_test
    }
    rng = random.Random(seed)
    asked = [one for one in questions if one["passage"] in kept]
    rng.shuffle(asked)
    cases = [case for one in asked for case in _cases_of(one, kept, asked, rng)]
    true = [case for case in cases if case.is_true][: limit // 2]
    false = [case for case in cases if not case.is_true][: limit // 2]
    if not true or not false:
        raise UsageError(f"--data {folder}: no question about a held-out title makes a statement; take reading-qa")
    return [*true, *false]


def _rows(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    if not all(isinstance(row, dict) and row.keys() >= set(fields) for row in rows):
        raise ValueError(f"a line of {path.name} lacks one of the fields {', '.join(fields)}")
    return rows


def _cases_of(
    asked: dict[str, Any], passages: dict[str, dict[str, Any]], questions: Sequence[dict[str, Any]], rng: random.Random
) -> Iterator[SupportCase]:
    own = passages[asked["passage"]]
    others = [one for one in passages.values() if one["title"] == own["title"] and one is not own]
    rng.shuffle(others)
    shown = [own, *others[: _NUM_SOURCES - 1]]
    rng.shuffle(shown)
    sources = tuple((one["text"], one["title"]) for one in shown)
    answer = asked["answers"][0]
    if statement := statement_of(asked["question"], answer):
        yield SupportCase("true statement", statement, sources)
        if false := _false_answer(asked, own, passages, questions, rng):
            yield SupportCase("other answer", statement_of(asked["question"], false) or "", sources)
    for other in others[_NUM_SOURCES - 1 :][:1]:
        text = other["text"]
        spans = [span for span in sentences(text) if span[1] - span[0] >= _MIN_SENTENCE_CHARS]
        if spans:
            yield SupportCase("other passage", text[slice(*rng.choice(spans))], sources)


def _false_answer(
    asked: dict[str, Any],
    own: dict[str, Any],
    passages: dict[str, dict[str, Any]],
    questions: Sequence[dict[str, Any]],
    rng: random.Random,
) -> str | None:
    """Return an answer of the same kind to another question: about the same passage if there is one, else the title."""
    kind = answer_kind(asked["answers"][0])
    same_title = [one for one in questions if passages[one["passage"]]["title"] == own["title"]]
    right = " ".join(asked["answers"]).lower()
    found = [
        (one["passage"] == own["_id"], one["answers"][0])
        for one in same_title
        if answer_kind(one["answers"][0]) == kind
        and one["answers"][0].lower() not in right
        and not any(answer.lower() in one["answers"][0].lower() for answer in asked["answers"])
    ]
    near = [answer for is_near, answer in found if is_near]
    return rng.choice(near or [answer for _, answer in found]) if found else None
