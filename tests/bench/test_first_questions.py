"""Tests `stillroom bench first-questions` at a tiny size."""

from pathlib import Path

import pytest

from stillroom.errors import UsageError
from stillroom_bench.experiments.experiment_options import FirstQuestionsOptions
from stillroom_bench.experiments.first_questions import (
    ANYWHERE,
    COSTS,
    SAME_ANSWERS,
    WORKLOADS,
    run_first_questions,
)
from stillroom_bench.experiments.first_questions_report import TARGETS, TIERS, TIMES, target_rows, time_rows, verdict
from stillroom_bench.experiments.reuse_options import OFF
from stillroom_bench.instrument.bench_report import BenchResult, to_markdown
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.instrument.statistics import Interval
from stillroom_bench.loads.policy_replay import PROFILE
from stillroom_bench.quality.runtime import Shape

SHAPE = Shape(vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2)
TINY = FirstQuestionsOptions(
    num_questions=9, document_chunks=3, num_chunks=3, chunk_tokens=20, budgets=(0.0, 0.4, 1.0), dtype="float32"
)
NOTHING, SOME, ALL = "prepared 0%", "prepared 40%", "prepared 100%"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> BenchResult:
    return run_first_questions(TINY, tmp_path_factory.mktemp("bench"), shape=SHAPE, profile=PROFILE)


def test_kept_prefixes_and_an_empty_budget_change_no_token(result: BenchResult) -> None:
    rows = {row["arm"]: set(row.values()) for row in result.tables[SAME_ANSWERS]}
    assert list(rows) == [TIERS, NOTHING, SOME, ALL]
    assert rows[TIERS] == {TIERS, "9 of 9"} and rows[NOTHING] == {NOTHING, "9 of 9"}


def test_first_questions_find_only_prepared_chunks(result: BenchResult) -> None:
    computed = {(row["questions"], row["arm"]): row["prompt tokens computed"] for row in result.tables[TIMES]}
    assert computed["first", OFF] == computed["repeated", OFF] == "100.0%"
    assert computed["first", TIERS] == computed["first", NOTHING] == "74.2%", "all but the system message"
    question_only = f"{TINY.question_tokens / (32 + 3 * 20 + TINY.question_tokens):.1%}"
    assert computed["first", ALL] == computed["repeated", ALL] == computed["repeated", TIERS] == question_only


def test_a_third_of_the_questions_are_first_ones(result: BenchResult) -> None:
    (workload,) = result.tables[WORKLOADS]
    assert workload["first questions"] == 3 and workload["share reached"] == "33.3%"
    counts = {row["questions"]: row["count"] for row in result.tables[TIMES]}
    assert counts == {"all": 9, "first": 3, "repeated": 6}


def test_budget_bounds_what_is_prepared(result: BenchResult) -> None:
    rows = {row["arm"]: row for row in result.tables[COSTS]}
    num_documents = result.parameters["num_documents"]
    shares = {arm: int(row["documents"].split()[0]) / num_documents for arm, row in rows.items()}
    assert shares[TIERS] == shares[NOTHING] == 0 < shares[SOME] <= 0.4 and shares[ALL] == 1
    assert all(int(row["on disk at the end, MiB"]) >= 0 for row in rows.values())


def test_report_names_the_target_of_each_budget(result: BenchResult) -> None:
    assert [row["arm"] for row in result.tables[TARGETS]] == [NOTHING, SOME, ALL]
    assert result.baseline == TIERS and result.ratio(ALL, "ttft_seconds") is not None
    assert f"## {TARGETS}" in to_markdown(result)


@pytest.mark.slow  # two workloads with fresh engines
def test_workloads_differ_and_their_samples_are_joined(tmp_path: Path) -> None:
    options = FirstQuestionsOptions(
        num_questions=12,
        document_chunks=2,
        num_chunks=4,
        chunk_tokens=20,
        budgets=(1.0,),
        companions="drawn",
        anywhere=True,
        repeat=2,
        dtype="float32",
    )
    result = run_first_questions(options, tmp_path, shape=SHAPE)
    assert list(result.samples.values) == [OFF, TIERS, ANYWHERE, ALL]
    assert all(len(values) == 24 for metrics in result.samples.values.values() for values in metrics.values())
    assert [row["seed"] for row in result.tables[WORKLOADS]] == [0, 1]
    assert [row["arm"] for row in result.tables[COSTS]] == 2 * [TIERS, ANYWHERE, ALL]
    assert next(row for row in result.tables[SAME_ANSWERS] if row["arm"] == TIERS)["same first token"] == "24 of 24"


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.1, 0.5, "met"), (0.51, 0.7, "missed"), (0.4, 0.51, "not decided")]
)
def test_verdict_is_no_kinder_than_the_interval(low: float, high: float, expected: str) -> None:
    assert verdict(Interval(0.45, low, high)).startswith(expected)


def test_ratios_are_of_the_same_questions() -> None:
    samples = Samples()
    for tiers, prepared in ((1.0, 0.1), (0.1, 0.1), (1.0, 0.1), (0.1, 0.1)):
        samples.add(TIERS, {"ttft_seconds": tiers, "cached_share": 0.0})
        samples.add(ALL, {"ttft_seconds": prepared, "cached_share": 0.5})
    rows = {(row["questions"], row["arm"]): row for row in time_rows(samples, [True, False, True, False])}
    assert rows["first", ALL]["ratio to tiers"] == "0.1 [0.1, 0.1]"
    assert rows["repeated", ALL]["ratio to tiers"] == "1 [1, 1]"
    assert rows["all", ALL]["mean, ms"] == "100.0" and rows["all", TIERS]["mean, ms"] == "550.0"
    (row,) = target_rows(samples)
    assert row["ratio to tiers"].startswith("0.182") and row["verdict"].startswith("not decided")


def test_prompt_of_more_chunks_than_a_search_returns_is_refused() -> None:
    with pytest.raises(UsageError, match="--document-chunks"):
        FirstQuestionsOptions(document_chunks=1, num_chunks=4)
