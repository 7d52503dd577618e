"""Tests relevance metrics against hand-computed values."""

import math

import pytest

from stillroom_bench.quality.ir_metrics import METRICS, evaluate


def test_metrics_equal_hand_computed_values() -> None:
    qrels = {"q1": {"a": 2, "b": 1, "c": 0, "z": 1}, "q2": {"x": 1}, "unjudged": {"x": 0}}
    run = {"q1": ["c", "b", "a"], "q2": ["y"], "unjudged": ["x"], "unknown": ["x"]}
    values = evaluate(qrels, run)
    assert set(values) == set(METRICS) and all(len(column) == 2 for column in values.values())
    gain = 1 / math.log2(3) + 2 / math.log2(4)
    ideal = 2 / math.log2(2) + 1 / math.log2(3) + 1 / math.log2(4)
    assert values["ndcg_at_10"][0] == pytest.approx(gain / ideal)
    assert values["recall_at_5"].tolist() == pytest.approx([2 / 3, 0.0])
    assert values["mrr_at_10"].tolist() == [0.5, 0.0]


def test_recall_cutoffs_count_ranks() -> None:
    documents = [f"d{rank}" for rank in range(1, 121)]
    values = evaluate({"q": {"d5": 1, "d10": 1, "d11": 1, "d101": 1}}, {"q": documents})
    assert values["recall_at_5"][0] == 0.25
    assert values["recall_at_10"][0] == 0.5
    assert values["recall_at_100"][0] == 0.75
    assert values["mrr_at_10"][0] == 0.2


def test_run_is_scored_in_its_given_order() -> None:
    qrels = {"q": {"a": 1}}
    assert evaluate(qrels, {"q": ["a", "b"]})["mrr_at_10"][0] == 1.0
    assert evaluate(qrels, {"q": ["b", "a"]})["ndcg_at_10"][0] == pytest.approx(1 / math.log2(3))
    assert evaluate(qrels, {"q": []})["ndcg_at_10"][0] == 0.0
