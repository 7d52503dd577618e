"""Prints the answers of `stillroom ask --json` with the places they cite, and compares them with expected facts.

stillroom ask - --json < examples/demo_questions.txt | python examples/answers.py examples/demo_questions.jsonl
"""

import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_START, _END = "\ue000", "\ue001"
"""Stand for the codes of bold type while lines are wrapped, so that each counts as one character."""


def main(questions: Path) -> None:
    rows = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()]
    is_styled = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    num_right = num_answers = 0
    for num_answers, line in enumerate(sys.stdin, start=1):
        answer, row = json.loads(line), rows[num_answers - 1]
        if answer["question"] != row["question"]:
            sys.exit(f"answer {num_answers} is to {answer['question']!r}, not to {row['question']!r}")
        num_right += is_right(answer, row["answers"])
        print("\n".join(lines_of(answer, row["answers"], is_styled=is_styled)), flush=True)
    if num_answers < len(rows):
        sys.exit(f"{len(rows)} questions, but {num_answers} answers")
    print(f"\n{num_right} of {num_answers} are as {questions} expects.")


def is_right(answer: dict[str, Any], expected: list[str]) -> bool:
    """Return whether the answer holds an expected fact, or cites nothing if the documents do not answer."""
    if not expected:
        return not places_of(answer)
    text = " ".join(answer["text"].split())
    return any(fact in text for fact in expected)


def lines_of(answer: dict[str, Any], expected: list[str], *, is_styled: bool) -> Iterator[str]:
    text, span = answer["text"], answer.get("highlight")
    if span and is_styled:
        text = text[: span[0]] + _START + text[span[0] : span[1]] + _END + text[span[1] :]
    wrapped = textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  ", break_long_words=False)
    yield f"\n{answer['question']}"
    yield wrapped.replace(_START, "\x1b[1m").replace(_END, "\x1b[0m")
    yield from (f"  {place}" for place in places_of(answer))
    if not is_right(answer, expected):
        yield f"  (expected: {expected[0] if expected else 'the documents do not say'})"


def places_of(answer: dict[str, Any]) -> list[str]:
    """Return `[n] document:lines  heading` of each source that the answer cites."""
    found: dict[int, str] = {}
    for one in answer["citations"]:
        if one["source"]:
            place = f"[{one['source']}] {os.path.relpath(one['document'])}{_lines(one)}  {one['heading']}"
            found.setdefault(one["source"], place)
    return list(found.values())


def _lines(citation: dict[str, Any]) -> str:
    first, last = citation["start_line"], citation["end_line"]
    if not first:
        return ""
    return f":{first}" if first == last else f":{first}-{last}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
