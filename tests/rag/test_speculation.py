"""Speculative prefill: whatever the stages find, tokens, sources and free blocks are those of a plain search."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.backends.base import Load
from stillroom.backends.local import LocalBackend
from stillroom.config.settings import QueryCacheConfig, SearchMode, SpeculationConfig, StillroomConfig
from stillroom.core.clock import SystemClock
from stillroom.core.document import ScoredChunk, SearchResult
from stillroom.core.ids import RequestId
from stillroom.core.request import SampleRequest, SamplingParams
from stillroom.errors import UsageError
from stillroom.rag.answer import Answer, AskOptions
from stillroom.rag.pipeline import Pipeline
from stillroom.rag.query_cache import QueryCache
from stillroom.rag.speculation import Attempt, Speculator
from stillroom.rag.stillroom import Stillroom
from stillroom.telemetry.metrics import Metrics
from stillroom.telemetry.trace import TraceLog
from tests.server.fakes import until

pytestmark = pytest.mark.microworld

PEOPLE = {
    "pis": "Pis Jurs later moved to Ranholm . Pis Jurs studied grammar .",
    "kala": "Kala Broster was born in Glanwick . By trade she was a clerk .",
    "mulo": "Mulo Trallow bought the ship Pisent . Mulo Trallow was born in Sanwick .",
    "jatha": "Jatha Jurlow was born in 1804 . Jatha Jurlow studied law .",
}
QUESTION = "Where was Kala Broster born ?"
LONG = AskOptions(max_tokens=24, min_tokens=24)


@dataclass
class ScriptedSearch:
    """A scripted staged search: its lists, and a callback after each."""

    lists: Sequence[Sequence[int]] = ()
    between: Callable[[int], None] = lambda stage: None
    chunks: list[ScoredChunk] = field(default_factory=list)

    generation = 0

    def embed_question(self, question: str) -> NDArray[np.float32]:
        raise AssertionError("the query cache is off")

    def search_staged(
        self, query: str, *, mode: SearchMode, top_k: int, num_stages: int, where: str
    ) -> Iterator[SearchResult]:
        lists = self.lists if num_stages > 1 else self.lists[-1:]
        for stage, places in enumerate(lists):
            yield SearchResult(tuple(self.chunks[place] for place in places), search_seconds=0.001)
            if stage < len(lists) - 1:
                self.between(stage)

    def stages(self, num_stages: int) -> Iterator[SearchResult]:
        return self.search_staged(QUESTION, mode="hybrid", top_k=2, num_stages=num_stages, where="")


@dataclass
class SpeculationFixture:
    script: ScriptedSearch
    backend: LocalBackend
    metrics: Metrics
    make: Callable[[SpeculationConfig], Pipeline]

    def ask(self, mode: str, options: AskOptions = LONG, num_samples: int = 1) -> list[Answer]:
        pipeline = self.make(SpeculationConfig(mode=mode))  # type: ignore[arg-type]
        streams = pipeline.streams(QUESTION, options, num_samples)
        for stream in streams:
            for _ in stream:
                pass
        return [stream.answer for stream in streams]

    def steps(self, number: int) -> None:
        """Let the engine make at least `number` steps, if it has work."""
        for _ in range(number):
            passed = threading.Event()
            self.backend.engine.run(lambda engine, passed=passed: passed.set())  # type: ignore[misc]
            assert passed.wait(10)

    def is_idle(self) -> bool:
        load = self.backend.load
        return load.num_waiting + load.num_running == 0 and load.num_free_blocks == load.num_blocks


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpeculationFixture]:
    folder = tmp_path_factory.mktemp("speculation")
    (folder / "docs").mkdir()
    for name, text in PEOPLE.items():
        (folder / "docs" / f"{name}.txt").write_text(text, encoding="utf-8")
    config = StillroomConfig()
    script, metrics, clock = ScriptedSearch(), Metrics(), SystemClock()
    with Stillroom.open(folder / "kb", config=config) as stillroom:
        stillroom.add(folder / "docs")
        found = {one.chunk.document_id: one for name in PEOPLE for one in stillroom.search(name, mode="sparse").results}
        script.chunks = [found[name] for name in sorted(found)]
        stillroom.warm_up()
        backend = stillroom._loader.backend
        assert isinstance(backend, LocalBackend) and len(script.chunks) == len(PEOPLE)
        search = QueryCache(script, QueryCacheConfig(max_tokens=0))
        traces = TraceLog(folder / "trace.sqlite", 0)

        def make(speculation: SpeculationConfig) -> Pipeline:
            own = replace(config, speculation=speculation)
            return Pipeline(stillroom._kb, search, backend, own, metrics, traces, clock)

        yield SpeculationFixture(script, backend, metrics, make)
        traces.close()


@pytest.fixture(autouse=True)
def every_block_is_free_afterwards(fixture: SpeculationFixture) -> Iterator[None]:
    fixture.script.between = lambda stage: None
    yield
    until(fixture.is_idle)


LISTS = st.lists(
    st.permutations(range(4)).flatmap(lambda all: st.integers(1, 4).map(lambda k: all[:k])), min_size=1, max_size=5
)


@settings(max_examples=15, deadline=None)
@given(
    lists=LISTS,
    steps=st.lists(st.integers(0, 6), min_size=5, max_size=5),
    temperature=st.sampled_from([0.0, 1.5]),
    num_samples=st.integers(1, 3),
)
def test_speculation_changes_no_token(
    fixture: SpeculationFixture, lists: list[list[int]], steps: list[int], temperature: float, num_samples: int
) -> None:
    options = AskOptions(max_tokens=8, temperature=temperature, seed=3)
    fixture.script.lists, fixture.script.between = lists, lambda stage: fixture.steps(steps[stage])
    early = fixture.ask("on", options, num_samples)
    plain = fixture.ask("off", options, num_samples)

    assert [answer.token_ids for answer in early] == [answer.token_ids for answer in plain]
    assert [answer.sources for answer in early] == [answer.sources for answer in plain]
    assert len({answer.request_id for answer in early}) == num_samples
    final = lists[-1]
    was_there = lists[-2:-1] == [final]
    report = early[0].speculation
    assert report.outcome == ("right" if was_there else "wrong" if len(lists) > 1 else "none")
    assert report.num_stages == len(lists)
    fixture.backend.engine.run(lambda engine: engine.check_integrity())
    until(fixture.is_idle)


def test_right_prompt_is_ahead_and_wrong_prompt_leaves_reusable_kv(fixture: SpeculationFixture) -> None:
    fixture.script.lists, fixture.script.between = [[1, 0], [1, 0]], lambda stage: fixture.steps(8)
    (right,) = fixture.ask("on")
    assert right.speculation.outcome == "right" and right.speculation.ahead_seconds > 0
    assert right.timing.ttft_seconds >= right.timing.retrieval_seconds, (
        "no token is delivered before the search has ended"
    )

    fixture.script.lists = [[3, 2], [3, 0]]
    (wrong,) = fixture.ask("on")
    assert wrong.speculation.outcome == "wrong" and wrong.speculation.num_started == 1
    shared = wrong.reuse.segments[1]
    assert (shared.kind, shared.source) == ("chunk", "device"), "KV of the wrong prompt's first document is reused"


def test_invalid_prompt_is_reported_for_the_final_list_only(fixture: SpeculationFixture) -> None:
    options = AskOptions(max_tokens=8, logit_bias={10**9: 1.0})
    fixture.script.lists = [[0], [1]]
    with pytest.raises(UsageError, match="logit_bias"):
        fixture.ask("on", options)


@pytest.mark.parametrize(
    ("num_waiting", "num_prefilling", "outcome"), [(1, 0, "none"), (0, 1, "none"), (0, 0, "right")]
)
def test_no_speculation_while_other_prompts_are_pending(
    fixture: SpeculationFixture, num_waiting: int, num_prefilling: int, outcome: str
) -> None:
    class Busy(LocalBackend):
        @property
        def load(self) -> Load:
            return Load(num_waiting, num_prefilling, num_prefilling=num_prefilling)

    one = fixture.backend
    busy = Busy(**{part.name: getattr(one, part.name) for part in fields(one)})
    fixture.script.lists = [[2, 1], [2, 1]]
    speculator = Speculator(busy, SpeculationConfig(mode="on"), SystemClock(), fixture.metrics)

    def attempt_with(found: Sequence[ScoredChunk]) -> Attempt:
        prepared = busy.prepare_prompt([one.chunk for one in found], QUESTION, None)
        name = RequestId(f"busy-{num_waiting}-{num_prefilling}")
        return Attempt(busy, prepared, [SampleRequest(request_id=name, sampling=SamplingParams(max_tokens=4))])

    found = speculator.find(fixture.script.stages, "hybrid", attempt_with)
    assert found.report.outcome == outcome
    found.attempt.cancel()


def test_failed_search_cancels_its_speculative_prefill(fixture: SpeculationFixture) -> None:
    def fail(stage: int) -> None:
        raise OSError("the index is gone")

    fixture.script.lists, fixture.script.between = [[0], [1]], fail
    with pytest.raises(OSError, match="gone"):
        fixture.ask("on")


def test_cancelling_during_the_search_cancels_its_speculative_prefill(fixture: SpeculationFixture) -> None:
    reached, proceed = threading.Event(), threading.Event()

    def wait(stage: int) -> None:
        reached.set()
        assert proceed.wait(10)

    fixture.script.lists, fixture.script.between = [[0, 1], [0, 1]], wait
    pipeline = fixture.make(SpeculationConfig(mode="on"))

    async def leave() -> None:
        asking = asyncio.ensure_future(pipeline.astreams(QUESTION, AskOptions(max_tokens=500, min_tokens=500), 1, 0.0))
        await asyncio.to_thread(reached.wait)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()  # before the search has ended
    proceed.set()
    until(fixture.is_idle)


def test_metrics_count_every_speculation(fixture: SpeculationFixture) -> None:
    fixture.script.lists = [[0], [0]]
    fixture.ask("on")
    fixture.ask("off")
    text = fixture.metrics.render().decode()
    assert 'stillroom_speculations_total{outcome="right"}' in text
    assert 'stillroom_speculations_total{outcome="off"}' in text
