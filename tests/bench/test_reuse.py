"""Tests `stillroom bench reuse`: the open loop on a virtual clock, its results, and runs on a tiny model."""

import dataclasses
import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss as _faiss
import numpy as np
import pytest

from stillroom.errors import UsageError
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.planner.simulation.driving import Stepped, drive
from stillroom_bench.experiments.reuse_engine import OurRuntime
from stillroom_bench.experiments.reuse_figures import METRIC, PER_TOKEN, UNLOADED, Figures, LoadCell, sustained_rate
from stillroom_bench.experiments.reuse_options import ARMS, DEFAULT_ARMS, LEAST_VECTORS, REUSE_RATIOS, ReuseOptions
from stillroom_bench.experiments.reuse_rates import _seconds_left, run_reuse
from stillroom_bench.experiments.reuse_search import FaissSearch, Searched
from stillroom_bench.experiments.reuse_worker import DRIVING, RUNTIMES, SEARCH, common_prefix, script
from stillroom_bench.instrument.bench_report import to_markdown
from stillroom_bench.instrument.statistics import ratio_of_means
from stillroom_bench.loads.reuse_traffic import ReuseTraffic, budget_for, made_pool
from stillroom_bench.quality.runtime import Shape, write_checkpoint

faiss: Any = _faiss  # its type stubs lack names that are created at import
TINY = Shape(97, 32, 48, 2, 4, 2, 8)
SMALL = ReuseOptions(rates=(1.0, 0.5), num_requests=3, num_warm=4, num_documents=20, max_tokens=2, repeat=1)


class OneAtATime:
    """Runtime on a virtual clock: one second per first token, and half a second of idle work once."""

    def __init__(self, further: float = 0.0) -> None:
        """
        Args:
            further: seconds for the tokens after the first.
        """
        self.further = further
        self.answering: int | None = None
        self.now = 100.0
        self.queue: deque[int] = deque()
        self.num_idle_jobs = 1
        self.ended = 0.0
        self.slept: list[float] = []

    def reset(self) -> None: ...

    @property
    def has_work(self) -> bool:
        return bool(self.queue) or self.answering is not None

    def submit(self, number: int, prompt: Sequence[Sequence[int]]) -> None:
        self.queue.append(number)

    def step(self) -> Stepped:
        if self.answering is not None:
            ended, self.answering = [self.answering], None
            self.now += self.further
            self.ended = self.now
            return [], ended
        self.now += 1.0
        self.ended = self.now
        number = self.queue.popleft()
        self.answering = number if self.further else None
        return [(number, [number, 0, 0])], [] if self.further else [number]

    def do_idle_work(self) -> bool:
        self.num_idle_jobs -= 1
        self.now += 0.5 if self.num_idle_jobs >= 0 else 0.0
        return self.num_idle_jobs >= 0

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def drive(self, count: int, dues: list[float] | None) -> list[float]:
        found = drive(self, [[[1]]] * count, dues, lambda: self.now, self.sleep)
        assert found["wall_seconds"] == self.ended - 100.0
        assert found["cached"] == [[number, 0, 0] for number in range(count)]
        seconds: list[float] = found["seconds"]
        assert found["response_seconds"] == [one + self.further for one in seconds]
        return seconds


def test_times_count_from_the_due_time() -> None:
    runtime = OneAtATime()
    assert runtime.drive(4, [0.0, 0.25, 0.25, 8.0]) == [1.0, 1.75, 2.75, 1.0]
    assert runtime.slept == [4.5], "after half a second of idle work"


def test_answer_ends_with_its_last_token() -> None:
    assert OneAtATime(further=0.5).drive(3, [0.0, 0.25, 8.0]) == [1.0, 2.25, 1.0]


def test_request_that_arrives_during_idle_work_waits_for_it() -> None:
    runtime = OneAtATime()
    assert runtime.drive(2, [0.0, 1.25]) == [1.0, 1.25]
    assert not runtime.slept


def test_sequential_requests_do_not_wait() -> None:
    runtime = OneAtATime()
    assert runtime.drive(3, None) == [1.0, 1.0, 1.0]
    assert runtime.num_idle_jobs < 0, "idle work is done before the next measured request"


def test_worker_finds_the_files_that_it_loads_by_path() -> None:
    assert callable(script(DRIVING).drive)
    assert callable(script(RUNTIMES).LlamaCppRuntime) and callable(script(SEARCH).FaissSearch)


def test_common_prefix_has_the_expected_length() -> None:
    assert [common_prefix([1, 2, 3], other) for other in ([], [1, 3], [1, 2, 3, 4], [2])] == [0, 1, 3, 0]


def test_sustained_rate_interpolates_between_measurements() -> None:
    points = [(0.0, 1.0), (2.0, 2.0), (4.0, 10.0), (6.0, 3.0)]
    assert sustained_rate(points, 6.0) == 3.0
    assert sustained_rate(points, 1.5) == 1.0
    assert sustained_rate(points, 0.5) == 0.0, "too slow at the lowest rate"
    assert sustained_rate(points, 20.0) == 6.0
    assert sustained_rate(points[:1], 0.5) == 0.0
    assert sustained_rate([(0.0, 1.0), (1.0, 1.0)], 0.1) == 0.0, "too slow at every rate"


def test_figures_equal_hand_computed_values() -> None:
    figures = Figures(slo_seconds=2.0, num_tokens=5)
    prompts = [((1, 2), (3, 4, 5), (6,))] * 2
    off, lru = LoadCell("mmlu", 1, UNLOADED, "off"), LoadCell("mmlu", 1, UNLOADED, "lru")

    def answer(seconds: float, cached: list[list[int]]) -> dict[str, Any]:
        return {
            "seconds": [seconds] * 2,
            "response_seconds": [seconds + 0.4, seconds + 0.8],
            "cached": cached,
            "wall_seconds": 2 * seconds,
        }

    figures.add(off, 0, prompts, answer(2.0, [[0, 0, 0]] * 2))
    figures.add(lru, 0, prompts, answer(1.0, [[2, 1, 0], [4, 0, 2]]))
    assert figures.service_rate("mmlu", 1) == pytest.approx(1 / 2.6), "counts complete answers"
    figures.add(off.at(1.0), 0, prompts, answer(11.0, [[0, 0, 0]] * 2))
    figures.add(lru.at(1.0), 0, prompts, answer(9.0, [[0, 0, 0]] * 2))
    assert not figures.is_asked(off.at(2.0), 1.0, 0), "11 s are more than 5 times 2 s"
    assert figures.is_asked(lru.at(2.0), 1.0, 0), "9 s are more than 5 times its own, and less than 5 times off's"
    assert not figures.is_asked(off.at(3.0), 2.0, 0)
    assert figures.is_asked(off.at(1.0), UNLOADED, 1) and not figures.is_asked(off.at(2.0), 1.0, 1)

    tables = figures.tables()
    first, second, *_ = tables["time to first token"]
    assert (first["answered/s"], second["answered/s"]) == (0.5, 1.0)
    assert (first["mean"], first["mean x off"], first["mean x lru"]) == ("2 s", "", "2 [2, 2]")
    assert [second[f"{tier} hits"] for tier in ("device", "host", "disk")] == ["50.0%", "8.3%", "16.7%"]
    rows = {row["arm"]: row for row in tables["sustained requests per second"]}
    assert (rows["off"]["below 5x its own"], rows["off"]["below 5x off's"]) == ("0.342", "0.342")
    assert (rows["lru"]["below 5x its own"], rows["lru"]["below 5x off's"]) == ("0.192", "at least 0.385")
    assert (rows["off"]["90% within 2 s"], rows["lru"]["90% within 2 s"]) == ("0.0385", "0.0385")
    assert figures.samples().of("mmlu, k=1, 1x/lru", METRIC) == [9.0, 9.0]
    assert figures.samples().of("mmlu, k=1, 1x/lru", PER_TOKEN) == pytest.approx([0.1, 0.2])
    third = tables["time to first token"][2]
    assert (first["within 2 s"], first["goodput/s"], first["TPOT mean"]) == ("100%", 0.5, "150 ms")
    assert (third["arm"], third["within 2 s"], third["goodput/s"]) == ("off", "0%", 0.0)
    assert (first["TPOT x off"], first["TPOT x lru"], second["TPOT x off"]) == ("", "1 [1, 1]", "1 [1, 1]")
    assert figures.response_seconds("mmlu", 1) == pytest.approx({"off": 2.6, "lru": 1.6})


def test_time_that_is_left_equals_a_hand_computed_value() -> None:
    options = ReuseOptions(rates=(0.5, 2.0), num_requests=10, num_warm=4, repeat=2)
    rates = 10 * ((2.0 + 2.0) + (1.0 + 0.5))  # off cannot serve 2x: it takes a second for each request
    warm_up_and_one_by_one = (3 + 10) * 1.0 + (4 + 10) * 0.5

    assert _seconds_left(options, {"off": 1.0, "tiers": 0.5}) == 2 * rates + warm_up_and_one_by_one


def test_ratios_use_the_runs_that_both_arms_completed() -> None:
    figures, off, peer = Figures(), LoadCell("mmlu", 1, UNLOADED, "off"), LoadCell("mmlu", 1, UNLOADED, "vllm")

    def add(cell: LoadCell, repetition: int, seconds: float) -> None:
        answer = {
            "seconds": [seconds] * 2,
            "response_seconds": [seconds] * 2,
            "cached": [[0] * 3] * 2,
            "wall_seconds": 1,
        }
        figures.add(cell, repetition, [((1,), (2,))] * 2, answer)

    add(off, 0, 2.0)
    add(peer, 0, 1.0)
    add(off, 1, 6.0)  # the peer has ended
    first, second = figures.tables()["time to first token"]
    assert (first["mean"], first["mean x vllm"]) == ("4 s", "2 [2, 2]")
    assert second["mean x off"] == "0.5 [0.5, 0.5]"


def test_one_token_answers_have_no_time_per_further_token() -> None:
    figures, off = Figures(), LoadCell("mmlu", 1, UNLOADED, "off")
    figures.add(
        off, 0, [((1,), (2,))], {"seconds": [1], "response_seconds": [1], "cached": [[0] * 3], "wall_seconds": 1}
    )
    assert PER_TOKEN not in figures.samples().values["mmlu, k=1, one after the other/off"]
    assert not any(head.startswith("TPOT") for head in figures.tables()["time to first token"][0])


def test_ratio_of_means_resamples_blocks_of_neighbours() -> None:
    rng = np.random.default_rng(0)
    slow: list[float] = np.repeat(rng.exponential(1.0, size=20), 10).tolist()  # runs of ten are slow together
    fast = [1.0] * 200
    together, alone = ratio_of_means(slow, fast, block=10), ratio_of_means(slow, fast, block=1)
    assert together.value == alone.value == pytest.approx(sum(slow) / 200)
    assert together.low < alone.low < together.value < alone.high < together.high
    assert ratio_of_means([2.0, 4.0], [1.0, 2.0]).low == 2.0, "paired"
    few = ratio_of_means([1.0, 2.0, 6.0], [1.0, 1.0, 1.0])
    assert few.low < few.value < few.high, "three requests give a wide interval"


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_caches_in_its_tiers(arm: str, tmp_path: Path) -> None:
    pool = made_pool(20, 97, seed=0)
    prompts = ReuseTraffic(pool, "mmlu", 2, "drawn", 0).prompts(12, 0)
    budget = budget_for(pool, prompts, 2)
    settings: dict[str, Any] = {"device": budget.device, "host": budget.host, "disk": budget.disk}
    settings |= {"max_seqs": 4, "step_tokens": 512, "max_tokens": 2, "scratch": str(tmp_path / "kv")}
    runtime = OurRuntime(arm, write_checkpoint(tmp_path, TINY, "bfloat16", 0), settings, 1)
    for _ in range(2):
        found = drive(runtime, prompts, None)
        runtime.engine.check_integrity()
        assert (np.sum(found["cached"]) > 0) == (arm != "off") and found["cached"][0] == [0, 0, 0]
        kept = [sum(row) for row in drive(runtime, prompts[:1], None)["cached"]]
        assert (kept[0] > 0) == (arm != "off")
        runtime.reset()
    assert bool(list((tmp_path / "kv" / arm).iterdir())) == (arm not in ("off", "lru"))


@pytest.mark.parametrize("arm", REUSE_RATIOS)
def test_reordered_documents_are_reused_anywhere(arm: str, tmp_path: Path) -> None:
    pool = made_pool(20, 97, seed=0)
    there, back = ((pool.system, *documents, (1, 2, 3)) for documents in (pool.documents[:3], pool.documents[2::-1]))
    budget = budget_for(pool, [there, back], 1)
    settings: dict[str, Any] = {"device": budget.device, "host": budget.host, "disk": budget.disk}
    settings |= {"max_seqs": 4, "step_tokens": 512, "max_tokens": 1, "scratch": str(tmp_path / "kv")}
    folder = write_checkpoint(tmp_path, TINY, "bfloat16", 0)
    tokens = {}
    for name in ("tiers", arm):
        runtime = OurRuntime(name, folder, settings, 1, linear_profile(0.001, 0.001, 0.0))
        tokens[name] = sum(drive(runtime, [there, back], None)["cached"][1])
    num_again = -(-REUSE_RATIOS[arm] * sum(map(len, pool.documents[:3])) // 1)
    assert tokens["tiers"] == len(pool.system)
    assert tokens[arm] == len(pool.system) + sum(map(len, pool.documents[:3])) - num_again


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown peers"):
        run_reuse(ReuseOptions(peers=("other=python",)), tmp_path, shape=TINY)
    with pytest.raises(UsageError, match="unknown curves"):
        ReuseOptions(curves=("zipf",))
    with pytest.raises(UsageError, match="unknown arms tier; known are off, lru"):
        ReuseOptions(arms=("off", "tier"))
    with pytest.raises(UsageError, match="add --arm off"):
        ReuseOptions(arms=("lru",))
    with pytest.raises(UsageError, match="--slo-ttft"):
        ReuseOptions(slo_ttft=0.0)
    with pytest.raises(UsageError, match="--search 10 is too small"):
        ReuseOptions(num_vectors=10)
    for rates in ([], [0.0]):
        with pytest.raises(UsageError, match="rates"):
            ReuseOptions(rates=tuple(rates))
    with pytest.raises(UsageError, match="too long"):
        run_reuse(ReuseOptions(ks=(50,), num_warm=1, num_requests=1, repeat=1), tmp_path, shape=TINY)


class Echo:
    """Runtime that answers each prompt with one token in the next step."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.waiting: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def submit(self, number: int, prompt: Sequence[Sequence[int]]) -> None:
        self.came.append(number)
        self.waiting.append(number)

    def step(self) -> tuple[list[tuple[int, list[int]]], list[int]]:
        assert self.waiting, "a step was run without work"
        number = self.waiting.pop(0)
        return [(number, [0, 0, 0])], [number]

    def do_idle_work(self) -> bool:
        return False

    def reset(self) -> None:
        self.came.clear()


@pytest.mark.parametrize("dues", [None, [0.0] * 5])
def test_prompts_follow_their_search_in_order(dues: list[float] | None, tmp_path: Path) -> None:
    index = faiss.index_factory(8, "IVF2,Flat", faiss.METRIC_INNER_PRODUCT)
    vectors = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "index"))
    echo = Echo()
    searched = Searched(echo, FaissSearch(str(tmp_path / "index"), 1, os.sched_getaffinity(0)))
    for _ in range(2):
        found = drive(searched, [[[1]]] * 5, dues)
        assert echo.came == list(range(5)) and min(found["seconds"]) > 0.0
        searched.reset()


@pytest.mark.slow  # starts processes that import torch
def test_run_measures_every_arm_and_omits_a_broken_peer(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"timestamp": {one * one}}}\n' for one in range(9)))
    options = dataclasses.replace(SMALL, num_vectors=LEAST_VECTORS, arrivals=trace, peers=(f"vllm={sys.executable}",))
    result = run_reuse(options, tmp_path, shape=TINY)
    groups = {f"mmlu, k=2, {load}" for load in ("one after the other", "0.5x", "1x")}
    assert {name.rpartition("/")[0] for name in result.samples.values} == groups
    assert {name.rpartition("/")[2] for name in result.samples.values} == set(DEFAULT_ARMS)
    assert all(len(metrics[METRIC]) == len(metrics[PER_TOKEN]) == 3 for metrics in result.samples.values.values())
    assert result.parameters["arrivals"] == "trace.jsonl" and result.parameters["peers"] == ["vllm"]
    assert result.ratio("mmlu, k=2, one after the other/lru", METRIC) is not None
    assert any(note.startswith("vllm: left out") for note in result.notes)
    assert [row["arm"] for row in result.tables["sustained requests per second"]] == list(DEFAULT_ARMS)
    assert {row["arm"] for row in result.tables["memory"]} == set(DEFAULT_ARMS)
    assert "## time to first token" in to_markdown(result)
    assert not list(tmp_path.glob("reuse-*/")), "KV is removed"
