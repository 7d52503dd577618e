"""Questions with accepted answers, from data sets and files."""

import json
from pathlib import Path

import pytest

from stillroom.errors import UsageError
from stillroom_bench.loads.answered_questions import AnsweredQuestion, read_questions


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_data_set_gives_answers_and_gold_passages(tmp_path: Path) -> None:
    write(tmp_path / "corpus.jsonl", {"_id": "a", "text": "One."}, {"_id": "b", "text": "Two."})
    queries = [{"_id": "q1", "text": "Which?", "answers": ["One", "1"]}, {"_id": "q2", "text": "Why?"}]
    write(tmp_path / "queries.jsonl", *queries, {"_id": "q3", "text": "Who?", "answers": ["Two"]})
    (tmp_path / "qrels.tsv").write_text("q1\ta\t1\nq1\tb\t0\nq2\ta\t1\nq3\tb\t2\n")

    found = read_questions(tmp_path, None, 0)

    assert found == [AnsweredQuestion("Which?", ("One", "1"), ("a",)), AnsweredQuestion("Who?", ("Two",), ("b",))]
    assert read_questions(tmp_path, 1, 0) in ([found[0]], [found[1]])


def test_file_names_documents_and_questions_without_an_answer(tmp_path: Path) -> None:
    path = write(
        tmp_path / "eval.jsonl",
        {"question": "How often?", "answers": ["monthly"], "document": "vault.md"},
        {"question": "Who?", "answers": []},
        {"question": "Where?", "answers": ["here"], "document": ["a.md", "b.md"]},
    )

    assert read_questions(path, None, 0) == [
        AnsweredQuestion("How often?", ("monthly",), ("vault.md",)),
        AnsweredQuestion("Who?", ()),
        AnsweredQuestion("Where?", ("here",), ("a.md", "b.md")),
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Who?"},
        {"question": "", "answers": ["x"]},
        {"question": "Who?", "answers": "x"},
        {"question": "Who?", "answers": [1]},
        {"question": "Who?", "answers": ["x"], "document": 3},
        ["Who?"],
    ],
)
def test_invalid_lines_are_named(tmp_path: Path, row: object) -> None:
    path = write(tmp_path / "eval.jsonl", {"question": "How?", "answers": ["so"]}, row)

    with pytest.raises(UsageError, match=r"eval.jsonl:2: not an object with `question`"):
        read_questions(path, None, 0)


def test_input_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no questions with `answers`"):
        read_questions(write(tmp_path / "empty.jsonl"), None, 0)
