"""`stillroom bench support`: its sentences, and its figures."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stillroom.errors import UsageError
from stillroom.rag.answer import Support
from stillroom_bench.quality import support
from stillroom_bench.quality.quality_options import SupportOptions
from stillroom_bench.quality.support_cases import (
    answer_kind,
    is_for_testing,
    is_held_out,
    read_cases,
    statement_of,
)
from training.reader import examples

TITLES = [f"Title {number}" for number in range(2000)]


@pytest.mark.parametrize(
    ("question", "answer", "statement"),
    [
        ("Who wrote Emma?", "Jane Austen", "Jane Austen wrote Emma."),
        ("What is the limit?", "8 MiB", "The limit is 8 MiB."),
        ("When did the war end?", "1918", "The war end, 1918."),
        ("How many keys does a tenant have?", "three", "A tenant have three (keys)."),
        ("Name a colour", "red", None),
    ],
)
def test_question_and_answer_become_a_statement(question: str, answer: str, statement: str | None) -> None:
    assert statement_of(question, answer) == statement


def test_answers_are_of_kinds() -> None:
    kinds = {answer: answer_kind(answer) for answer in ("1918", "8 MiB", "Jane Austen", "a red key")}
    assert kinds == {
        "1918": "year",
        "8 MiB": "number",
        "Jane Austen": "name of 2",
        "a red key": "phrase of 3",
    }


def test_titles_are_those_that_no_reader_was_trained_on() -> None:
    held_out = [title for title in TITLES if is_held_out(title)]
    assert held_out == [title for title in TITLES if examples.is_held_out(title)]
    assert 0.3 < sum(map(is_for_testing, held_out)) / len(held_out) < 0.7


@pytest.fixture
def data(tmp_path: Path) -> Path:
    title = next(one for one in TITLES if is_held_out(one) and is_for_testing(one))
    names = ["Ada", "Bob", "Cleo", "Dan", "Eve", "Finn"]
    passages = [
        {"_id": name, "title": title, "text": f"{name} wrote the book of {place} long ago in winter. It was good."}
        for name, place in zip(names, ["Rome", "Oslo", "Bern", "Kyiv", "Lima", "Bonn"], strict=True)
    ]
    questions = [
        {
            "passage": one["_id"],
            "question": f"Who wrote {one['text'].split('wrote ')[1].split(' long')[0]}?",
            "answers": [one["_id"]],
        }
        for one in passages
    ]
    for name, rows in (("passages", passages), ("questions", questions)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_true_sentences_are_marked_more_often_than_false_ones(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeEmbedder:
        def __init__(self, config: object) -> None: ...

        def embed_sentences(self, texts: list[str]) -> NDArray[np.float32]:
            return np.full((len(texts), 2), np.sqrt(0.5), np.float32)

    monkeypatch.setattr(support, "Embedder", FakeEmbedder)
    result = support.run_support(SupportOptions(data, num_cases=12))
    rows = result.tables["How often a mark is right"]
    assert [row["mark"] for row in rows] == [mark.value for mark in Support] * 2
    assert float(rows[0]["precision"]) > 0.5 and float(rows[0]["recall"]) > 0.5
    assert set(result.samples.values) == {support.WORDS, support.MEANING}


def test_folder_without_questions_is_refused(tmp_path: Path, data: Path) -> None:
    with pytest.raises(UsageError, match="give a folder"):
        read_cases(tmp_path / "nothing", is_test=True, limit=4, seed=0)
    with pytest.raises(UsageError, match="held-out title"):
        read_cases(data, is_test=False, limit=4, seed=0)


def test_precision_and_recall_count_marks() -> None:
    marks = [Support.SUPPORTED, Support.SUPPORTED, Support.PARTLY, Support.UNSUPPORTED]
    first, partly, last = support.quality_of([True, False, True, False], marks)
    assert (first["precision"], first["recall"], first["share"]) == ("0.500", "0.500", "0.500")
    assert "precision" not in partly
    assert (last["precision"], last["recall"]) == ("1.000", "0.500")
