"""Phases of an answer's timing."""

from dataclasses import dataclass

import pytest

from stillroom.core.ids import RequestId
from stillroom.core.request import Admission, FinishReason
from stillroom.engine.events import TokenEvent
from stillroom.rag.answer import Answer, Timing
from stillroom.rag.stream import AnswerCollector, AnswerStart

NAME = RequestId("req-1")


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
