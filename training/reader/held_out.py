"""Questions that the reader never trained on: xquad, and held-out titles of reading-qa, held-out technical passages."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stillroom.models.reader import Passage
from training.data.sources import read_beir
from training.reader.examples import is_held_out, is_held_out_passage, read_rows
from training.reader.neighbours import (
    PEOPLE,
    TECHNICAL,
    Searched,
    people_questions,
    read_neighbours,
    technical_questions,
)


@dataclass(frozen=True, slots=True)
class HeldOutQuestion:
    text: str
    answers: tuple[str, ...]
    gold: Passage
    """The passage that holds the answer."""
    wrong: tuple[Passage, ...]
    """Passages without the answer, most similar first."""
    title: str
    """Questions of one title are not independent samples."""


def xquad(folder: Path) -> list[HeldOutQuestion]:
    """Read xquad; wrong passages are those of the same article that do not hold the answer, in random order."""
    found = []
    for document in read_beir(folder):
        for asked in document.questions:
            wrong = [text for text in document.paragraphs if not any(answer in text for answer in asked.answers)]
            random.Random(asked.text).shuffle(wrong)
            gold = Passage(document.paragraphs[asked.paragraph], document.title)
            others = tuple(Passage(text, document.title) for text in wrong)
            found.append(HeldOutQuestion(asked.text, asked.answers, gold, others, document.title))
    return found


def people(folder: Path, prepared: Path, skipped: Sequence[str]) -> list[HeldOutQuestion]:
    """Read the questions of reading-qa about held-out titles, without those of skipped sources.

    Raises:
        FileNotFoundError: `prepare` has not run.
        ValueError: `prepare` ran with other questions.
    """
    rows = list(read_rows(folder / "passages.jsonl"))
    is_kept = [is_held_out(row["title"]) and row["source"] not in skipped for row in rows]
    return _with_neighbours(rows, people_questions(rows, folder), is_kept, prepared / PEOPLE)


def technical(files: Sequence[Path], prepared: Path) -> list[HeldOutQuestion]:
    """Read the technical questions about held-out passages; raises as `people`."""
    rows = [row for file in files for row in read_rows(file)]
    is_kept = [is_held_out_passage(row["text"]) for row in rows]
    return _with_neighbours(rows, technical_questions(rows), is_kept, prepared / TECHNICAL)


def _with_neighbours(
    rows: Sequence[dict[str, str]], asked: Sequence[Searched], is_kept: Sequence[bool], path: Path
) -> list[HeldOutQuestion]:
    found = []
    for question, near in zip(asked, read_neighbours(path, len(asked)), strict=True):
        if is_kept[question.passage]:
            own = rows[question.passage]
            wrong = tuple(Passage(rows[at]["text"], rows[at]["title"]) for at in near if at >= 0)
            gold = Passage(own["text"], own["title"])
            found.append(HeldOutQuestion(question.text, question.answers, gold, wrong, own["title"]))
    return found
