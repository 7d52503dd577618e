"""Tests `stillroom bench follow-ups`: its conversations, and a run on a tiny data set."""

import json
from pathlib import Path

import pytest

from stillroom.config.settings import SearchConfig, StillroomConfig
from stillroom.errors import UsageError
from stillroom_bench.quality.follow_ups import (
    ALONE,
    BY_SCORE,
    CHANGES,
    FOLLOW_UPS,
    IN_TURNS,
    TOGETHER,
    conversations,
    follow_up,
    in_turns,
    run_follow_ups,
)
from stillroom_bench.quality.quality_options import FollowUpOptions
from tests.rag.test_conversation import scored

NUM_DOCUMENTS = 22


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("Who built the Super Bowl?", "Where is the Super Bowl kept?", "Where is the it kept?"),
        ("What is Rust?", "When was rust, and not Java, released?", "When was it, and not Java, released?"),
        ("Who built it?", "Where was it kept?", None),
        ("Where are the keys?", "Where are the keys?", None),
    ],
)
def test_follow_up_says_it_for_what_both_questions_name(first: str, second: str, expected: str | None) -> None:
    assert follow_up(first, second) == expected


def test_conversations_ask_about_one_document_or_about_two() -> None:
    queries = {f"q{number}": f"what about subject{number // 2} and thing{number}" for number in range(12)}
    qrels = {query: {f"d{int(query[1:]) // 2}": 1} for query in queries}
    made = conversations(queries, qrels, 4, seed=1)
    assert [len(made[kind]) for kind in (FOLLOW_UPS, CHANGES)] == [4, 4]
    first_of = {text: query for query, text in queries.items()}
    for kind, cases in made.items():
        for case in cases:
            is_same = qrels[first_of[case.first]] == qrels[case.query]
            assert is_same == (kind == FOLLOW_UPS)
            assert ("about it and" in case.second) == is_same
    assert made == conversations(queries, qrels, 4, seed=1)


def test_merging_in_turns_alternates() -> None:
    found = in_turns(scored(1, 2, 3), scored(4, 1, 5), 4)
    assert [one.chunk.chunk_id for one in found] == [1, 4, 2, 3]


def data_set(folder: Path, num_questions: int) -> Path:
    """Write documents about words of their own, with questions about each."""
    folder.mkdir()
    texts = [f"The tower{at} of town{at} has a bell{at} and a gate{at}." for at in range(NUM_DOCUMENTS)]
    asked = ("Has tower{} a bell{} there?", "Has tower{} a gate{} there?")[:num_questions]
    lines = [(at, kind, text.format(at, at)) for at in range(NUM_DOCUMENTS) for kind, text in enumerate(asked)]
    rows = [json.dumps({"_id": f"d{at}", "title": "", "text": text}) for at, text in enumerate(texts)]
    (folder / "corpus.jsonl").write_text("\n".join(rows))
    rows = [json.dumps({"_id": f"q{at}-{kind}", "text": text}) for at, kind, text in lines]
    (folder / "queries.jsonl").write_text("\n".join(rows))
    rows = ["query-id\tcorpus-id\tscore", *(f"q{at}-{kind}\td{at}\t1" for at, kind, _ in lines)]
    (folder / "qrels.tsv").write_text("\n".join(rows))
    return folder


def test_run_measures_every_way_of_searching(tmp_path: Path) -> None:
    config = StillroomConfig(search=SearchConfig(mode="sparse"))
    options = FollowUpOptions((data_set(tmp_path / "towers", 2),))
    result = run_follow_ups(options, tmp_path / "work", config)

    for kind in (FOLLOW_UPS, CHANGES):
        for arm in (ALONE, TOGETHER, IN_TURNS, BY_SCORE):
            values = result.samples.of(f"towers, {kind}/{arm}", "ndcg_at_10")
            assert len(values) == NUM_DOCUMENTS and max(values) <= 1.0
    best = [result.summary(f"towers, {FOLLOW_UPS}/{arm}", "mrr_at_10").mean for arm in (ALONE, TOGETHER, BY_SCORE)]
    assert best == [1.0, 1.0, 1.0]  # each bell and each gate has one document
    assert result.summary(f"towers, {CHANGES}/{ALONE}", "mrr_at_10").mean == 1.0
    assert result.ratio(f"towers, {CHANGES}/{BY_SCORE}", "mrr_at_10") is not None


def test_data_set_with_one_question_a_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="several questions a document"):
        run_follow_ups(FollowUpOptions((data_set(tmp_path / "one", 1),)), tmp_path / "work", StillroomConfig())
