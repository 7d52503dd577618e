"""Tests questions read from files and data sets: their chunks, how chunks are cut, and errors of invalid files."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.answer_quality.questions import load_questions, shortened
from stillroom.errors import DocumentError, StillroomError, UsageError


def write(path: Path, *rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A data set of twelve passages and eight questions, the last without an answer."""
    folder = tmp_path / "numbers"
    folder.mkdir()
    passages = [f"The number {name} is drawn as a shape. Its shape is a {name}gon." for name in "abcdefghijkl"]
    rows = [{"_id": f"p{at}", "title": f"Title {at}", "text": text} for at, text in enumerate(passages)]
    write(folder / "corpus.jsonl", *rows)
    asked = [
        {"_id": f"q{at}", "text": f"Which shape has {name}?", "answers": [f"{name}gon"]}
        for at, name in enumerate("abcdefgh")
    ]
    write(folder / "queries.jsonl", *asked[:-1], {"_id": "q7", "text": "Which shape has h?"})
    (folder / "qrels.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(f"q{at}\tp{at}\t1\n" for at in range(8)) + "q0\tp9\t2\nq1\tp3\t0\n"
    )
    return folder


def test_data_set_question_has_its_relevant_passages_and_others(dataset: Path) -> None:
    questions = {one.question: one for one in load_questions(dataset)}
    assert len(questions) == 8 and {len(one.chunks) for one in questions.values()} == {5}
    for name, one in zip("abcdefg", (questions[f"Which shape has {name}?"] for name in "abcdefg"), strict=True):
        texts = [chunk.text for chunk in one.chunks]
        assert one.answers == (f"{name}gon",) and one.answer == f"{name}gon" and len(set(texts)) == 5
        assert sum(f"{name}gon" in text for text in texts) == 1
        assert all(text.startswith("Title ") for text in texts)
        assert [chunk.ordinal for chunk in one.chunks] == [0, 1, 2, 3, 4]
    assert questions["Which shape has h?"].answer is None
    assert any("jgon" in chunk.text for chunk in questions["Which shape has a?"].chunks), "also judged relevant"
    places = [
        next(at for at, chunk in enumerate(questions[f"Which shape has {name}?"].chunks) if f"{name}gon" in chunk.text)
        for name in "abcdefg"
    ]
    assert len(set(places)) > 1, "not always at the same place"


def test_data_set_questions_are_drawn_with_the_seed(dataset: Path) -> None:
    assert load_questions(dataset, 3) == load_questions(dataset)[:3] == load_questions(dataset, 3, seed=0)
    assert [one.question for one in load_questions(dataset, seed=1)] != [
        one.question for one in load_questions(dataset)
    ]
    best = next(one for one in load_questions(dataset, num_chunks=1) if one.question == "Which shape has a?")
    assert "jgon" in best.chunks[0].text and len(best.chunks) == 1, "the higher grade first"
    assert {len(one.chunks) for one in load_questions(dataset, num_chunks=20)} == {12}, "there are no more"


def test_json_list_with_contexts_is_read(tmp_path: Path) -> None:
    path = tmp_path / "multi.json"
    contexts = [{"title": "", "text": f"Text {at} is long enough."} for at in range(4)] + [
        {"title": "Oslo", "text": "He lives in Oslo."}
    ]
    path.write_text(json.dumps([{"ctxs": contexts, "question": "Where?", "answers": ["oslo", "Kristiania"]}]))
    (question,) = load_questions(path)
    assert [chunk.text for chunk in question.chunks][3:] == ["Text 3 is long enough.", "Oslo\nHe lives in Oslo."]
    assert question.answers == ("oslo", "Kristiania") and question.kind == "all"
    (fewer,) = load_questions(path, num_chunks=2, max_words=4)
    assert [chunk.text for chunk in fewer.chunks] == ["Text 0 is long", "Oslo\nHe lives in"]


def test_json_line_with_several_answers_is_read(tmp_path: Path) -> None:
    write(tmp_path / "lines.jsonl", {"chunks": ["a b", "a c"], "question": "?", "answer": ["x", "y"]})
    assert load_questions(tmp_path / "lines.jsonl")[0].answers == ("x", "y")
    assert [chunk.text for chunk in load_questions(tmp_path / "lines.jsonl", max_words=1)[0].chunks] == ["a"], (
        "no duplicates"
    )


TEXT = "One two three. Four five six seven. Eight nine ten!"


@pytest.mark.parametrize(
    ("max_words", "answers", "wanted"),
    [
        (10, ["seven"], TEXT),
        (3, [], "One two three."),
        (3, ["eleven"], "One two three."),
        (3, ["TWO"], "One two three."),
        (4, ["five six"], "Four five six seven."),
        (6, ["five six"], "two three. Four five six seven."),
        (2, ["five six"], "five six"),
        (2, ["four"], "Four five"),
        (3, ["ten"], "Eight nine ten!"),
        (3, ["ten", "two"], "One two three."),
        (1, ["ne", "nine"], "nine"),
    ],
)
def test_cutting_keeps_the_sentence_of_the_answer(max_words: int, answers: list[str], wanted: str) -> None:
    assert shortened(TEXT, max_words, answers) == wanted


@given(st.lists(st.sampled_from(["a", "b.", "c!", "dd", "e"]), min_size=1, max_size=12), st.integers(1, 12), st.data())
def test_an_answer_that_fits_is_never_cut(words: list[str], max_words: int, data: st.DataObject) -> None:
    text = " ".join(words)
    start = data.draw(st.integers(0, len(words) - 1))
    answer = " ".join(words[start : start + max_words]).rstrip(".!")
    found = shortened(text, max_words, [answer])
    assert answer in found and found in text and len(found.split()) == min(max_words, len(words))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("3", "in a list"),
        ("[]", "no questions"),
        ("[3]", "question 1: not an object with `ctxs`"),
        ('[{"ctxs": [{"text": "a"}], "question": "?"}]', "answers"),
        ('[{"ctxs": [], "question": "?", "answers": ["a"]}]', "list of texts"),
        ('[{"ctxs": [{"text": "a"}], "question": "?", "answers": [3]}]', "texts"),
    ],
)
def test_invalid_file_is_refused_by_name(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(UsageError, match=words) as error:
        load_questions(tmp_path / "bad.json")
    assert "bad.json" in str(error.value)


def test_folder_without_data_set_is_refused_by_name(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(StillroomError, match=r"corpus\.jsonl is missing"):
        load_questions(tmp_path)
    write(dataset / "queries.jsonl", {"_id": "q0", "text": "?", "answers": "one"})
    with pytest.raises(DocumentError, match=r"queries\.jsonl:1: `answers`"):
        load_questions(dataset)
