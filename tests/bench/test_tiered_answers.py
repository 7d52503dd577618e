"""Tests `stillroom bench tiered --answers` at a tiny size, and the rule that chooses the divisions."""

import queue
import threading
from pathlib import Path

import numpy as np
import pytest

from stillroom.retrieval.tiers.search_profile import Effort, SearchProfile, measure_profile
from stillroom.retrieval.tiers.tiered_ivf import TieredLists, write_bare_list_file
from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.reuse_search import Asked
from stillroom_bench.experiments.tiered_answers import (
    BatchedSearch,
    TieredAnswersOptions,
    UnloadedModel,
    memory_by_target,
    plan_for,
    run_answers,
)
from stillroom_bench.experiments.tiered_throughput import SkewedQuestions, made_lists
from stillroom_bench.quality.runtime import Shape

SCOPE = TieredOptions(size=8000, nlist=64, nprobe=4, repeat=2)
SHAPE = Shape(vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def questions() -> SkewedQuestions:
    return SkewedQuestions(made_lists(SCOPE), 0.8, SCOPE)


@pytest.fixture(scope="module")
def profile(questions: SkewedQuestions, tmp_path_factory: pytest.TempPathFactory) -> SearchProfile:
    effort = Effort(batch_sizes=(1, 4), num_queries=8)
    lists = made_lists(SCOPE)
    return measure_profile(lists, questions.draw(200, -2), SCOPE.nprobe, tmp_path_factory.mktemp("disk"), effort)


@pytest.mark.slow  # a model behind a search, for each division
def test_every_division_is_measured_with_and_without_the_dispatcher(tmp_path: Path) -> None:
    asked = TieredAnswersOptions(slos=(1.0001, 1e6), num_requests=6, num_warm=4, num_documents=40)

    result = run_answers(SCOPE, asked, tmp_path, shape=SHAPE)

    arms = {f"{name}{end}" for name in ("all on disk", "all in RAM") for end in ("", ", batches end together")}
    assert set(result.samples.values) == arms, (
        "the rule finds no division for one target, and needs nothing in RAM for the other"
    )
    hard, easy = result.tables["Targets"]
    assert hard["lists in RAM"] == "" and hard["rule"].startswith("no hit rate: latency")
    assert easy["lists in RAM"] == "all on disk" and easy["within it, as planned"] == "100%"
    for arm in arms:
        waits, firsts = (result.samples.of(arm, f"mean_{what}_seconds") for what in ("search", "ttft"))
        assert all(0 < wait < first for wait, first in zip(waits, firsts, strict=True))
    assert not list(tmp_path.glob("*.ivf"))


@pytest.mark.slow  # measures a profile
def test_tighter_target_needs_at_least_as_many_lists_in_ram(profile: SearchProfile) -> None:
    rate = 0.5 / float(np.max(profile.model.times.scan_seconds))
    counts = []
    for slo in np.geomspace(1e-4, 1.0, 25).tolist():
        plan = plan_for(1.0 + slo, UnloadedModel(1.0, rate), profile, SCOPE.nprobe)
        counts.append(SCOPE.nlist + 1 if plan.held is None else len(plan.held))
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 0


@pytest.mark.slow  # measures a profile
def test_memory_falls_with_the_target_of_the_search(profile: SearchProfile) -> None:
    rows = memory_by_target(UnloadedModel(1.0, 1e-3), profile, SCOPE.nprobe)
    held = [SCOPE.nlist + 1 if "lists in RAM" not in row else row["lists in RAM"] for row in rows]
    assert held == sorted(held, reverse=True) and held[-1] == 0
    assert rows[-1]["MB in RAM"] == 0 and rows[-1]["of all bytes"] == "0.0%"
    targets = [row["search within, ms"] for row in rows]
    assert targets == sorted(targets) and targets[0] == pytest.approx(targets[-1] / 2)


@pytest.mark.slow  # measures a machine first
@pytest.mark.parametrize("dispatches", [True, False])
def test_waiting_requests_are_searched_as_one_batch(
    questions: SkewedQuestions, tmp_path: Path, dispatches: bool
) -> None:
    tiers = TieredLists(write_bare_list_file(made_lists(SCOPE), tmp_path / "lists"), np.arange(20))
    asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
    for number in range(5):
        asked.put((number, [[number]]))
    ended: list[Asked] = []
    search = BatchedSearch(tiers, questions.draw(5, 0), SCOPE.nprobe, dispatches)

    thread = threading.Thread(target=search, args=(asked, ended.append))
    thread.start()
    while len(ended) < 5:
        threading.Event().wait(0.001)
    search.stop(asked)
    thread.join(30)

    assert search.num_batches == 1 and sorted(ended) == [(number, [[number]]) for number in range(5)]
    tiers.close()
