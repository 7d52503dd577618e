"""Tests `stillroom bench quality` on a few questions of the bundled model's training world."""

import json
from pathlib import Path

import pytest

from stillroom.answer_quality.arms import FULL, NONE, PREFIX, SET, alpha_name, arm_name
from stillroom.answer_quality.asking import QualityOptions, bench_runtime
from stillroom.answer_quality.questions import load_questions
from stillroom.backends.engine_building import load_configured
from stillroom.errors import UsageError
from stillroom.models.bundled_models import MICROWORLD
from stillroom_bench.quality.answers import run_quality
from stillroom_bench.quality.discarding import matching_sentences, surprising_tokens
from stillroom_bench.quality.prompt_reader import PromptReader

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [
    {
        "chunks": [
            "<chunk> As a student Pis Jurs chose grammar . He later moved to Ranholm . </chunk>",
            "<chunk> The birth of him is dated 1732 . For many years he served Ceckis Glass . </chunk>",
            "<chunk> The birthplace of Mulo Trallow was Sanwick . He bought the ship Pisent . </chunk>",
            "<chunk> He took a post at Jecko Bank . He earned a living as a printer . </chunk>",
        ],
        "question": "<q> Which company employed Pis Jurs ? <a>",
        "answer": "Ceckis Glass",
        "kind": "split",
    },
    {
        "chunks": [
            "The birthplace of Kala Broster was Glanwick . By trade she was a clerk .",
            "Lola Yevman earned a living as a miner . The mentor of her was Mesa Mevric .",
        ],
        "question": "What was the trade of Kala Broster ?",
        "answer": "clerk",
        "kind": "single",
    },
    {"chunks": ["Lolto Glass makes wool .", "Jecko Bank makes salt ."], "question": "What does Jecko Bank make ?"},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def test_every_arm_is_measured_and_compared(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    scope = QualityOptions(
        path, num_questions=2, ratios=(0.3, 1.0), alphas=(2.0,), focus_window=2, has_unturned=True, max_tokens=6
    )
    result = run_quality(scope, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    full = result.samples.of(FULL, "exact_match")
    for selector in scope.selectors:
        everything = arm_name(selector, 1.0)
        assert result.samples.of(everything, "exact_match") == full
        assert result.samples.of(everything, "same_answer") == [1.0] * 2, "a ratio of 1 is a full prefill"
    rows = {row["arm"]: row for row in result.tables["Against a full prefill"]}
    assert rows[NONE]["computed again"] == "0.0%" and float(rows[NONE]["KL of first token"]) > 0
    assert float(rows[arm_name("question", 1.0)]["KL of first token"]) == 0
    assert {row["arm"] for row in result.tables["Exact match"]} == {FULL, *rows}
    assert {PREFIX, SET, "context, alpha 2, focused", "keys not turned, question 30%"} < set(rows)
    assert rows[PREFIX]["same answer"] == rows[alpha_name("question", 2.0)]["same answer"] == "1.000"
    assert float(rows["keys not turned, no recompute"]["KL of first token"]) > 0
    likeness = {
        (row["questions"], row["arm"]): row
        for row in result.tables["Likeness to a full prefill's answer, and relative to no recompute"]
    }
    assert likeness["all (2)", PREFIX]["Jaccard"] == "1 [1, 1]" and len(likeness) == 3 * len(rows)
    assert likeness["all (2)", NONE]["ROUGE-L / no recompute"] == ""
    foretold = result.tables["What foretells the deviation of no recompute"]
    assert [row["questions"] for row in foretold] == [2] * 3, "both questions have chunks with a measured impact"
    ended = result.tables["Layer L* after which recomputation ends out of focus"]
    assert {row["arm"] for row in ended} == {name for name in rows if name.endswith("ended at L*")} and len(ended) == 6
    assert rows["question 30%, ended at L*"]["computed again"] <= rows["question 30%"]["computed again"]
    by_size = result.tables["Same answer as a full prefill, by documents in the prompt"]
    assert by_size[0]["2 documents (1)"] == "1 [0.207, 1]"
    [supported, *_] = result.tables["Sentences that the documents support"]
    assert supported["arm"] == FULL and supported["sentences"] >= 1
    assert sum(float(supported[mark]) for mark in ("supported", "partly", "unsupported")) == pytest.approx(1, abs=0.01)
    tests = result.tables["question against each other selector, same budget"]
    assert {(row["questions"], row["against"]) for row in tests} == {
        (kind, other) for kind in ("single", "split", "all") for other in scope.selectors if other != "question"
    }


def test_markers_of_a_prompt_format_are_removed(path: Path) -> None:
    first, second, third = load_questions(path)
    assert first.question == "Which company employed Pis Jurs ?"
    assert first.chunks[1].text == "The birth of him is dated 1732 . For many years he served Ceckis Glass ."
    assert (second.kind, second.answer) == ("single", "clerk") and (third.kind, third.answer) == ("all", None)
    assert load_questions(path, limit=1) == [first]


def test_agreement_is_compared_if_no_answers_are_known(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps(ROWS[2]) + "\n")
    result = run_quality(QualityOptions(file, ratios=(1.0,), selectors=("question", "random"), max_tokens=4))
    assert set(result.samples.values[FULL]) == {"same_answer"}, "no question has a known answer"
    assert result.samples.of(arm_name("random", 1.0), "same_answer") == [1.0]


def test_similar_kinds_and_ratios_have_distinct_names(tmp_path: Path) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_text(
        "".join(json.dumps(row | {"kind": kind}) + "\n" for row, kind in zip(ROWS[:2], ["a|b", "c"], strict=True))
    )
    result = run_quality(QualityOptions(file, ratios=(0.15, 0.152), selectors=("question", "first"), max_tokens=2))
    assert {"question 15%", "question 15.2%"} < set(result.samples.values)
    tests = result.tables["question against each other selector, same budget"]
    assert {row["questions"] for row in tests} == {"a|b", "c", "all"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 1"),
        ('{"chunks": ["a"]}', "question"),
        ('{"chunks": [], "question": "?"}', "list of texts"),
        ('{"chunks": [3], "question": "?"}', "list of texts"),
        ("", "no questions"),
    ],
)
def test_invalid_question_file_is_refused(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(UsageError, match=message):
        load_questions(file)


def test_discarding_keeps_a_share_of_the_text_in_order(path: Path) -> None:
    question = load_questions(path)[1]
    likely = matching_sentences(question, 0.5)
    assert [chunk.text for chunk in likely.chunks] == [
        "The birthplace of Kala Broster was Glanwick .",
        "The mentor of her was Mesa Mevric .",
    ], "16 of 32 words: five and three different words of the question"
    assert matching_sentences(question, 0.01).chunks[0].text == "The birthplace of Kala Broster was Glanwick ."

    reader = PromptReader(load_configured(bench_runtime(MICROWORLD)))
    rare = surprising_tokens(reader, question, 0.3)
    for short, whole in zip(rare.chunks, question.chunks, strict=True):
        left = iter(reader.encode(whole.text))
        kept = reader.encode(short.text)
        assert all(token in left for token in kept), "a subsequence"
        assert len(kept) == round(0.3 * len(reader.encode(whole.text)))


def test_discarding_is_compared_with_reuse(path: Path) -> None:
    result = run_quality(QualityOptions(path, num_questions=2, ratios=(0.3,), selectors=("question",)), kept=(0.3,))
    rows = {row["arm"]: row for row in result.tables["Against a full prefill"]}

    assert {"30% of the tokens", "30% of the sentences", arm_name("question", 0.3)} <= set(rows)
    assert float(rows["30% of the tokens"]["computed again"].rstrip("%")) < 45
    assert float(rows["30% of the tokens"]["KL of first token"]) > 0
