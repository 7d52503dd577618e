"""Reads questions, passages and neighbours, and makes the rows of each training step.

A row is `[CLS] question [SEP] heading passage [SEP]`. A group is a question with one or two rows: its passage cut like
a chunk, and a passage that a search also finds but that does not hold the answer. In some groups the passage with the
answer is left out, and some questions are about a passage that does not answer them (near misses), so that the model
learns to say that nothing answers. Step n is a function of seed and n.

Questions about one title in 25 are never asked, and one technical passage in 8 is left out: `is_held_out`,
`is_held_out_passage`.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

CLS, SEP = 101, 102
MAX_QUESTION, MAX_HEADING = 48, 40
_NEAR = 12
"""Distance in the file, in passages, of wrong passages for technical questions."""
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+|\n\s*\n")


@dataclass(frozen=True, slots=True)
class TokenisedPassage:
    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]
    """Characters of each token, [tokens, 2]."""
    cuts: tuple[int, ...]
    """First tokens of its sentences, and its number of tokens."""
    heading: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    ids: tuple[int, ...]
    passage: int
    spans: tuple[tuple[int, int], ...]
    """First and last token of each answer in the passage; none if the passage does not answer the question."""
    negatives: tuple[int, ...]
    """Passages that a search finds for it and that do not hold the answer."""
    weight: float
    """How often it is asked in an epoch."""


@dataclass(frozen=True, slots=True)
class Row:
    ids: list[int]
    first: int
    """Index of the first token that may be part of an answer."""
    spans: tuple[tuple[int, int], ...]
    """Answers as first and last index; empty if the row does not hold the answer."""
    group: int


@dataclass(frozen=True, slots=True)
class ExampleSet:
    passages: Sequence[TokenisedPassage]
    questions: Sequence[Question]


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def is_held_out(title: str) -> bool:
    """Whether all questions about this title are kept for choosing thresholds: one title in 25, by its hash."""
    return blake2b(title.encode(), digest_size=4).digest()[0] % 25 == 7


def is_held_out_passage(text: str) -> bool:
    """Whether a technical passage is kept for choosing thresholds: one in 8, by its hash."""
    return blake2b(text.encode(), digest_size=4).digest()[0] % 8 == 3


def technical_files(folder: Path) -> list[Path]:
    """Return the files of technical questions in a fixed order, which is part of the order of the data."""
    return sorted(folder.glob("*.jsonl"))


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read an embedder's tokenizer; it neither cuts nor pads."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Coder:
    """Tokenises questions and passages."""

    def __init__(self, tokenizer_file: Path) -> None:
        self._tokenizer = read_tokenizer(tokenizer_file.parent)

    def ids(self, text: str, limit: int) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids[:limit])

    def passage(self, text: str, heading: str) -> TokenisedPassage:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
        starts = [match.end() for match in _SENTENCE_END.finditer(text)]
        cuts = sorted({0, len(encoding.ids), *(int(np.searchsorted(offsets[:, 0], start)) for start in starts)})
        return TokenisedPassage(
            np.array(encoding.ids, np.int32), offsets, tuple(cuts), self.ids(heading, MAX_HEADING), text
        )


def span_of(passage: TokenisedPassage, start: int, end: int) -> tuple[int, int] | None:
    """First and last token of the characters [start, end)."""
    first = int(np.searchsorted(passage.offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(passage.offsets[:, 0], end)) - 1
    return (first, last) if first <= last < len(passage.ids) else None


def read_people(
    folder: Path,
    coder: Coder,
    neighbours: NDArray[np.int32],
    skip: Sequence[str],
    *,
    more: Path | None = None,
    holds_out: bool = False,
) -> ExampleSet:
    """Read reading-qa.

    Args:
        neighbours: [questions, n], indexes of passages, -1 for none.
        skip: Sources whose questions are not asked. Their passages still serve as wrong passages.
        more: JSON lines with further questions about these passages: `passage`, `question`, `answer`, `start`.
        holds_out: Leave out questions about held-out titles.
    """
    rows = list(read_rows(folder / "passages.jsonl"))
    passages = [coder.passage(row["text"], row["title"]) for row in rows]
    index = {row["_id"]: number for number, row in enumerate(rows)}
    questions, found_near = list[Question](), dict[int, dict[int, None]]()
    for number, asked in enumerate(read_rows(folder / "questions.jsonl")):
        own = index[asked["passage"]]
        if rows[own]["source"] in skip or (holds_out and is_held_out(rows[own]["title"])):
            continue
        ends = zip(asked["answers"], asked["answer_starts"], strict=True)
        found = [span_of(passages[own], start, start + len(answer)) for answer, start in ends]
        spans = tuple(sorted({span for span in found if span is not None}))
        if spans:
            near = tuple(int(one) for one in neighbours[number] if one >= 0)
            found_near.setdefault(own, {}).update(dict.fromkeys(near))
            questions.append(Question(coder.ids(asked["question"], MAX_QUESTION), own, spans, near, 1.0))
    for asked in read_rows(more) if more else ():
        own = index[asked["passage"]]
        span = span_of(passages[own], asked["start"], asked["start"] + len(asked["answer"]))
        if span is not None and not (holds_out and is_held_out(rows[own]["title"])):
            near = tuple(n for n in found_near.get(own, ()) if asked["answer"].lower() not in rows[n]["text"].lower())
            questions.append(Question(coder.ids(asked["question"], MAX_QUESTION), own, (span,), near, 1.0))
    return ExampleSet(passages, questions)


def read_technical(
    files: Sequence[Path], coder: Coder, weight: float, first_passage: int, *, holds_out: bool = False
) -> ExampleSet:
    """Read technical questions. A wrong passage is one of the same source, near by in the file, without the answer.

    Args:
        holds_out: Leave out held-out passages, as questions and as wrong passages.

    Raises:
        ValueError: An answer is not in its passage.
    """
    rows = [row for file in files for row in read_rows(file)]
    rows = [row for row in rows if not (holds_out and is_held_out_passage(row["text"]))]
    passages = [coder.passage(row["text"], row["title"]) for row in rows]
    questions = []
    for own, row in enumerate(rows):
        others = [n for n in range(max(0, own - _NEAR), min(len(rows), own + _NEAR + 1)) if n != own]
        others = [n for n in others if rows[n]["source"] == row["source"]]
        for asked in row["questions"]:
            ids = coder.ids(asked["question"], MAX_QUESTION)
            if asked["answer"] is None:
                questions.append(Question(ids, first_passage + own, (), (), weight))
                continue
            start = start_of(asked, row["text"])
            span = span_of(passages[own], start, start + len(asked["answer"]))
            if start < 0 or span is None:
                raise ValueError(f"the answer of {asked['question']!r} is not in its passage")
            near = tuple(first_passage + n for n in others if asked["answer"].lower() not in rows[n]["text"].lower())
            questions.append(Question(ids, first_passage + own, (span,), near, weight))
    return ExampleSet(passages, questions)


def start_of(asked: Mapping[str, Any], text: str) -> int:
    """Return the first character of a technical question's answer; -1 if it is not in the text."""
    return int(asked.get("start", text.find(asked["answer"])))


def joined(sets: Sequence[ExampleSet]) -> ExampleSet:
    """Join sets whose passage numbers continue each other."""
    return ExampleSet([p for one in sets for p in one.passages], [q for one in sets for q in one.questions])


def read_examples(  # noqa: PLR0913
    reading_qa: Path,
    technical: Sequence[Path],
    coder: Coder,
    neighbours: NDArray[np.int32],
    skip: Sequence[str],
    technical_weight: float,
    more: Path | None = None,
) -> ExampleSet:
    """Read all training data; nothing of it is held out.

    Args:
        more: further questions about the passages of reading-qa, as in `read_people`.
    """
    people = read_people(reading_qa, coder, neighbours, skip, more=more, holds_out=True)
    own = read_technical(technical, coder, technical_weight, len(people.passages), holds_out=True)
    return joined([people, own])


def read_held_out(
    reading_qa: Path, technical: Sequence[Path], coder: Coder, neighbours: NDArray[np.int32], skip: Sequence[str]
) -> dict[str, ExampleSet]:
    """Read the questions that `read_examples` leaves out."""
    people = read_people(reading_qa, coder, neighbours, skip)
    asked = set(read_people(reading_qa, coder, neighbours, skip, holds_out=True).questions)
    rows = [row for file in technical for row in read_rows(file)]
    held = {number for number, row in enumerate(rows) if is_held_out_passage(row["text"])}
    own = read_technical(technical, coder, 1.0, 0)
    return {
        "held-people": _alone(people, [one for one in people.questions if one not in asked]),
        "held-technical": _alone(own, [one for one in own.questions if one.passage in held]),
    }


def _alone(examples: ExampleSet, questions: Sequence[Question]) -> ExampleSet:
    """Return these questions with their own passages only."""
    numbers = {passage: number for number, passage in enumerate(sorted({one.passage for one in questions}))}
    renamed = [replace(one, passage=numbers[one.passage], negatives=()) for one in questions]
    return ExampleSet([examples.passages[passage] for passage in numbers], renamed)


def _crop(passage: TokenisedPassage, keep: tuple[int, int], limit: int, rng: random.Random) -> tuple[int, int]:
    """Tokens [first, last) of a run of sentences around `keep`, of about `limit` tokens, cut like a chunk."""
    cuts = passage.cuts
    low = max(cut for cut in cuts if cut <= keep[0])
    high = min(cut for cut in cuts if cut > keep[1])
    first, last = cuts.index(low), cuts.index(high)
    while True:
        choices = []
        if first > 0 and cuts[last] - cuts[first - 1] <= limit:
            choices.append((first - 1, last))
        if last < len(cuts) - 1 and cuts[last + 1] - cuts[first] <= limit:
            choices.append((first, last + 1))
        if not choices:
            break
        first, last = rng.choice(choices)
    begin, end = cuts[first], cuts[last]
    if end - begin > limit:  # one long sentence
        begin = max(
            begin, min(keep[0], rng.randint(keep[1] - limit + 1, keep[0]) if keep[1] - keep[0] < limit else keep[0])
        )
        end = min(end, max(begin + limit, keep[1] + 1))
    return begin, end


def _row(
    question: Question, passage: TokenisedPassage, has_answer: bool, limit: int, group: int, rng: random.Random
) -> Row:
    at = rng.choice(question.spans) if has_answer else (rng.randrange(len(passage.ids)),) * 2
    begin, end = _crop(passage, at, limit, rng)
    heading = passage.heading if rng.random() < 0.6 else ()
    head = [CLS, *question.ids, SEP, *heading]
    first = len(head)
    spans = tuple((s - begin + first, e - begin + first) for s, e in question.spans if begin <= s and e < end)
    return Row([*head, *passage.ids[begin:end].tolist(), SEP], first, spans if has_answer else (), group)


def groups_of(examples: ExampleSet, seed: int, epoch: int, max_tokens: int) -> Iterator[list[Row]]:
    """Yield the groups of an epoch in random order."""
    rng = random.Random(f"{seed}/{epoch}")
    asked = [
        question
        for question in examples.questions
        for _ in range(int(question.weight) + (rng.random() < question.weight % 1))
    ]
    rng.shuffle(asked)
    for question in asked:
        yield group_of(question, examples.passages, max_tokens, rng)


def group_of(
    question: Question, passages: Sequence[TokenisedPassage], max_tokens: int, rng: random.Random
) -> list[Row]:
    """Draw the rows of one question."""
    draw = rng.random()
    limit = rng.randint(64, max_tokens)
    rows = []
    if draw < 0.82 or not question.negatives:
        rows.append(_row(question, passages[question.passage], bool(question.spans), limit, 0, rng))
    if draw > 0.66 and question.negatives:
        rows.append(_row(question, passages[rng.choice(question.negatives)], False, limit, 0, rng))
    return rows


def steps(
    examples: ExampleSet, seed: int, first_step: int, groups_per_step: int, num_parts: int, max_tokens: int
) -> Iterator[list[list[list[Row]]]]:
    """Yield, for each step from `first_step`, its micro-batches of groups; groups of similar length stay together.

    Raises:
        ValueError: there are too few questions.
    """
    window = groups_per_step * 32
    step, epoch = 0, 0
    while True:
        rng = random.Random(f"order/{seed}/{epoch}")
        groups = list(groups_of(examples, seed, epoch, max_tokens))
        if len(groups) < window:
            raise ValueError(f"{len(groups)} questions are too few: {groups_per_step} groups a step need {window}")
        for start in range(0, len(groups) - window + 1, window):
            ordered = sorted(groups[start : start + window], key=lambda rows: max(len(row.ids) for row in rows))
            size = groups_per_step // num_parts
            parts = [ordered[at : at + size] for at in range(0, window, size)]
            batches = [
                [parts[number] for number in range(at, len(parts), len(parts) // num_parts)]
                for at in range(len(parts) // num_parts)
            ]
            rng.shuffle(batches)
            for batch in batches:
                if step >= first_step:
                    yield batch
                step += 1
        epoch += 1
