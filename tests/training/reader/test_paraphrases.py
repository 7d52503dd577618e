"""Held-out questions in other words: they find their questions, and all of them are held out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stillroom.models.reader import Passage
from training.reader.examples import is_held_out, is_held_out_passage, read_rows, technical_files
from training.reader.held_out import HeldOutQuestion
from training.reader.paraphrases import PARAPHRASES, in_other_words, key_of

QUESTIONS = Path("training/reader/questions")


def technical_questions() -> set[tuple[str, str]]:
    """Return keys of passages and questions of all technical questions about held-out passages."""
    rows = [row for file in technical_files(QUESTIONS) for row in read_rows(file) if is_held_out_passage(row["text"])]
    return {(key_of(row["text"]), asked["question"]) for row in rows for asked in row["questions"]}


def test_paraphrases_find_their_questions(tmp_path: Path) -> None:
    held = HeldOutQuestion("what?", ("x",), Passage("a text"), (Passage("b"),), "T")
    path = tmp_path / "paraphrases.jsonl"
    path.write_text(json.dumps({"passage": key_of("a text"), "question": "what?", "paraphrase": "which?"}) + "\n")
    elsewhere, another = replace(held, gold=Passage("another text")), replace(held, text="who?")
    assert in_other_words({"a": [elsewhere, held, another], "b": [another]}, path) == {
        "a: those with a paraphrase": [held],
        "a: paraphrased": [replace(held, text="which?")],
    }


def test_each_question_has_one_paraphrase() -> None:
    rows = list(read_rows(PARAPHRASES))
    assert len({(row["passage"], row["question"]) for row in rows}) == len(rows) == 174
    assert all(row["paraphrase"] != row["question"] for row in rows)
    assert len({(row["passage"], row["question"]) for row in rows} & technical_questions()) == 104


@pytest.mark.shared
def test_all_paraphrased_questions_are_held_out(shared: Path) -> None:
    folder = shared / "data/reading-qa"
    keys = {
        row["_id"]: key_of(row["text"]) for row in read_rows(folder / "passages.jsonl") if is_held_out(row["title"])
    }
    people = {
        (keys[row["passage"]], row["question"])
        for row in read_rows(folder / "questions.jsonl")
        if row["passage"] in keys
    }
    assert {(row["passage"], row["question"]) for row in read_rows(PARAPHRASES)} <= people | technical_questions()
