"""Tests `stillroom bench engines`: what it reads of streams and processes, and complete runs with real servers."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stillroom.config.settings import StillroomConfig
from stillroom.errors import EngineError, UsageError
from stillroom.models.bundled_models import READER
from stillroom_bench.instrument.served import TimedAnswer, engine_processes, memory_of, timed_answer
from stillroom_bench.quality.engines import (
    ONE_ENGINE,
    ONE_LARGER,
    ONE_PROCESS,
    SPLIT,
    EnginesFixture,
    memory_of_an_engine,
    run_engines,
    tokens_per_second,
    zipf_stream,
)
from stillroom_bench.quality.quality_options import EnginesOptions

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
on_linux = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")


def piece(content: str | None = None, **fields: Any) -> str:
    delta = {} if content is None else {"content": content}
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta}], **fields})


USAGE = {"prompt_tokens": 90, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 60}}
LAST = "data: " + json.dumps({"choices": [], "usage": USAGE})


def test_times_are_those_of_the_first_and_the_last_text() -> None:
    lines = [
        (piece(stillroom={"sources": []}), 0.1),
        ("", 0.1),
        (piece("Ju"), 0.4),
        (piece("th"), 0.9),
        (piece(), 1.0),
        (LAST, 1.1),
        ("data: [DONE]", 1.1),
    ]
    assert timed_answer(lines) == TimedAnswer("Juth", 0.4, 0.5, 3, 90, 60)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([piece("Ju"), 'data: {"error": {"message": "the engine is lost"}}', LAST], "the engine is lost"),
        ([piece("Ju")], "before its answer was complete"),
        ([LAST], "before its answer was complete"),
        ([], "before its answer was complete"),
    ],
)
def test_incomplete_answer_is_an_error(lines: list[str], told: str) -> None:
    with pytest.raises(EngineError, match=told):
        timed_answer((line, 1.0) for line in lines)


def test_speed_counts_the_tokens_after_the_first() -> None:
    answers = [TimedAnswer("", 9.0, seconds, tokens, 1, 0) for seconds, tokens in ((1.0, 11), (3.0, 31))]
    assert tokens_per_second(answers) == 10.0
    assert math.isnan(tokens_per_second([TimedAnswer("", 9.0, 0.0, 1, 1, 0)]))


def test_questions_repeat_by_zipfs_law_and_others_are_popular_in_each_run() -> None:
    questions = [f"question {number}" for number in range(20)]
    first = zipf_stream(questions, 4000, 1.0, seed=0, repetition=0)
    assert first == zipf_stream(questions, 4000, 1.0, seed=0, repetition=0)
    other = zipf_stream(questions, 4000, 1.0, seed=0, repetition=1)
    popular, counts = zip(*Counter(first).most_common(), strict=True)
    assert popular[0] != Counter(other).most_common(1)[0][0]
    harmonic = sum(1 / rank for rank in range(1, 21))
    assert counts[0] / 4000 == pytest.approx(1 / harmonic, rel=0.1)
    assert counts[0] / counts[1] == pytest.approx(2.0, rel=0.2)


@on_linux
def test_engines_of_a_server_are_found_and_their_memory() -> None:
    command = [sys.executable, "-c", "input()"]
    with (
        subprocess.Popen([*command, "engine", "--json"], stdin=subprocess.PIPE) as engine,
        subprocess.Popen([*command, "other"], stdin=subprocess.PIPE) as other,
    ):
        try:
            assert engine_processes(os.getpid()) == [engine.pid] and engine_processes(engine.pid) == []
            found = memory_of(engine.pid)
        finally:
            engine.kill()
            other.kill()
        assert found is not None and 0 < found[1] <= found[0] < 10**9
        engine.wait()
    assert engine_processes(os.getpid()) == [] and memory_of(engine.pid) is None


def options(**changed: Any) -> EnginesOptions:
    given: dict[str, Any] = {
        "documents": (EXAMPLES / "gazetteer",),
        "questions": EXAMPLES / "questions.jsonl",
        "repeat": 1,
    }
    return EnginesOptions(**(given | changed))


@pytest.mark.parametrize(
    ("changed", "told"),
    [({"num_questions": 500}, "fewer than --different 500"), ({"model": READER}, "a model that generates text")],
)
def test_unusable_options_are_refused_before_anything_starts(
    tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        run_engines(options(**changed), tmp_path, StillroomConfig())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.microworld
@on_linux
def test_front_and_engine_answer_as_one_process_does(tmp_path: Path) -> None:
    result = run_engines(options(num_questions=3, num_tokens=8), tmp_path, StillroomConfig())
    assert set(result.samples.values) == {ONE_PROCESS, SPLIT} and not list(tmp_path.iterdir())
    for arm, found in result.samples.values.items():
        assert all(values[0] > 0 for values in found.values())
        assert ("engine_resident_bytes" in found) == (arm == SPLIT)
    assert result.ratio(SPLIT, "first_token_seconds") is not None
    (table,) = result.tables.values()
    assert {row["arm"]: (row["answers"], row["equal"]) for row in table}[ONE_PROCESS] == (12, 12)


@pytest.mark.slow
@pytest.mark.microworld
def test_engines_hold_together_what_one_cannot(tmp_path: Path) -> None:
    asked = options(experiment="routing", num_questions=24, num_tokens=2, num_requests=40, zipf=0.0)
    result = run_engines(asked, tmp_path, StillroomConfig())
    one, two, larger = (result.samples.of(arm, "hit_rate")[0] for arm in (ONE_ENGINE, "2 engines", ONE_LARGER))
    assert 0 < one < two <= 1 and one < larger <= 1


class Sized:
    """A server whose answers took this KV."""

    def __init__(self, num_evictions: int) -> None:
        self._num_evictions = num_evictions

    def __enter__(self) -> "Sized":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, question: str, num_tokens: int) -> TimedAnswer:
        return TimedAnswer("", 1.0, 1.0, num_tokens, 100, 0)

    def metrics(self) -> dict[str, float]:
        return {
            "stillroom_kv_cache_evictions_total": self._num_evictions,
            "stillroom_kv_blocks": 100.0,
            "stillroom_kv_cache_bytes": 40_000.0,
            "stillroom_kv_cache_nodes": 4.0,
        }


def sized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, num_evictions: int = 0) -> EnginesFixture:
    """A fixture of two questions whose KV takes 40 blocks of 1,000 bytes and four halves."""
    monkeypatch.setattr(EnginesFixture, "serve", lambda *_, **__: Sized(num_evictions))
    config = StillroomConfig()
    config = replace(config, runtime=replace(config.runtime, kv_bytes=100_000))
    return EnginesFixture(options(share=share, num_tokens=12), config, tmp_path, ["a", "b"])


def test_memory_of_an_engine_is_a_share_of_what_the_questions_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes, row = memory_of_an_engine(sized(tmp_path, monkeypatch, 0.9))
    assert num_bytes == math.ceil(0.9 * 42) * 1000
    assert row["KV of all questions, MiB"] == pytest.approx(42_000 / 2**20)


@pytest.mark.parametrize(
    ("share", "num_evictions", "told"), [(0.2, 0, "of 2 questions is 9 blocks"), (0.9, 1, "raise it")]
)
def test_share_without_room_for_prompts_and_kv_without_room_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, num_evictions: int, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        memory_of_an_engine(sized(tmp_path, monkeypatch, share, num_evictions))
