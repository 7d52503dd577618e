"""Tests `stillroom bench contexts` on a few questions in the language of the bundled microworld."""

import json
from pathlib import Path
from typing import Any

import pytest

from stillroom.answer_quality.answer_metrics import exact_match
from stillroom.errors import UsageError
from stillroom_bench.quality import context_asking
from stillroom_bench.quality.context_questions import ContextQuestion, Place, read_questions
from stillroom_bench.quality.contexts import (
    FULL,
    WHOLE,
    Outcome,
    SimilarChunks,
    context_arms,
    run_contexts,
    tables_of,
    widths_table,
)
from stillroom_bench.quality.quality_options import ContextsOptions

pytestmark = pytest.mark.usefixtures("one_thread")

DOCUMENT = [
    "Pis Jurs studied grammar . He later moved to Ranholm .",
    "The birth of him is dated 1732 . For many years he served Ceckis Glass .",
    "By trade he was a clerk .",
    "The birthplace of Mulo Trallow was Sanwick . He bought the ship Pisent .",
    "He took a post at Jecko Bank . He earned a living as a printer .",
]
ASKED = [
    ("Which company employed Pis Jurs ?", "Ceckis Glass", "split", [0, 1]),
    ("In which year was Pis Jurs born ?", "1732", "split", [0, 1]),
    ("Where did Mulo Trallow take a post ?", "Jecko Bank", "split", [3, 4]),
    ("What did Pis Jurs study ?", "grammar", "single", [0]),
    ("What ship did Mulo Trallow own ?", "Pisent", "single", [3]),
]
"""Questions about the whole document, in microworld's form."""
TWO_DOCUMENTS = {
    "documents": [DOCUMENT[:3], DOCUMENT[3:]],
    "retrieved": [[0, 0], [0, 2], [1, 0], [1, 1]],
    "needed": [[0, 0], [0, 2]],
    "question": "What did Pis Jurs work as ?",
    "answer": "clerk",
    "kind": "split",
    "distance": 2,
}


def row(question: str, answer: str, kind: str, needed: list[int]) -> dict[str, Any]:
    chunks = [f"<chunk> {text} </chunk>" for text in DOCUMENT]
    return {
        "chunks": chunks,
        "question": f"<q> {question} <a>",
        "answer": answer,
        "kind": kind,
        "needed_chunks": needed,
    }


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "questions.jsonl", [row(*one) for one in ASKED] + [TWO_DOCUMENTS])


def texts(question: ContextQuestion, places: list[Place]) -> list[str]:
    return [question.chunk(place).text for place in places]


def test_both_forms_of_questions_are_read(path: Path) -> None:
    one, *_, two = read_questions(path)
    assert (one.question, one.answer, one.kind, one.distance) == (*ASKED[0][:3], 1)
    assert texts(one, list(one.retrieved)) == DOCUMENT and one.needed == ((0, 0), (0, 1))
    assert texts(two, list(two.retrieved)) == [DOCUMENT[place] for place in (0, 2, 3, 4)]
    assert (two.needed, two.kind, two.distance) == (((0, 0), (0, 2)), "split", 2)
    chunk_ids = [chunk.chunk_id for document in two.documents for chunk in document]
    assert len(set(chunk_ids)) == len(DOCUMENT)
    assert len(read_questions(path, 2)) == 2


def test_kind_and_distance_have_defaults(tmp_path: Path) -> None:
    plain = {name: value for name, value in TWO_DOCUMENTS.items() if name not in ("kind", "distance")}
    (one,) = read_questions(write(tmp_path / "plain.jsonl", [plain]))
    assert (one.kind, one.distance) == ("all", 1)


@pytest.mark.parametrize(
    "bad",
    [
        [1],
        {name: value for name, value in TWO_DOCUMENTS.items() if name != "needed"},
        {name: value for name, value in TWO_DOCUMENTS.items() if name != "answer"},
        {**TWO_DOCUMENTS, "retrieved": [[0, 3]]},
        {**TWO_DOCUMENTS, "retrieved": [0, 1]},
        {**TWO_DOCUMENTS, "needed": [[2, 0]]},
        {**TWO_DOCUMENTS, "distance": "far"},
        {**TWO_DOCUMENTS, "retrieved": [[-1, 0]]},
        {**TWO_DOCUMENTS, "retrieved": []},
        {**TWO_DOCUMENTS, "question": 5},
        {**TWO_DOCUMENTS, "documents": [["a", 5]]},
        {**row(*ASKED[0]), "needed_chunks": [9]},
    ],
)
def test_line_of_an_invalid_question_is_named(tmp_path: Path, bad: Any) -> None:
    file = write(tmp_path / "bad.jsonl", [TWO_DOCUMENTS, bad])
    with pytest.raises(UsageError, match="bad.jsonl, line 2: not a question with `documents`"):
        read_questions(file)
    assert len(read_questions(file, 1)) == 1, "lines after the limit are not read"


def test_text_that_is_no_json_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text("no question\n")
    with pytest.raises(UsageError, match="line 1"):
        read_questions(file)
    file.write_text("")
    with pytest.raises(UsageError, match="bad.jsonl has no questions"):
        read_questions(file)


def test_orders_are_those_of_a_search_result(path: Path) -> None:
    for one in read_questions(path):
        orders = one.orders(seed=3)
        assert orders == one.orders(seed=3)
        assert orders["in order"] == sorted(orders["shuffled"]) == list(one.retrieved)
        assert ("subject not retrieved" in orders) == (len(one.needed) > 1)
        if len(one.needed) > 1:
            assert sorted(orders["subject not retrieved"]) == sorted({*one.retrieved} - {one.needed[0]})
    assert len({str(read_questions(path)[0].orders(seed)["shuffled"]) for seed in range(9)}) > 3


def windows_before(place: int, length: int) -> int:
    """Return the most chunks before a chunk in any window, from an enumeration of all windows."""
    step = max(1, length - length // 4)
    return max(place - start for start in range(0, place + 1, step) if place < start + length)


@pytest.mark.parametrize("length", [2, 3, 4, 5, 8, 11, 16])
def test_window_has_most_chunks_before_a_chunk(path: Path, length: int) -> None:
    question = read_questions(path)[0]
    (arm,) = (one for one in context_arms([length], SimilarChunks()) if "windows" in one.name)
    assert arm.name == f"in windows of {length} chunks"
    for place in range(60):
        first = place - windows_before(place, length)
        assert arm.before(question, (1, place)) == [(1, chunk) for chunk in range(first, place)]


def test_other_arms_have_their_chunks_in_view(path: Path) -> None:
    question = read_questions(path)[-1]
    arms = {arm.name: arm for arm in context_arms([], SimilarChunks())}
    assert len(arms) == 8
    for place in question.retrieved:
        number, chunk = place
        assert arms["alone"].before(question, place) == []
        assert arms["behind its document"].before(question, place) == [(number, at) for at in range(chunk)]
        expected = [(number, chunk - 1)] if chunk else []
        assert arms["behind the chunk before it"].before(question, place) == expected


def test_similar_chunks_are_others_that_share_rare_words(tmp_path: Path) -> None:
    documents = [
        ["the ship Pisent had a red hull .", "the ship Pisent carried wool .", "he studied grammar ."],
        ["Jecko Bank makes wool .", "Jecko Bank is led by Pis Jurs .", "Pis Jurs studied grammar ."],
    ]
    first = {**TWO_DOCUMENTS, "documents": documents, "retrieved": [[0, 0]], "needed": [[0, 0]]}
    few = {**TWO_DOCUMENTS, "documents": [documents[0][:2]], "retrieved": [[0, 0]], "needed": [[0, 0]]}
    many, two = read_questions(write(tmp_path / "similar.jsonl", [first, few]))
    similar = SimilarChunks()
    for question in (many, two, many):  # the weights are those of the question's own chunks
        places = [(name, at) for name, chunks in enumerate(question.documents) for at in range(len(chunks))]
        for place in places:
            found = similar.before(question, place)
            assert place not in found and len(set(found)) == len(found) == min(3, len(places) - 1)
            assert set(found) <= set(places)
    assert similar.before(many, (0, 0))[0] == (0, 1), "the same ship"
    assert similar.before(many, (0, 2))[0] == (1, 2), "the same subject"
    assert set(similar.before(many, (1, 1))[:2]) == {(1, 0), (1, 2)}, "the same bank or person"


@pytest.mark.slow  # measures every arm
def test_every_arm_and_order_is_measured(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str] = []

    def recorded(answer: str, right: list[str]) -> float:
        answers.append(answer)
        return exact_match(answer, right)

    monkeypatch.setattr(context_asking, "exact_match", recorded)
    said: list[str] = []
    result = run_contexts(ContextsOptions(path, windows=(2,), max_tokens=6), said.append)
    assert said == ["6 of 6 questions"]
    names = [arm.name for arm in context_arms((2,), SimilarChunks())]
    orders = ("in order", "shuffled", "subject not retrieved")
    assert set(result.samples.values) == {f"{order}/{arm}" for order in orders for arm in (FULL, WHOLE, *names)}
    for name in result.samples.values:
        assert len(result.samples.of(name, "right")) == (4 if name.startswith("subject not") else 6)
    check_rows(result.tables, [WHOLE, FULL, *names])

    whole, full, prepared = (by_question(answers, names, arm) for arm in (WHOLE, FULL, "behind its document"))
    assert len(whole) == 6 and len(set(whole)) > 3
    assert prepared[:5] == whole[:5] == full[:5], "KV behind the whole document is that of a full prefill"
    assert by_question(answers, names, "alone") != prepared
    rights = [result.samples.of(f"in order/{arm}", "right") for arm in (WHOLE, FULL, "behind its document")]
    assert rights[0][:5] == rights[1][:5] == rights[2][:5] and rights[0][3:5] == [1.0, 1.0], "single facts are found"


def by_question(answers: list[str], names: list[str], arm: str) -> list[str]:
    """Return the answers of an arm to questions in document order, from all answers in the order of the run."""
    found, start = [], 0
    for *_, kind, _ in [*ASKED, ("", "", "split", [])]:
        num_orders = 3 if kind == "split" else 2
        places = {WHOLE: 0, FULL: 1}
        places |= {name: 1 + num_orders * (1 + number) for number, name in enumerate(names)}
        found.append(answers[start + places[arm]])
        start += 1 + num_orders * (1 + len(names))
    assert start == len(answers)
    return found


def check_rows(tables: dict[str, list[dict[str, Any]]], arms: list[str]) -> None:
    single, split = "Right answers, single questions", "Right answers, split questions"
    near, far = (f"Right answers, fact {far} behind the chunk that names its subject" for far in ("1", "2 to 3"))
    assert list(tables) == [split, single, near, far]
    for title, count in {split: 4, single: 2, near: 3, far: 1}.items():
        orders = ["in order", "shuffled", *([] if title == single else ["subject not retrieved"])]
        assert [one["KV of the chunks"] for one in tables[title]] == arms
        for one in tables[title]:
            assert list(one) == ["KV of the chunks", *orders]
            assert all(one[order].endswith(f"; n={count})") for order in orders)


def test_answers_by_bits_are_compared_with_those_of_16() -> None:
    rights = {16: [True, True, False, False], 8: [True, True, False, False], 4: [True, False, True, True]}
    outcomes = [
        Outcome(f"behind its document, {bits} bits", "in order", "split", 1, right)
        for bits, found in rights.items()
        for right in found
    ]
    (rows,) = widths_table(outcomes, [16, 8, 4]).values()
    assert [row["bits"] for row in rows] == [16, 8, 4]
    assert [row.get("lost", "")[:5] for row in rows] == ["", "0.000", "0.250"]
    assert [row.get("gained", "")[:5] for row in rows] == ["", "0.000", "0.500"]
    assert rows[2]["right"].startswith("0.750") and widths_table(outcomes, []) == {}


@pytest.mark.slow  # measures every arm
def test_narrow_kv_is_measured_beside_the_other_arms(path: Path) -> None:
    result = run_contexts(ContextsOptions(path, num_questions=3, bits=(4, 8), max_tokens=6))
    (rows,) = (rows for title, rows in result.tables.items() if title == "Answers by bits of a number")
    assert [row["bits"] for row in rows] == [16, 8, 4]
    assert rows[0]["right"][:5] == rows[1]["right"][:5], "8 bits lose nothing here"
    for order in ("in order", "shuffled"):
        wide, kept = f"{order}/behind its document", f"{order}/behind its document, 16 bits"
        assert result.samples.of(wide, "right") == result.samples.of(kept, "right")


def test_shares_have_wilson_intervals() -> None:
    outcomes = [Outcome("alone", "in order", "split", 8, number < 5) for number in range(10)]
    outcomes += [Outcome("alone", "in order", "a kind", 0, True) for _ in range(10)]
    tables = tables_of(outcomes)
    (split,) = tables["Right answers, split questions"]
    assert split == {"KV of the chunks": "alone", "in order": "0.500 (0.237 to 0.763; n=10)"}
    assert tables["Right answers, fact 7 or more behind the chunk that names its subject"] == [split]
    assert tables["Right answers, a kind questions"][0]["in order"] == "1.000 (0.722 to 1.000; n=10)"
    assert len(tables) == 3
