"""Metrics count each answer once: complete, aborted, failed or unread, with a search or without."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stillroom.config.settings import SpeculationConfig, StillroomConfig
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason
from stillroom.engine.deadlines import deadline_error
from stillroom.engine.events import RemoteUsage, TokenEvent
from stillroom.errors import DeadlineExceededError, EngineError
from stillroom.rag.accounting import Account
from stillroom.rag.answer import AskOptions
from stillroom.rag.answer_collector import AnswerCollector, AnswerStart
from stillroom.rag.stillroom import Stillroom
from stillroom.telemetry.metrics import Metrics
from tests.server.fakes import until
from tests.server.knowledge import QUESTION, write_knowledge
from tests.server.test_metrics import samples

pytestmark = pytest.mark.microworld

LONG = AskOptions(max_tokens=1500, min_tokens=1500, temperature=50.0, seed=3)
COUNTED = (
    "stillroom_prompt_tokens_total",
    "stillroom_generated_tokens_total",
    "stillroom_retrieval_seconds_count",
    "stillroom_time_to_first_token_seconds_count",
    "stillroom_request_seconds_count",
)


def event(at: float, reason: FinishReason | None = None, *, token: int | None = None, **more: object) -> TokenEvent:
    return TokenEvent(RequestId("req-1"), token, reason, at, **more)  # type: ignore[arg-type]


def accounted(*events: TokenEvent, is_first: bool = True, has_searched: bool = True) -> dict[str, float]:
    metrics = Metrics()
    started = AnswerStart(RequestId("req-1"), 10.0, 0.5, (), 100)
    collector = AnswerCollector(started, None, (), lambda answer: None)
    account = Account(metrics, collector, is_first=is_first, has_searched=has_searched)
    for one in events:
        account.note(one)
    return samples(metrics)


def test_aborted_answer_counts_the_tokens_generated_before() -> None:
    ended = event(19.0, FinishReason.ABORTED, error=deadline_error())
    seen = accounted(event(12.0, token=1), event(12.5, token=2), event(14.0, token=3), ended)

    assert seen["stillroom_requests_total{outcome=aborted}"] == 1
    assert [seen[name] for name in COUNTED] == [100, 3, 1, 1, 0], "only complete answers have a total time"
    assert seen["stillroom_time_to_first_token_seconds_sum"] == 2.0
    assert seen["stillroom_time_per_output_token_seconds_sum"] == 1.0, "up to its last token"


def test_request_that_fails_before_prefill_counts_no_prompt_tokens() -> None:
    seen = accounted(event(19.0, FinishReason.ABORTED, error=EngineError("it broke")))

    assert seen["stillroom_requests_total{outcome=failed}"] == 1
    assert [seen[name] for name in COUNTED] == [0, 0, 1, 0, 0]


def test_answer_without_tokens_has_no_time_to_first_token() -> None:
    seen = accounted(event(12.0, FinishReason.STOP))

    assert [seen[name] for name in COUNTED] == [100, 0, 1, 0, 1]


def test_usage_of_a_remote_engine_is_counted_as_reported() -> None:
    seen = accounted(event(12.0, text="a b"), event(13.0, FinishReason.LENGTH, usage=RemoteUsage(90, 60, 7)))

    assert [seen[name] for name in COUNTED] == [90, 7, 1, 1, 1]
    assert seen["stillroom_cached_tokens_total"] == 60


def test_only_the_first_of_several_answers_counts_prompt_and_search() -> None:
    seen = accounted(event(12.0, token=1), event(13.0, FinishReason.STOP, token=2), is_first=False)

    assert seen["stillroom_requests_total{outcome=stop}"] == 1
    assert [seen[name] for name in COUNTED] == [0, 2, 0, 0, 1]
    assert "stillroom_phase_seconds_count{phase=queue}" not in seen


def test_raw_prompt_counts_no_search() -> None:
    seen = accounted(event(12.0, FinishReason.LENGTH, token=1), has_searched=False)

    assert [seen[name] for name in COUNTED] == [100, 1, 0, 1, 1]


@pytest.fixture(scope="module")
def stillroom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stillroom]:
    folder = tmp_path_factory.mktemp("accounting")
    with Stillroom.open(folder / "kb", config=StillroomConfig(speculation=SpeculationConfig(mode="off"))) as stillroom:
        stillroom.add(write_knowledge(folder / "docs"))
        stillroom.warm_up()
        yield stillroom


class Growth:
    """Differences of metrics since it was created."""

    def __init__(self, stillroom: Stillroom) -> None:
        self._stillroom = stillroom
        self._before = samples(stillroom.metrics)

    def __getitem__(self, name: str) -> float:
        return samples(self._stillroom.metrics)[name] - self._before.get(name, 0.0)


def test_several_answers_count_as_one_question(stillroom: Stillroom) -> None:
    growth = Growth(stillroom)
    answers = stillroom.ask_several(QUESTION, 4, AskOptions(max_tokens=3, min_tokens=3))

    assert sum(growth[f"stillroom_requests_total{{outcome={how}}}"] for how in ("stop", "length")) == 4
    expected = [answers[0].reuse.num_prompt_tokens, 12, 1, 1, 4]
    assert [growth[name] for name in COUNTED] == expected
    assert growth["stillroom_cached_tokens_total"] == answers[0].reuse.num_cached_tokens


def test_cancelled_stream_counts_the_tokens_generated_before(stillroom: Stillroom) -> None:
    growth = Growth(stillroom)
    stream = stillroom.stream(QUESTION, LONG)
    next(iter(stream))
    stream.cancel()

    until(lambda: growth["stillroom_requests_total{outcome=aborted}"] == 1)
    assert growth["stillroom_generated_tokens_total"] >= 1
    assert growth["stillroom_time_to_first_token_seconds_count"] == 1


def test_unread_answer_is_counted(stillroom: Stillroom) -> None:
    growth = Growth(stillroom)
    stillroom.stream(QUESTION, AskOptions(max_tokens=3, min_tokens=3))

    until(lambda: growth["stillroom_request_seconds_count"] == 1)
    assert growth["stillroom_generated_tokens_total"] == 3


def test_continuation_counts_no_search(stillroom: Stillroom) -> None:
    growth = Growth(stillroom)

    async def read() -> None:
        [stream] = await stillroom.acontinue(QUESTION, AskOptions(max_tokens=2))
        async for _ in stream:
            pass

    asyncio.run(read())
    assert growth["stillroom_request_seconds_count"] == 1 and growth["stillroom_retrieval_seconds_count"] == 0


def test_deadline_during_the_search_counts_as_aborted(stillroom: Stillroom, monkeypatch: pytest.MonkeyPatch) -> None:
    search = stillroom._search.search_staged

    is_late = threading.Event()

    def slow(*arguments: object) -> object:
        assert is_late.wait(30)
        return search(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(stillroom._search, "search_staged", slow)
    growth = Growth(stillroom)

    async def ask() -> None:
        try:
            await stillroom.astreams(QUESTION, AskOptions(deadline_seconds=0.1), n=2)
        finally:
            is_late.set()

    with pytest.raises(DeadlineExceededError):
        asyncio.run(ask())
    assert growth["stillroom_requests_total{outcome=aborted}"] == 2
    assert [growth[name] for name in COUNTED] == [0, 0, 0, 0, 0]


def test_document_gauge_includes_documents_of_another_process(stillroom: Stillroom, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("Dola Kenric bought the ship Perint .", encoding="utf-8")
    growth = Growth(stillroom)
    with Stillroom.open(stillroom._kb.path) as other:
        other.add(tmp_path / "more.txt")

    assert growth["stillroom_documents"] == 1
