"""Beginning early: whatever the stages of a search say, tokens, sources and free blocks are those of a plain search."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

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

PEOPLE = {
    "pis": "Pis Jurs later moved to Ranholm . Pis Jurs studied grammar .",
    "kala": "Kala Broster was born in Glanwick . By trade she was a clerk .",
    "mulo": "Mulo Trallow bought the ship Pisent . Mulo Trallow was born in Sanwick .",
    "jatha": "Jatha Jurlow was born in 1804 . Jatha Jurlow studied law .",
}
QUESTION = "Where was Kala Broster born ?"
LONG = AskOptions(max_tokens=24, min_tokens=24)


@dataclass
class Script:
    """A staged search that a test has written: lists, and what happens after each."""

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
class House:
    script: Script
    generator: LocalBackend
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
        """Let the engine make at least so many steps, if it has work."""
        for _ in range(number):
            passed = threading.Event()
            self.generator.engine.run(lambda engine, passed=passed: passed.set())  # type: ignore[misc]
            assert passed.wait(10)

    def is_idle(self) -> bool:
        load = self.generator.load
        return load.num_waiting + load.num_running == 0 and load.num_free_blocks == load.num_blocks


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("speculation")
    (folder / "docs").mkdir()
    for name, text in PEOPLE.items():
        (folder / "docs" / f"{name}.txt").write_text(text, encoding="utf-8")
    config = StillroomConfig()
    script, metrics, clock = Script(), Metrics(), SystemClock()
    with Stillroom.open(folder / "kb", config=config) as stillroom:
        stillroom.add(folder / "docs")
        found = {one.chunk.document_id: one for name in PEOPLE for one in stillroom.search(name, mode="sparse").results}
        script.chunks = [found[name] for name in sorted(found)]
        stillroom.warm_up()
        generator = stillroom._loader.backend
        assert isinstance(generator, LocalBackend) and len(script.chunks) == len(PEOPLE)
        search = QueryCache(script, QueryCacheConfig(max_tokens=0))
        traces = TraceLog(folder / "trace.sqlite", 0)

        def make(speculation: SpeculationConfig) -> Pipeline:
            own = replace(config, speculation=speculation)
            return Pipeline(stillroom._kb, search, generator, own, metrics, traces, clock)

        yield House(script, generator, metrics, make)
        traces.close()


@pytest.fixture(autouse=True)
def every_block_is_free_afterwards(house: House) -> Iterator[None]:
    house.script.between = lambda stage: None
    yield
    until(house.is_idle)


LISTS = st.lists(
    st.permutations(range(4)).flatmap(lambda all: st.integers(1, 4).map(lambda k: all[:k])), min_size=1, max_size=5
)


@settings(max_examples=40, deadline=None)
@given(
    lists=LISTS,
    steps=st.lists(st.integers(0, 6), min_size=5, max_size=5),
    temperature=st.sampled_from([0.0, 1.5]),
    num_samples=st.integers(1, 3),
)
def test_no_stage_changes_a_token(
    house: House, lists: list[list[int]], steps: list[int], temperature: float, num_samples: int
) -> None:
    options = AskOptions(max_tokens=8, temperature=temperature, seed=3)
    house.script.lists, house.script.between = lists, lambda stage: house.steps(steps[stage])
    early = house.ask("on", options, num_samples)
    plain = house.ask("off", options, num_samples)

    assert [answer.token_ids for answer in early] == [answer.token_ids for answer in plain]
    assert [answer.sources for answer in early] == [answer.sources for answer in plain]
    assert len({answer.request_id for answer in early}) == num_samples
    final = lists[-1]
    was_there = lists[-2:-1] == [final]
    report = early[0].speculation
    assert report.outcome == ("right" if was_there else "wrong" if len(lists) > 1 else "none")
    assert report.num_stages == len(lists)
    house.generator.engine.run(lambda engine: engine.check_integrity())
    until(house.is_idle)


def test_a_right_guess_is_ahead_and_a_wrong_one_leaves_shared_documents(house: House) -> None:
    house.script.lists, house.script.between = [[1, 0], [1, 0]], lambda stage: house.steps(8)
    (right,) = house.ask("on")
    assert right.speculation.outcome == "right" and right.speculation.ahead_seconds > 0
    assert right.timing.ttft_seconds >= right.timing.retrieval_seconds, (
        "nobody sees a token before the search has ended"
    )

    house.script.lists = [[3, 2], [3, 0]]
    (wrong,) = house.ask("on")
    assert wrong.speculation.outcome == "wrong" and wrong.speculation.num_started == 1
    shared = wrong.reuse.segments[1]
    assert (shared.kind, shared.source) == ("chunk", "device"), "the first document of the wrong prompt was computed"


def test_a_prompt_that_cannot_be_is_only_the_final_lists_fault(house: House) -> None:
    options = AskOptions(max_tokens=8, logit_bias={10**9: 1.0})
    house.script.lists = [[0], [1]]
    with pytest.raises(UsageError, match="logit_bias"):
        house.ask("on", options)


@pytest.mark.parametrize(
    ("num_waiting", "num_prefilling", "outcome"), [(1, 0, "none"), (0, 1, "none"), (0, 0, "right")]
)
def test_nothing_is_begun_beside_prompts_that_are_still_to_be_read(
    house: House, num_waiting: int, num_prefilling: int, outcome: str
) -> None:
    class Busy(LocalBackend):
        @property
        def load(self) -> Load:
            return Load(num_waiting, num_prefilling, num_prefilling=num_prefilling)

    one = house.generator
    busy = Busy(one.model, one.engine, one.cache, one.prompts, one.constraints)
    house.script.lists = [[2, 1], [2, 1]]
    speculator = Speculator(busy, SpeculationConfig(mode="on"), SystemClock(), house.metrics)

    def attempt_with(found: Sequence[ScoredChunk]) -> Attempt:
        prepared = busy.prepare_prompt([one.chunk for one in found], QUESTION, None)
        name = RequestId(f"busy-{num_waiting}-{num_prefilling}")
        return Attempt(busy, prepared, [SampleRequest(request_id=name, sampling=SamplingParams(max_tokens=4))])

    found = speculator.find(house.script.stages, "hybrid", attempt_with)
    assert found.report.outcome == outcome
    found.attempt.cancel()


def test_a_search_that_fails_leaves_nothing_behind(house: House) -> None:
    def fail(stage: int) -> None:
        raise OSError("the index is gone")

    house.script.lists, house.script.between = [[0], [1]], fail
    with pytest.raises(OSError, match="gone"):
        house.ask("on")


def test_who_leaves_while_the_search_runs_leaves_nothing_behind(house: House) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait(stage: int) -> None:
        reached.set()
        assert go_on.wait(10)

    house.script.lists, house.script.between = [[0, 1], [0, 1]], wait
    pipeline = house.make(SpeculationConfig(mode="on"))

    async def leave() -> None:
        asking = asyncio.ensure_future(pipeline.astreams(QUESTION, AskOptions(max_tokens=500, min_tokens=500), 1, 0.0))
        await asyncio.to_thread(reached.wait)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()  # with whoever left
    go_on.set()
    until(house.is_idle)


def test_the_metrics_count_every_question(house: House) -> None:
    house.script.lists = [[0], [0]]
    house.ask("on")
    house.ask("off")
    text = house.metrics.render().decode()
    assert 'stillroom_speculations_total{outcome="right"}' in text
    assert 'stillroom_speculations_total{outcome="off"}' in text
