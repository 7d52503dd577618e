"""Tests every row of the technical questions."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import training.reader
from training.reader.commands import MORE
from training.reader.examples import is_held_out, is_held_out_passage, read_rows, start_of, technical_files

FOLDER = Path(training.reader.__file__).parent / "questions"
FILES = technical_files(FOLDER)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [row for file in FILES for row in read_rows(file)]


def test_every_answer_is_in_its_passage(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row.keys() == {"source", "title", "text", "questions"} and row["title"] and row["questions"]
        assert 300 <= len(row["text"]) <= 1100, row["title"]
        for asked in row["questions"]:
            assert asked.keys() >= {"question", "answer"} and asked["question"].strip()
            if asked["answer"] is None:
                continue
            start = start_of(asked, row["text"])
            assert asked["answer"].strip() == asked["answer"] != ""
            assert row["text"][start : start + len(asked["answer"])] == asked["answer"] and start >= 0, asked


def test_no_question_is_asked_twice(rows: list[dict[str, Any]]) -> None:
    counts = Counter(asked["question"].lower() for row in rows for asked in row["questions"])
    assert [question for question, number in counts.items() if number > 1] == []


def test_an_eighth_of_the_first_passages_is_held_out() -> None:
    """The last file was drawn from passages that are not."""
    held = [[is_held_out_passage(row["text"]) for row in read_rows(file)] for file in FILES]
    assert 0.08 < sum(map(sum, held[:-1])) / sum(map(len, held[:-1])) < 0.17
    assert not any(held[-1])


@pytest.mark.shared
def test_every_answer_about_passages_of_reading_qa_is_in_its_passage(shared: Path) -> None:
    passages = {row["_id"]: row for row in read_rows(shared / "data/reading-qa/passages.jsonl")}
    own = list(read_rows(MORE))
    assert len({(row["passage"], row["question"].lower()) for row in own}) == len(own) > 10_000
    for row in own:
        about, start = passages[row["passage"]], row["start"]
        assert about["text"][start : start + len(row["answer"])] == row["answer"] != "", row
        assert row["question"].strip() == row["question"] and not is_held_out(about["title"]), row


def test_readme_states_each_source_with_its_licence_and_counts(rows: list[dict[str, Any]]) -> None:
    table = re.findall(
        r"^\| (\S+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| (\d+) \| (\d+) \|$",
        (FOLDER / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    stated = {name: (int(passages), int(questions)) for name, _, _, _, passages, questions in table}
    counted = {
        source: (number, sum(len(row["questions"]) for row in rows if row["source"] == source))
        for source, number in Counter(row["source"] for row in rows).items()
    }
    assert stated == counted and len(table) == len(stated)
