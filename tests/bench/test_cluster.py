"""Tests `stillroom bench cluster` at a tiny size, its traffic, and that a verdict is never kinder than its interval."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from stillroom.errors import UsageError
from stillroom_bench.experiments import cluster
from stillroom_bench.experiments.cluster import ARMS, EXPERIMENTS, GATE, OURS, geometric, run_cluster, verdict
from stillroom_bench.experiments.experiment_options import ClusterOptions
from stillroom_bench.instrument.bench_report import to_markdown
from stillroom_bench.instrument.statistics import Interval
from stillroom_bench.loads.cluster_traffic import made_traffic, recorded_traffic


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A trace of 24 questions over 12 passages."""
    passages = [f"passage {number} " + "word " * (20 + number) for number in range(12)]
    rows = [[passages[(number * step) % 12] for step in (1, 5, 7)] for number in range(1, 25)]
    (tmp_path / "rag_tiny.json").write_text(json.dumps({"retrieved_docs": rows}))
    return tmp_path


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_NUM_CHUNKS", 60)
    monkeypatch.setattr(cluster, "_CAPACITY_REQUESTS", 4)
    monkeypatch.setattr(cluster, "AGES", (0.0, 1.0))
    monkeypatch.setattr(cluster, "CHANGE_ARMS", ("round robin", OURS))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "changes" else pytest.mark.slow) for name in EXPERIMENTS]
)
def test_experiment_fills_its_tables_and_is_deterministic(name: str, data: Path) -> None:
    options = ClusterOptions(experiments=(name,), data=data, engines=(2,), num_requests=8, repeat=1, arms=(OURS,))
    found, again = run_cluster(options), run_cluster(options)

    assert found.tables == again.tables
    assert all(row.keys() == rows[0].keys() for rows in found.tables.values() for row in rows)
    assert "| cost, chunks |" in to_markdown(found)


def test_report_compares_every_arm_and_judges_the_best_prefix_arm(data: Path) -> None:
    found = run_cluster(ClusterOptions(data=data, engines=(2,), num_requests=12, repeat=2, modes=("exact",)))
    (gate,), rows = found.tables.values()

    assert [row["arm"] for row in rows] == list(ARMS)
    assert next(row for row in rows if row["arm"] == OURS)["time / chunks"] == "1 [1, 1]"
    best = min((row for row in rows if row["arm"] in cluster.PREFIX_ARMS), key=lambda row: row["mean ms"])
    assert gate["best prefix arm"] == best["arm"] and gate["time / chunks"] == best["time / chunks"]


def test_prepared_chunks_are_reused_by_every_arm_where_all_engines_hold_them(data: Path) -> None:
    def reused(copies: int) -> list[str]:
        arms = ("round robin", OURS)
        options = ClusterOptions(
            data=data,
            traces=("tiny",),
            engines=(2,),
            num_requests=12,
            repeat=1,
            modes=("prepared",),
            arms=arms,
            copies=copies,
        )
        return [row["tokens reused"] for row in list(run_cluster(options).tables.values())[-1]]

    everywhere, at_home = reused(0), reused(1)
    assert everywhere[0] == everywhere[1] and float(everywhere[0].rstrip("%")) > 70, "all but the questions"
    assert max(map(float, (one.rstrip("%") for one in at_home))) < float(everywhere[0].rstrip("%"))


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(1.3, GATE, 1.5), "passes"),
        (Interval(1.3, 1.05, 1.5), "undecided, faster"),
        (Interval(1.05, 1.02, 1.09), "fails, faster"),
        (Interval(1.05, 0.95, 1.2), "undecided, no difference shown"),
        (Interval(0.9, 0.8, 0.99), "fails, slower"),
        (Interval(9.0, math.nan, math.nan), "unknown: one repetition"),
    ],
)
def test_verdict_is_never_kinder_than_the_interval(interval: Interval, text: str) -> None:
    assert verdict(interval) == text


def test_geometric_mean_has_student_s_interval() -> None:
    found = geometric([1.0, 2.0, 4.0])

    assert found.value == pytest.approx(2.0)
    assert found.high / found.value == pytest.approx(math.exp(4.3027 * math.log(2) / math.sqrt(3)), rel=1e-3)
    assert found.value / found.low == pytest.approx(found.high / found.value)


def test_recorded_questions_keep_their_passages_and_equal_passages_have_equal_tokens(data: Path) -> None:
    traffic = recorded_traffic(data / "rag_tiny.json")
    prompts = traffic.prompts(100, [0])

    assert len(traffic.chunks) == 12 and len(prompts) == 24
    assert sorted(prompt[1:-1] for prompt in prompts) == sorted(
        tuple(traffic.chunks[chunk] for chunk in row) for row in traffic.retrieved
    )
    assert len(recorded_traffic(data / "rag_tiny.json", 1.0).prompts(100, [0])) == 100


def test_topics_have_chunks_of_one_topic_and_independent_chunks_do_not() -> None:
    topics, independent = (made_traffic(200, 300, 5, 0, has_topics=has_topics) for has_topics in (True, False))

    assert all(len({chunk // 10 for chunk in row}) == 1 and len(set(row)) == 5 for row in topics.retrieved)
    assert all(len(set(row)) == 5 for row in independent.retrieved)
    assert any(len({chunk // 10 for chunk in row}) > 2 for row in independent.retrieved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ClusterOptions(), "--experiment traces needs --data"),
        (ClusterOptions(experiments=("nothing",)), "unknown experiments nothing"),
        (ClusterOptions(arms=("best",)), "unknown arms best"),
        (ClusterOptions(traces=("big",)), "no trace big in --data; it has tiny"),
        (ClusterOptions(experiments=("generated",), modes=("off",)), "unknown mode 'off'"),
        (ClusterOptions(experiments=("generated",), modes=("prepared",)), "needs --experiment traces"),
    ],
)
def test_wrong_options_are_refused(options: ClusterOptions, message: str, data: Path) -> None:
    if options.traces:
        options = replace(options, data=data)
    with pytest.raises(UsageError, match=message):
        run_cluster(options)
