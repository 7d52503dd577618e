"""Reads questions with accepted answers, for `bench answers`: a data set, or a file about a knowledge base.

A data set is a folder in BEIR layout whose queries have `answers`; the passages judged relevant are its gold passages.
A file is JSON lines: `question`; `answers`, a list of texts, empty if the documents do not hold the answer; and, if
known, `document`, the document that holds it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.answer_quality.beir import read_answers, read_judged_queries
from stillroom.errors import UsageError


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    question: str
    answers: tuple[str, ...]
    """Accepted answers; empty if the documents do not hold one."""
    gold: tuple[str, ...] = ()
    """Documents that hold the answer: records of a data set, or documents of the knowledge base. Empty if unknown."""


def read_questions(path: Path, limit: int | None, seed: int) -> list[AnsweredQuestion]:
    """Read the questions of a data set or a file.

    Args:
        limit: maximum number of questions, drawn with the seed; None: all.

    Raises:
        UsageError: the input has no questions with answers, or a line has another form.
        DocumentError: a line of a data set cannot be read.
    """
    found = list(_of_dataset(path) if path.is_dir() else _of_file(path))
    if not found:
        raise UsageError(f"{path} has no questions with `answers`; `bench retrieval` measures sets without them")
    order = np.random.default_rng(seed).permutation(len(found)).tolist()
    return [found[at] for at in sorted(order[:limit])]


def _of_dataset(folder: Path) -> Iterator[AnsweredQuestion]:
    queries, qrels = read_judged_queries(folder)
    answers = read_answers(folder)
    for name, text in queries.items():
        if name in answers:
            gold = tuple(document for document, grade in qrels[name].items() if grade > 0)
            yield AnsweredQuestion(text, answers[name], gold)


def _of_file(path: Path) -> Iterator[AnsweredQuestion]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line)
                document = row.get("document")
                yield AnsweredQuestion(
                    _texts([row["question"]])[0],
                    _texts(row["answers"]),
                    _texts([document] if isinstance(document, str) else document or []),
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UsageError(
                    f"{path}:{number}: not an object with `question`, `answers` (a list) and optionally `document`"
                ) from error


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    if isinstance(values, str) or not all(isinstance(one, str) and one.strip() for one in values):
        raise TypeError("not texts")
    return tuple(values)
