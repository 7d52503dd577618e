"""Times of an answer, from its events."""

from stillroom.core.ids import RequestId
from stillroom.engine.events import TokenEvent
from stillroom.rag.answer_collector import AnswerProgress, AnswerStart


def test_a_token_of_speculation_counts_from_the_end_of_the_search_on() -> None:
    name = RequestId("a")
    progress = AnswerProgress(AnswerStart(name, arrival=10.0, retrieval_seconds=0.5, sources=(), num_prompt_tokens=9))
    progress.note(TokenEvent(name, 7, None, at=10.2))
    early = progress.timing(1)
    assert (early.retrieval_seconds, early.ttft_seconds, early.total_seconds) == (0.5, 0.5, 0.5)
    progress.note(TokenEvent(name, 8, None, at=11.0))
    late = progress.timing(2)
    assert (late.ttft_seconds, late.tpot_seconds, late.total_seconds) == (0.5, 0.5, 1.0)
