"""Reads traces of retrieved passages per request, for `bench policies` and `bench savings`.

JSON: an object with `retrieved_docs`, a list of texts for each request, and if known `questions`, a text for each.
JSON lines (`.jsonl`): a line for each request, the list of texts, or an object with `retrieved_docs` and `question`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.errors import UsageError

TOKENS_PER_WORD = 1.3
"""Estimate for English text."""
QUESTION_TOKENS = 32
"""Length of a question whose text is unknown."""


@dataclass(frozen=True, slots=True)
class Retrieved:
    """One request of a trace."""

    documents: tuple[str, ...]
    """Texts in the order of the prompt."""
    question: str | None

    @property
    def question_tokens(self) -> int:
        return QUESTION_TOKENS if self.question is None else count_tokens(self.question)


def count_tokens(text: str) -> int:
    """Estimate the number of tokens of a text, at least 1."""
    return max(1, round(TOKENS_PER_WORD * len(text.split())))


def read_retrieved(path: Path) -> list[Retrieved]:
    """Read all requests of a trace, in order.

    Raises:
        UsageError: the file is not such a trace, or is empty; the message names the line.
    """
    try:
        requests = list(_lines(path) if path.suffix == ".jsonl" else _whole(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        kind = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is not a trace: it needs `retrieved_docs`, lists of texts ({kind})") from error
    if not requests:
        raise UsageError(f"{path} is not a trace with `retrieved_docs`: it has no requests")
    return requests


def _whole(path: Path) -> Iterator[Retrieved]:
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = found["retrieved_docs"]
    questions = found.get("questions") or [None] * len(rows)
    for number, (row, question) in enumerate(zip(rows, questions, strict=True), start=1):
        yield _request(row, question, f"request {number}")


def _lines(path: Path) -> Iterator[Retrieved]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                found = json.loads(line)
                is_list = isinstance(found, list)
                row, question = (found, None) if is_list else (found["retrieved_docs"], found.get("question"))
                yield _request(row, question, f"line {number}")


def _request(row: Any, question: Any, where: str) -> Retrieved:
    if not isinstance(row, list) or not all(isinstance(text, str) for text in row):
        raise ValueError(f"{where} is not a list of texts")
    if not (question is None or isinstance(question, str)):
        raise ValueError(f"the question of {where} is not a text")
    return Retrieved(tuple(row), question)
