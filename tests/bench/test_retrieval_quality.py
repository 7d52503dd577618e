"""Tests `stillroom bench retrieval` on a tiny data set, and its rules on hand-made candidates."""

import json
from pathlib import Path

import numpy as np
import pytest

from stillroom.answer_quality.beir import read_judged_queries
from stillroom.config.settings import StillroomConfig
from stillroom.core.ids import ChunkId
from stillroom.errors import DocumentError, UsageError
from stillroom.retrieval.hybrid import Candidates
from stillroom_bench.quality.fusion_arms import OURS, RULES, distribution_based, scaled, standardised
from stillroom_bench.quality.quality_options import RetrievalOptions
from stillroom_bench.quality.retrieval_quality import (
    BY_KIND,
    HELD_OUT,
    LEARNED,
    TRANSFERRED,
    Values,
    names_entity,
    pairs_of_llmds,
    popularity_rows,
    run_quality,
)

TEXTS = {
    "keys": "Rotate the signing keys every ninety days and keep the old ones for verification.",
    "cats": "Cats sleep for most of the day and hunt at dusk.",
    "bread": "Knead the dough, let it rise for an hour, then bake it in a hot oven.",
    "ships": "The harbour master records every ship that enters the port.",
}
QUERIES = {"q1": ("how often are signing keys rotated", "keys"), "q2": ("baking dough in an oven", "bread")}


def make_dataset(folder: Path) -> Path:
    folder.mkdir()
    rows = [{"_id": name, "title": "", "text": text} for name, text in TEXTS.items()]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    queries = [{"_id": name, "text": text} for name, (text, _) in QUERIES.items()]
    (folder / "queries.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*queries, {"_id": "q3", "text": "x"}])
    )
    judged = [f"{name}\t{document}\t1" for name, (_, document) in QUERIES.items()]
    (folder / "qrels.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged, "q1\tcats\t0"]) + "\n")
    return folder


def test_every_rule_answers_easy_queries(tmp_path: Path) -> None:
    sets = [make_dataset(tmp_path / "one"), make_dataset(tmp_path / "two")]
    steps: list[str] = []
    result = run_quality(RetrievalOptions(tuple(sets)), tmp_path / "work", StillroomConfig(), steps.append)
    table = {row["rule"]: row for row in result.tables["ndcg_at_10 per set"]}
    assert set(table) == {*RULES, LEARNED, BY_KIND, HELD_OUT, TRANSFERRED}
    assert all(row["one"] == row["two"] == row["mean"] == 1.0 for row in table.values())
    assert result.samples.of(f"one/{OURS}", "ndcg_at_10") == [1.0, 1.0], "queries without judgements are omitted"
    by_kind = result.tables["recall@10: weights by kind of query (llmds Hypothesis 1)"]
    assert [row["one"] for row in by_kind] == ["0 [0, 0]"] * 2
    tests = result.tables["paired t-tests of nDCG@10 per set, ours against every rule, Holm-corrected within each set"]
    assert {row["significant"] for row in tests} == {"no"}
    assert len(steps) == 4 and len(list((tmp_path / "work").iterdir())) == 2

    again = run_quality(RetrievalOptions(tuple(sets[:1])), tmp_path / "work", StillroomConfig())
    assert TRANSFERRED not in {row["rule"] for row in again.tables["ndcg_at_10 per set"]}, "there is no other set"
    assert len(list((tmp_path / "work").iterdir())) == 2, "the knowledge base was kept"


def test_judgements_are_read_from_beir_layout(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "set")
    (dataset / "qrels").mkdir()
    (dataset / "qrels.tsv").rename(dataset / "qrels" / "test.tsv")
    (dataset / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\nq2\tbread\t1\n")
    assert set(read_judged_queries(dataset)[0]) == {"q1", "q2"}
    assert set(read_judged_queries(dataset, "dev")[0]) == {"q2"}
    with pytest.raises(UsageError, match=r"qrels/train\.tsv is missing"):
        read_judged_queries(dataset, "train")
    result = run_quality(RetrievalOptions((dataset,), split="dev"), tmp_path / "work", StillroomConfig())
    assert result.samples.of(f"set/{OURS}", "ndcg_at_10") == [1.0]


def test_data_sets_of_the_same_name_are_refused(tmp_path: Path) -> None:
    sets = [tmp_path / "one" / "test", tmp_path / "two" / "test"]
    with pytest.raises(UsageError, match="two data sets have the same name"):
        run_quality(RetrievalOptions(tuple(sets)), tmp_path / "work", StillroomConfig())


def test_rules_rank_hand_made_candidates_as_expected() -> None:
    a, b, c = ChunkId(1), ChunkId(2), ChunkId(3)
    candidates = Candidates(
        dense=[(a, 0.9), (b, 0.5)],
        sparse=[(c, 20.0), (b, 10.0)],
        cosines={a: 0.9, b: 0.5, c: 0.45},
        bm25={a: 0.0, b: 10.0, c: 20.0},
        num_query_tokens=7,
    )
    first = {name: rule(candidates)[0][0] for name, rule in RULES.items()}
    assert first["dense only"] == a and first["BM25 only"] == c
    assert first["naive sum"] == c, "BM25's scale drowns the cosine"
    assert first["RRF"] == b, "found by both"
    assert first[OURS] == a or first[OURS] == c
    ranking = RULES[OURS](candidates)
    assert dict(ranking)[c] == pytest.approx(0.8 * 1.45 / 1.9 + 0.2)


def test_scalings_equal_hand_computed_values() -> None:
    side = [(ChunkId(1), 3.0), (ChunkId(2), 2.0), (ChunkId(3), 1.0)]
    assert list(scaled(side).values()) == [1.0, 0.5, 0.0]
    assert list(standardised(side).values()) == pytest.approx([2 / (2 / 3) ** 0.5, 1 / (2 / 3) ** 0.5, 0.0])
    assert distribution_based(side)[ChunkId(2)] == pytest.approx(0.5)
    same = [(ChunkId(1), 2.0), (ChunkId(2), 2.0)]
    assert set(scaled(same).values()) == {1.0} and set(distribution_based(same).values()) == {0.5}
    assert scaled([]) == standardised([]) == distribution_based([]) == {}


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("qrels.tsv", None, UsageError, r"qrels/test\.tsv is missing"),
        ("qrels.tsv", "q1 cats 1\n", DocumentError, r"qrels\.tsv:1"),
        ("qrels.tsv", "q9\tcats\t1\n", UsageError, "do the ids agree"),
        ("queries.jsonl", '{"_id": "q1"}\n', DocumentError, r"queries\.jsonl:1"),
        ("corpus.jsonl", '{"_id": "q1"\n', DocumentError, r"corpus\.jsonl"),
    ],
)
def test_broken_data_set_is_refused(
    tmp_path: Path, name: str, content: str | None, error: type[Exception], message: str
) -> None:
    dataset = make_dataset(tmp_path / "set")
    (dataset / name).unlink()
    if content is not None:
        (dataset / name).write_text(content)
    with pytest.raises(error, match=message):
        run_quality(RetrievalOptions((dataset,)), tmp_path / "work", StillroomConfig())


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("Who wrote it?", False),
        ("who wrote Emma", True),
        ("what did I say", False),
        ("how many in 1971", True),
        ('meaning of "dry dock"', True),
        ("", False),
    ],
)
def test_named_entities_of_a_query_are_found(query: str, expected: bool) -> None:
    assert names_entity(query) is expected


def test_pairs_of_llmds_have_the_interval_of_the_mean_difference() -> None:
    def rules(nasf: list[float]) -> dict[str, Values]:
        zero = {"ndcg_at_10": np.zeros(len(nasf))}
        return {"NASF (llmds 3.3)": {"ndcg_at_10": np.array(nasf)}} | dict.fromkeys(
            ("naive sum", "RRF", "min-max, weight 0.5"), zero
        )

    row = pairs_of_llmds({"a": rules([0.0, 0.2]), "b": rules([0.3, 0.3, 0.3, 0.3])})[0]

    half = 1.96 * (0.02 / 2) ** 0.5 / 2
    assert row["mean of the sets"] == f"0.2 [{0.2 - half:.3g}, {0.2 + half:.3g}]"
    assert row["b"] == "0.3 [0.3, 0.3]"


def test_most_found_documents_are_counted_for_each_search() -> None:
    dense = ["a"] * 60 + [f"d{number}" for number in range(40)]
    sparse = ["b"] * 30 + [f"d{number}" for number in range(70)]
    first, second = popularity_rows({"one": {"dense only": dense, "BM25 only": sparse}})

    assert (first["different documents"], second["different documents"]) == (41, 71)
    assert first["share"].startswith("0.6 [") and first["/ dense only"] == ""
    assert second["share"].startswith("0.31 ["), "2 of 71 documents: b, and one that was found once"
    assert second["/ dense only"].startswith("0.517 [")
