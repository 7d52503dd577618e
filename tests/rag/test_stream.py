"""Phases of an answer's timing; when its citations are found."""

import asyncio
import queue
import threading
from dataclasses import dataclass

import pytest

from stillroom.core.ids import RequestId
from stillroom.core.request import Admission, FinishReason
from stillroom.engine.events import TokenEvent
from stillroom.rag.answer import Answer, Citation, Support, Timing
from stillroom.rag.answer_collector import AnswerCollector, AnswerStart, Cite
from stillroom.rag.stream import AnswerStream, AsyncAnswerStream

NAME = RequestId("req-1")
CITATION = Citation(0, "", "", "", 0, 0, 0, 0, "", 0, 0, 0, 3, False, Support.UNSUPPORTED)


@dataclass(frozen=True)
class PhaseCase:
    """A question that arrives at 10, ends its search at 12, and has its first token at 20 and its last at 25."""

    admission: Admission | None
    phases: tuple[float | None, float | None, float | None]


@pytest.mark.parametrize(
    "case",
    [
        PhaseCase(Admission(13.0, 16.0), (1.0, 3.0, 4.0)),
        PhaseCase(Admission(11.0, 15.0), (0.0, 3.0, 5.0)),  # admitted before the search ended
        PhaseCase(Admission(11.0, 11.5), (0.0, 0.0, 8.0)),
        PhaseCase(None, (None, None, None)),  # a server elsewhere
    ],
)
def test_phases_follow_the_search_and_add_up_to_the_first_token(case: PhaseCase) -> None:
    timing = _timing(case.admission)

    assert (timing.queue_seconds, timing.load_seconds, timing.prefill_seconds) == case.phases
    assert (timing.retrieval_seconds, timing.ttft_seconds, timing.total_seconds) == (2.0, 10.0, 15.0)
    if case.admission is not None:
        assert sum(seconds or 0.0 for seconds in case.phases) + timing.retrieval_seconds == timing.ttft_seconds


def _timing(admission: Admission | None) -> Timing:
    answers: list[Answer] = []
    started = AnswerStart(NAME, arrival=10.0, retrieval_seconds=2.0, sources=(), num_prompt_tokens=3)
    collector = AnswerCollector(started, None, (), answers.append)
    collector.feed(TokenEvent(NAME, None, None, 20.0, text="Yes", admission=admission))
    collector.feed(TokenEvent(NAME, None, FinishReason.STOP, 25.0))
    return answers[0].timing


def _collector(cite: Cite | None, answers: list[Answer]) -> AnswerCollector:
    started = AnswerStart(NAME, arrival=10.0, retrieval_seconds=2.0, sources=(), num_prompt_tokens=3)
    return AnswerCollector(started, None, (), answers.append, cite=cite)


def test_citations_are_found_after_the_last_text_was_delivered_and_only_once() -> None:
    answers: list[Answer] = []
    calls: list[Answer] = []

    def cite(answer: Answer) -> tuple[Citation, ...]:
        calls.append(answer)
        return (CITATION,)

    collector = _collector(cite, answers)
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    events.put(TokenEvent(NAME, None, FinishReason.STOP, 25.0, text="Yes"))
    stream = AnswerStream(collector, events, lambda: None)
    assert next(stream) == "Yes"
    assert not calls and not answers
    assert list(stream) == []
    assert stream.answer.citations == (CITATION,)
    assert [answer.citations for answer in answers] == [(CITATION,)]
    assert len(calls) == 1


def test_citations_are_found_outside_of_the_event_loop() -> None:
    threads: list[int] = []

    def cite(answer: Answer) -> tuple[Citation, ...]:
        threads.append(threading.get_ident())
        return (CITATION,)

    async def read() -> Answer:
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        events.put_nowait(TokenEvent(NAME, None, FinishReason.STOP, 25.0, text="Yes"))
        stream = AsyncAnswerStream(_collector(cite, []), events, lambda: None)
        assert [piece async for piece in stream] == ["Yes"]
        return stream.answer

    assert asyncio.run(read()).citations == (CITATION,)
    assert threads and threading.get_ident() not in threads


def test_failing_citations_leave_the_answer_without_them(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Answer] = []

    def cite(answer: Answer) -> tuple[Citation, ...]:
        raise ValueError("broken")

    collector = _collector(cite, answers)
    collector.feed(TokenEvent(NAME, None, FinishReason.STOP, 25.0, text="Yes"))
    collector.complete()
    assert [(answer.text, answer.citations) for answer in answers] == [("Yes", ())]
    assert "broken" in caplog.text


def test_answer_whose_stream_is_closed_before_its_end_is_recorded_without_citations() -> None:
    answers: list[Answer] = []
    collector = _collector(lambda answer: (CITATION,), answers)
    collector.feed(TokenEvent(NAME, None, FinishReason.STOP, 25.0, text="Yes"))
    AnswerStream(collector, queue.SimpleQueue(), lambda: None).cancel()
    assert [answer.citations for answer in answers] == [()]
