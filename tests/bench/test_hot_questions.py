"""Tests `stillroom bench questions`: its traffic, and a complete run on a small data set."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stillroom.config.settings import StillroomConfig
from stillroom.retrieval.embedder import Embedder, Vectors
from stillroom_bench.quality.hot_questions import CONFIGS, OURS, ask_all, asked, asked_before, run_questions
from stillroom_bench.quality.quality_options import QuestionOptions
from tests.bench.test_retrieval_quality import QUERIES, make_dataset


def test_traffic_is_seeded_and_follows_zipf() -> None:
    questions = [f"question {n}" for n in range(50)]
    traffic = QuestionOptions(Path("set"), num_questions=2000, rate=10.0, zipf=1.0)
    stream, gaps = asked(questions, traffic, seed=1)
    assert (stream, gaps) == asked(questions, traffic, seed=1) != asked(questions, traffic, seed=2)
    counts = [count for _, count in Counter(stream).most_common(2)]
    assert counts[0] / 2000 == pytest.approx(1 / sum(1 / n for n in range(1, 51)), abs=0.03)
    assert counts[0] / counts[1] == pytest.approx(2.0, abs=0.4)
    assert sum(gaps) / len(gaps) == pytest.approx(0.1, rel=0.1)


def test_asked_before_counts_earlier_occurrences() -> None:
    assert asked_before(["a", "b", "a", "a", "b"], 1) == [False, False, True, True, True]
    assert asked_before(["a", "a", "a"], 2) == [False, False, True]


def test_documents_change_between_questions() -> None:
    events: list[str] = []
    seconds = ask_all(events.append, lambda: events.append("change"), (list("abcde"), [0.0] * 5), every=2)
    assert events == ["a", "b", "change", "c", "d", "change", "e"]
    assert len(seconds) == 5 and min(seconds) >= 0


def test_run_measures_both_arms_and_removes_its_copy(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "set")
    traffic = QuestionOptions(dataset, num_questions=24, rate=1000.0, change_every=12, repeat=1)
    result = run_questions(traffic, tmp_path / "work", StillroomConfig())
    found = result.samples
    assert set(found.values) == set(CONFIGS)
    assert found.of("no cache", "hit_rate") == [0.0]
    assert found.of("cache", "hit_rate")[0] >= (24 - 4) / 24, (
        "two questions and two versions of the corpus: at most four misses"
    )
    assert result.ratio(OURS, "hot_p95_seconds") is not None
    assert len(list((tmp_path / "work").iterdir())) == 1, "the copy is removed and the original is unchanged"


@pytest.mark.slow  # measures every arm
def test_every_arm_computes_every_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded: list[set[str]] = []
    embed = Embedder.embed_queries

    def noted(self: Embedder, texts: Sequence[str]) -> Vectors:
        if embedded:
            embedded[-1].update(texts)
        return embed(self, texts)

    monkeypatch.setattr(Embedder, "embed_queries", noted)
    dataset = make_dataset(tmp_path / "set")
    traffic = QuestionOptions(dataset, num_questions=24, rate=1000.0, change_every=12, repeat=1)
    begin = lambda *_: embedded.append(set())  # noqa: E731
    run_questions(replace(traffic, repeat=2), tmp_path / "work", StillroomConfig(), begin)
    questions = {text for text, _ in QUERIES.values()}
    assert len(embedded) == 6 and all(questions <= texts for texts in embedded)
