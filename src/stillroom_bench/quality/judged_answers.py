"""Compares one answer with the accepted ones: its words, its quote, its citations, and whether it abstains."""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stillroom.answer_quality.answer_metrics import exact_match, normalised, word_f1
from stillroom.rag.answer import Answer
from stillroom.rag.citations import says_nothing

COMPARED = ("exact_match", "f1", "quoted", "is_cited", "is_retrieved")
"""Measures that compare with accepted answers."""

_MARKER = re.compile(r"\s*\[\d+\]")


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """Measures of one answer, each 0 or 1 except `f1`, `confidence` and the times. Those that compare with accepted
    answers are NaN if there are none."""

    exact_match: float
    """Of the span that the reader marks, else of the text without numbers of sources; as SQuAD 1.1."""
    f1: float
    quoted: float
    """Whether the text holds an accepted answer as whole words."""
    is_cited: float
    """Whether a cited source is a gold passage or holds an accepted answer; NaN if the answer abstains."""
    is_retrieved: float
    """Whether a source is a gold passage or holds an accepted answer."""
    is_answered: float
    """0 if it says that the documents do not say."""
    confidence: float
    """The model's probability that the sources answer the question; NaN if it has none."""
    answer_seconds: float
    """From the question to the end of the answer, with the search."""
    after_search_seconds: float
    """The part after the search."""


def judged(answer: Answer, accepted: Sequence[str], gold: Collection[str], seconds: float) -> JudgedAnswer:
    """Judge an answer.

    Args:
        accepted: answers; empty if the documents that were searched do not hold one.
        gold: ids of the documents that hold the answer, as in `Source.document`.
        seconds: time to the answer.
    """
    is_answered = not abstains(answer)
    return JudgedAnswer(
        **_compared(answer, accepted, gold, is_answered),
        is_answered=float(is_answered),
        confidence=math.nan if answer.confidence is None else answer.confidence,
        answer_seconds=seconds,
        after_search_seconds=answer.timing.total_seconds - answer.timing.retrieval_seconds,
    )


def _compared(answer: Answer, accepted: Sequence[str], gold: Collection[str], is_answered: bool) -> dict[str, float]:
    if not accepted:
        return dict.fromkeys(COMPARED, math.nan)
    text = without_markers(answer.text)
    short = answer.text[slice(*answer.highlight)] if answer.highlight else text
    right = {
        source.position for source in answer.sources if source.document in gold or holds_answer(source.text, accepted)
    }
    cited = {citation.source for citation in answer.citations}
    return {
        "exact_match": exact_match(short, accepted) if is_answered else 0.0,
        "f1": word_f1(short, accepted) if is_answered else 0.0,
        "quoted": float(is_answered and holds_answer(text, accepted)),
        "is_cited": float(bool(cited & right)) if is_answered else math.nan,
        "is_retrieved": float(bool(right)),
    }


def refused(accepted: Sequence[str], seconds: float) -> JudgedAnswer:
    """Return the measures of a question for which the search found nothing, so that nothing was generated."""
    compared = dict.fromkeys(COMPARED, 0.0 if accepted else math.nan) | {"is_cited": math.nan}
    return JudgedAnswer(
        **compared, is_answered=0.0, confidence=0.0, answer_seconds=seconds, after_search_seconds=math.nan
    )


def without_markers(text: str) -> str:
    """Return a text without numbers of sources such as `[2]`."""
    return _MARKER.sub("", text).strip()


def abstains(answer: Answer) -> bool:
    """Return whether an answer only says that the documents do not say, or is empty."""
    text = without_markers(answer.text)
    return not text or (answer.highlight is None and says_nothing(text))


def holds_answer(text: str, accepted: Sequence[str]) -> bool:
    """Return whether a text holds an accepted answer as whole words, after SQuAD's normalisation."""
    padded = f" {normalised(text)} "
    return any(f" {normalised(one)} " in padded for one in accepted if normalised(one))
